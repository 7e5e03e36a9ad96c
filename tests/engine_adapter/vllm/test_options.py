import pytest

from engine_adapter.options import OptionError, read_options
from engine_adapter.vllm.options import VllmOptions


def test_a_rank_with_an_lmcache():
    options = read_options("vllm", VllmOptions, {"dp_rank": "2", "lmcache": "http://h:2"})
    assert options == VllmOptions(dp_rank=2, lmcache="http://h:2")


def test_a_connector_that_kvpin_knows():
    assert read_options("vllm", VllmOptions, {"kv_transfer": "nixl"}).kv_transfer == "nixl"
    with pytest.raises(OptionError, match=r"kv_transfer: must be nixl\Z"):
        read_options("vllm", VllmOptions, {"kv_transfer": "mooncake"})


def test_a_lease_is_longer_than_the_time_to_fetch():
    assert read_options("vllm", VllmOptions, {"kv_lease_s": "12"}).kv_lease_s == 12
    with pytest.raises(OptionError, match="kv_lease_s: must be a number above 5"):
        read_options("vllm", VllmOptions, {"kv_lease_s": "5"})
