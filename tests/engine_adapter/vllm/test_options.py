from engine_adapter.options import read_options
from engine_adapter.vllm.options import VllmOptions, rank_headers


def test_a_rank_with_an_lmcache():
    options = read_options("vllm", VllmOptions, {"dp_rank": "2", "lmcache": "http://h:2"})
    assert options == VllmOptions(dp_rank=2, lmcache="http://h:2")


def test_a_rank_is_named_in_a_header():
    assert rank_headers(2) == {"x-data-parallel-rank": "2"}
    assert rank_headers(None) == {}
