import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.vllm.discovery import VllmMetrics, read_metrics

PAGE = b"""\
process_start_time_seconds 1.7952503577e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.1
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 847.0
vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 3.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 384.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 400.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 63.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.795250395377022e+09
vllm:prefix_cache_queries_created{engine="1",model_name="tiny"} 1.795250395377099e+09
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="200"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="1",num_gpu_blocks="None"} 1.0
"""


def test_one_rank_of_a_page():
    assert read_metrics(PAGE, 0) == VllmMetrics(
        ranks=(0, 1),
        identity="1795250357.700000-1795250395.377022",
        running=3,
        waiting=2,
        usage=0.5,
        block_size=32,
        blocks=99,
        caching=True,
        queries=847,
        hits=384,
        fetched=63,
    )
    other = read_metrics(PAGE, 1)
    assert (other.blocks, other.caching, other.tells_blocks, other.hits) == (None, False, False, 0)
    assert other.identity == "1795250357.700000-1795250395.377099"


def test_lmcache_below_it_shows():
    line = b'vllm:lmcache_mp_lookup_duration_seconds_count{engine="1",model_name="tiny"} 0.0\n'
    assert [read_metrics(PAGE + line, rank).lmcache for rank in (None, 0, 1)] == [True, False, True]
    assert not read_metrics(PAGE).lmcache


def test_all_ranks_together():
    both = read_metrics(PAGE)
    assert (both.running, both.waiting, both.usage, both.queries) == (4, 2, 0.3, 850)
    assert both.blocks == 198


def test_ranks_on_which_nothing_has_run_yet():
    page = b"\n".join(line for line in PAGE.splitlines() if b"cache_config_info" in line)
    seen = read_metrics(page, 0)
    assert (seen.ranks, seen.blocks, seen.running, seen.identity) == ((0, 1), 99, 0, None)


def test_a_page_that_tells_nothing_of_the_engine():
    assert read_metrics(b"process_start_time_seconds 5\n") == VllmMetrics(identity="5.000000")
    assert read_metrics(b"") == VllmMetrics()
    assert not VllmMetrics().tells_blocks
    with pytest.raises(EngineUnavailable):
        read_metrics(b"process_start_time_seconds soon\n")


@pytest.mark.parametrize(
    ("ranks", "addressable"), [((0, 1, 2), (0, 1, 2)), ((2, 3), ()), ((1,), ()), ((), ())]
)
def test_ranks_that_requests_cannot_name_are_none(ranks, addressable):
    assert VllmMetrics(ranks=ranks).addressable_ranks == addressable
