import asyncio
from array import array

import pytest

from engine_adapter import EngineRejected, Role
from engine_adapter.hold import Rendezvous
from engine_adapter.vllm.kv_transfer import NixlPull
from proxy.core.admission import Needs
from proxy.fleet.destinations import of_role, of_sharing
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.prompt import Prompt
from tests.fakes import INFO, FakeAdapter, add_ready


def pool_of(fleet, **roles):
    for name, role in roles.items():
        add_ready(fleet, name, role=role)
    return fleet.pools["m"]


def test_an_engine_that_shares_kv_beside_one_that_does_not_has_a_finding():
    fleet = Fleet()
    sharing = fleet.add(FakeAdapter("a", share_kv=True))
    pool = fleet.join(sharing, INFO)
    assert of_sharing(sharing, None) == of_sharing(sharing, pool) == ()
    other = add_ready(fleet, "b")
    (finding,) = of_sharing(sharing, pool)
    assert finding.problem.startswith("tenants may share its KV, and not that of b: ")
    assert of_sharing(other, pool) == ()


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


class TestHalves:
    """Engines that answer only together with another one; how they do: tests/live/test_halves.py."""

    @pytest.fixture
    def pool(self, fleet):
        pool = pool_of(fleet, p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE, b=Role.BOTH)
        for name in "pqd":
            engine = fleet.engines[name]
            engine.adapter.rendezvous = Rendezvous("nixl", "", frozenset(), dict)
            fleet.join(engine, engine.info)
            engine.state = EngineState.READY
        return pool

    def partners(self, pool, **more):
        found = pool.candidates(None, **more)
        return {each.engine: [partner.engine for partner in each.partners] for each in found}

    def test_the_pool_is_as_busy_as_those_that_compute_prompts(self, fleet, pool):
        for _ in range(8):
            pool.placer.demand.placed(1.0, 0.2)
        strain = pool.placer.outlook(1.0).strain
        assert 1.5 < strain < 2
        for name in "efgh":
            engine = add_ready(fleet, name, role=Role.DECODE)
            engine.adapter.rendezvous = Rendezvous("nixl", "", frozenset(), dict)
            fleet.join(engine, engine.info)
        assert pool.placer.outlook(1.0).strain == strain
        fleet.leave(fleet.engines["b"])
        assert pool.placer.outlook(1.0).strain > strain

    def test_only_with_those_that_move_kv_alike(self, fleet, pool):
        fleet.engines["q"].adapter.rendezvous = Rendezvous("mooncake", "", frozenset(), dict)
        assert self.partners(pool) == {"b": [], "d": ["p"]}
        (finding,) = of_role(fleet.engines["q"], pool)
        assert "no engine of its model the decode half: it gets no requests" in finding.problem
        assert of_role(fleet.engines["d"], pool) == ()


class TestPrefillers:
    """The engines that may compute a prompt for others."""

    @pytest.fixture
    def pool(self, fleet):
        pool = pool_of(fleet, p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE, b=Role.BOTH)
        for name in "pqd":  # the connector of b is not known
            fleet.engines[name].adapter.transfer = NixlPull(30.0)
        return pool

    def found(self, pool, *, lora=None, moves_by=lambda _: True):
        chain = pool.chain(Prompt(array("i", range(40))))
        prefillers = pool.prefillers(pool.candidates(chain), chain, lora, moves_by)
        if prefillers is None:
            return None
        return [each.engine for each in prefillers.candidates], prefillers.decoders

    def test_are_those_that_are_well_and_keep_kv(self, fleet, pool):
        assert self.found(pool) == (["p", "q"], {"d"})
        fleet.engines["p"].state = EngineState.SUSPECT
        assert self.found(pool) == (["q"], {"d"})
        fleet.engines["q"].keeps_no_kv = True
        assert self.found(pool) is None
        assert "--kv-transfer-config" in str(of_role(fleet.engines["q"], pool)[0])
        fleet.join(fleet.engines["q"], fleet.engines["q"].info)
        assert self.found(pool) == (["q"], {"d"}), "it was restarted"

    def test_an_engine_whose_requests_fail_gets_none(self, fleet, pool):
        for _ in range(20):
            fleet.engines["p"].refused(EngineRejected("x", status=503))
        fleet.engines["p"].leases.add(Underway())
        assert self.found(pool) == (["q"], {"d"})

    def test_move_kv_by_the_same_means(self, fleet, pool):
        other = NixlPull(30.0)
        other.name = "another"
        fleet.engines["d"].adapter.transfer = other
        assert self.found(pool) is None
        fleet.engines["d"].adapter.transfer = None
        assert self.found(pool) is None


class TestHolders:
    """Engines without a role that may give KV to others."""

    @pytest.fixture
    def pool(self, fleet):
        pool = pool_of(fleet, a=Role.BOTH, b=Role.BOTH, c=Role.BOTH)
        for name in "ab":  # the connector of c is not known
            fleet.engines[name].adapter.transfer = NixlPull(30.0)
        return pool

    def found(self, pool, candidates=None, moves_by=lambda _: True):
        chain = pool.chain(Prompt(array("i", range(40))))
        found = pool.prefillers(candidates or pool.candidates(chain), chain, None, moves_by)
        if found is None:
            return None
        assert found.candidates == []
        return [each.engine for each in found.holders], found.decoders

    def test_serve_the_same_requests_as_those_that_they_serve_alone(self, pool):
        only = [each for each in pool.candidates(None) if each.engine != "a"]
        assert self.found(pool, only) == (["b"], {"b"})
        assert self.found(pool, moves_by=lambda _: False) is None

    def test_give_to_engines_for_decoding_and_read_from_those_for_prefills(self, fleet, pool):
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            add_ready(fleet, name, role=role).adapter.transfer = NixlPull(30.0)
        chain = pool.chain(Prompt(array("i", range(40))))
        found = pool.prefillers(pool.candidates(chain), chain, None, lambda _: True)
        assert [each.engine for each in found.candidates] == ["p"]
        assert [each.engine for each in found.holders] == ["a", "b"]
        assert found.decoders == {"a", "b", "d"}


class Underway:
    """A lease whose answer has not begun."""

    begun = asyncio.Event()
