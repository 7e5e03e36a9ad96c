from msgspec.structs import replace

from proxy.core.peers.matching import disagreement, hash_alike, match
from proxy.core.peers.messages import ToldEngine

OWN = ToldEngine("gpu", "http://one:8000", False, "m", 16)
COUNTED = ToldEngine("vllm-0", "http://two:8000", False, "m", 16)
LOCAL = ToldEngine("near", "host http://127.0.0.1:8000", True, "m", 16)
ALL = [OWN, COUNTED, LOCAL]


def test_by_address_first():
    assert match(replace(OWN, id="vllm-0"), ALL) is OWN
    assert match(replace(COUNTED, id="gpu"), ALL) is COUNTED
    assert match(replace(LOCAL, id="x"), ALL) is LOCAL


def test_by_an_id_that_the_operator_gave():
    assert match(replace(OWN, address="http://10.0.0.1:8000"), ALL) is OWN


def test_a_counted_id_or_one_of_a_single_machine_says_nothing():
    assert match(replace(COUNTED, address="http://10.0.0.2:8000"), ALL) is None
    rank = replace(COUNTED, id="vllm-0-dp1", address="http://two:8000 rank 1")
    assert match(replace(rank, address="http://10.0.0.2:8000 rank 1"), [rank]) is None
    assert match(replace(LOCAL, address="elsewhere http://127.0.0.1:8000"), ALL) is None
    assert match(replace(OWN, address="elsewhere http://127.0.0.1:8000", is_local=True), ALL) is None
    assert match(replace(LOCAL, address="http://10.0.0.3:8000", is_local=False), ALL) is None


def test_two_that_hash_alike_agree():
    assert disagreement(replace(OWN, id="other"), ALL) is None
    assert hash_alike(OWN, COUNTED)


def test_an_engine_that_only_one_has_is_no_disagreement():
    assert disagreement(replace(OWN, id="new", address="http://new:1"), ALL) is None


def test_one_counted_id_for_two_engines():
    said = disagreement(replace(COUNTED, address="http://10.0.0.2:8000"), ALL)
    assert said.startswith(
        "engine 'vllm-0' is http://10.0.0.2:8000 there and http://two:8000 here, so it counts as two"
    )


def test_two_addresses_of_single_machines_are_two_engines_whatever_their_ids():
    assert disagreement(replace(LOCAL, address="host http://127.0.0.1:8001"), ALL) is None
    assert disagreement(replace(LOCAL, address="http://10.0.0.3:8000", is_local=False), ALL) is not None


def test_other_hashes_share_only_load():
    assert "only its load is shared" in disagreement(replace(OWN, model="n"), ALL)
    assert not hash_alike(replace(OWN, tokens_per_block=8), OWN)
    assert disagreement(replace(OWN, model=None), ALL) is None  # not connected yet
