import pytest

from proxy.replay.kvpin import TERMS, Kvpin
from proxy.replay.policy import Policy
from proxy.replay.policy_names import ABLATIONS, GROUPS, NAMES, ORACLE, POLICIES, UnknownPolicy, make, resolve
from tests.proxy.replay.making import Telling, ask, fleet_of


def test_groups_are_spelled_out_and_names_come_once():
    assert resolve(["sglang", "kvpin", "sglang"]) == ("sglang", "kvpin")
    assert resolve(["oracle", "all"]) == (ORACLE, *POLICIES)
    assert resolve(["ablations"]) == ("kvpin", *(f"kvpin-no-{term}" for term in TERMS))


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(UnknownPolicy, match=r"no policy 'x'; there are all, ablations, kvpin, .*oracle"):
        resolve(["kvpin", "x"])


@pytest.mark.parametrize("name", [name for name in NAMES if name != ORACLE])
def test_each_can_be_made_and_places(name):
    policy: Policy = make(name, fleet_of(1), 0)
    assert policy.choose(0.0, ask((1,)), [Telling(0.0)]).engine == 0


def test_ablations_are_kvpin_without_a_term():
    for name in ABLATIONS:
        assert isinstance(make(name, fleet_of(), 0), Kvpin)
    assert set(GROUPS) == {"all", "ablations"}
