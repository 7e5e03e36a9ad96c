import pytest

from engine_adapter import Role
from proxy.core.admission import Needs
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.roles import of_role
from tests.fakes import add_ready


@pytest.fixture
def fleet():
    return Fleet()


def pool_of(fleet, **roles):
    for name, role in roles.items():
        add_ready(fleet, name, role=role)
    return fleet.pools["m"]


def able(pool, *, without=()):
    return [candidate.engine for candidate in pool.candidates(None, without=without)]


def test_an_engine_for_prefills_answers_only_where_no_other_can(fleet):
    pool = pool_of(fleet, p=Role.PREFILL, d=Role.DECODE, b=Role.BOTH)
    assert pool.has_roles
    assert able(pool) == ["d", "b"]
    assert pool.engines_for(Needs()) == {"d", "b"}
    assert able(pool, without={"d", "b"}) == ["p"]
    for name in "db":
        fleet.engines[name].state = EngineState.SUSPECT
    assert able(pool) == ["d", "b"], "an engine that is checked is still rather asked"
    for name in "db":
        fleet.engines[name].state = EngineState.DOWN
    assert able(pool) == ["p"]


def test_a_pool_knows_whether_any_engine_has_a_role(fleet):
    pool = pool_of(fleet, b=Role.BOTH)
    assert not pool.has_roles
    add_ready(fleet, "p", role=Role.PREFILL)
    assert pool.has_roles
    fleet.remove(fleet.engines["p"])
    assert not pool.has_roles
    assert able(pool) == ["b"]


@pytest.mark.parametrize(
    ("roles", "engine", "said"),
    [
        ({"p": Role.PREFILL}, "p", "it answers itself"),
        ({"p": Role.PREFILL, "b": Role.BOTH}, "p", "only when no other engine can"),
        ({"d": Role.DECODE, "b": Role.BOTH}, "d", "it computes all prompts"),
        ({"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}, "p", None),
        ({"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}, "d", None),
        ({"p": Role.PREFILL, "b": Role.BOTH}, "b", None),
    ],
)
def test_a_role_without_its_counterpart_is_a_finding(fleet, roles, engine, said):
    pool = pool_of(fleet, **roles)
    found = [str(each) for each in of_role(fleet.engines[engine], pool)]
    assert [said in each for each in found] == ([True] if said is not None else [])
    assert of_role(fleet.engines[engine], None) == ()
