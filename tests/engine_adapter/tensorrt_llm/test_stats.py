import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.tensorrt_llm.discovery import ServerFigures, read_iterations, read_prometheus

PAGE = b"""\
trtllm_num_requests_running{engine_type="pytorch",pid="1"} 3.0
trtllm_num_requests_running{engine_type="pytorch",pid="2"} 0.0
trtllm_num_requests_waiting{engine_type="pytorch"} 4.0
trtllm_kv_cache_max_blocks{engine_type="pytorch"} 200.0
trtllm_kv_cache_used_blocks{engine_type="pytorch"} 50.0
trtllm_kv_cache_tokens_per_block{engine_type="pytorch"} 64.0
trtllm_kv_cache_config_info{enable_block_reuse="True",enable_partial_reuse="False"} 1.0
trtllm_model_config_info{model="/models/m",max_model_len="4096"} 1.0
"""


def test_what_the_page_says():
    assert read_prometheus(PAGE) == ServerFigures(
        running=3,
        waiting=4,
        gpu_usage=0.25,
        tokens_per_block=64,
        gpu_blocks=200,
        block_reuse=True,
        partial_reuse=False,
        model="/models/m",
        max_model_len=4096,
    )


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"trtllm_kv_cache_max_blocks 0\ntrtllm_kv_cache_used_blocks NaN\n",
        b"trtllm_kv_cache_tokens_per_block 0\n",
        b'trtllm_model_config_info{max_model_len="None"} 1\ntrtllm_kv_cache_config_info{page="1"} 1\n',
    ],
)
def test_a_page_that_says_nothing(page):
    assert read_prometheus(page) == ServerFigures()


def test_a_page_of_another_kind():
    with pytest.raises(EngineUnavailable):
        read_prometheus(b"\xff trtllm")


def test_the_last_step_counts():
    steps = [
        {"numActiveRequests": 9, "numQueuedRequests": 9},
        {
            "numActiveRequests": 2,
            "numQueuedRequests": 1,
            "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 10, "tokensPerBlock": 32},
        },
    ]
    expected = ServerFigures(running=2, waiting=1, gpu_usage=0.1, tokens_per_block=32, gpu_blocks=100)
    assert read_iterations(steps) == expected
    assert read_iterations(steps[:1]) == ServerFigures(running=9, waiting=9)


def test_without_a_step_nothing_ran():
    assert read_iterations([]) == ServerFigures(running=0, waiting=0)


@pytest.mark.parametrize("steps", [{}, None, [1], [{"numActiveRequests": "many"}]])
def test_steps_that_are_none(steps):
    with pytest.raises(EngineUnavailable, match="/metrics is not TensorRT-LLM's"):
        read_iterations(steps)
