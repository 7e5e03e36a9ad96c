from contextlib import aclosing

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.tensorrt_llm import discovery as found
from engine_adapter.tensorrt_llm.discovery import (
    Discovered,
    ServerFigures,
    discover,
    read_iterations,
    read_prometheus,
)
from engine_adapter.types import Capability, EngineSpec
from tests.engines import served
from tests.fake_engines.tensorrt_llm import running_trtllm

EVERYTHING = {"kv_events", "cached_tokens", "cache_salt", "tokenize", "flush"}


async def discovered(url: str) -> Discovered:
    async with aclosing(ControlClient(EngineSpec("tensorrt_llm", url, "t"))) as control:
        return await discover(control, "i")


async def looked_at(**options) -> Discovered:
    with running_trtllm(**options) as server:
        buffered = len(server.fake.events)
        server_found = await discovered(server.url)
        assert (len(server.fake.events), server.fake.polls) == (buffered, 0)  # its events are untouched
        return server_found


async def test_a_server_that_tells_all():
    server = await looked_at(tokens_per_block=64, gpu_blocks=10, max_model_len=512)
    info = server.info
    assert (info.model, info.version, info.tokenizer) == ("tiny", "TensorRT-LLM 1.4.0", "/models/tiny")
    assert (server.tokens_per_block, info.gpu_blocks, info.max_model_len) == (64, 10, 512)
    assert info.capabilities == EVERYTHING
    assert (server.whole_blocks_only, server.reset_path) == (True, "/reset_prefix_cache")
    assert server.findings == ()


@pytest.mark.parametrize("describes_itself", [True, False])
@pytest.mark.parametrize("reset_path", ["/reset_prefix_cache", "/_control/kv_cache/reset"])
async def test_its_routes_are_found_with_and_without_its_own_word(describes_itself, reset_path):
    server = await looked_at(describes_itself=describes_itself, reset_path=reset_path)
    assert (server.info.capabilities, server.reset_path) == (EVERYTHING, reset_path)


async def test_a_reset_route_of_another_name_is_found_by_its_description():
    assert (await looked_at(reset_path="/v2/reset_kv_cache")).reset_path == "/v2/reset_kv_cache"


@pytest.mark.parametrize("describes_itself", [True, False])
async def test_an_older_server(describes_itself):
    lacks = {"tells_block_size": False, "prometheus": False, "renders": False, "reset_path": None}
    server = await looked_at(describes_itself=describes_itself, **lacks)
    assert server.info.capabilities == {"kv_events", "cached_tokens", "cache_salt"}
    assert (server.tokens_per_block, server.info.max_model_len, server.info.tokenizer) == (32, None, None)
    assert not server.whole_blocks_only
    of_reuse = found.BLOCK_SIZE_UNKNOWN, found.PARTIAL_REUSE_UNTOLD
    assert server.findings == (*of_reuse, found.NO_TOKENIZE, found.NO_RESET)


async def test_steps_tell_the_block_size_where_nothing_else_does():
    with running_trtllm(tokens_per_block=8, tells_block_size=False, prometheus=False) as server:
        server.fake._end_of_step()
        what = await discovered(server.url)
        assert (what.tokens_per_block, what.info.gpu_blocks) == (8, 64)
        assert server.fake.steps == []  # they can be read once


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"enable_block_reuse": False}, found.NO_REUSE),
        ({"enable_partial_reuse": True}, found.PARTIAL_REUSE),
    ],
)
async def test_settings_that_cost_reuse_or_exactness(options, finding):
    assert (await looked_at(**options)).findings == (finding,)
    assert "kv_cache_config: {enable_" in finding.remedy


def answering(**answers: object) -> Starlette:
    """Another server: what its routes answer, beside its health and its model."""
    answers = {"health": {}, "v1/models": {"data": [{"id": "m"}]}} | answers
    told = {path: JSONResponse(answer, 503 if answer is None else 200) for path, answer in answers.items()}
    return Starlette(routes=[Route(f"/{path}", lambda _, a=answer: a) for path, answer in told.items()])


async def test_another_server():
    """No events, no salts, and a description of itself that fails."""
    models = {"data": [{"id": "org/m", "max_model_len": 77}]}
    odd = {"server_info": ["no object"], "openapi.json": None, "metrics": [], "kv_cache_events": []}
    with served(answering(**{"v1/models": models}, **odd)) as url:
        info = (await discovered(url)).info
    assert (info.model, info.version, info.tokenizer) == ("org/m", "TensorRT-LLM", "org/m")
    assert info.max_model_len == 77
    assert info.capabilities >= {Capability.KV_EVENTS}  # there is a route, whatever it takes


async def test_a_description_of_routes_that_is_odd():
    paths = {"/kv_cache_events": 1, "/v1/completions": "post", "/v1/chat/completions": None}
    with served(answering(**{"openapi.json": {"paths": paths}})) as url:
        assert found.NO_EVENTS in (await discovered(url)).findings


async def test_a_server_without_events_or_salts():
    schema = {"properties": {"messages": {}}, "additionalProperties": False}
    content = {"application/json": {"schema": schema}}
    paths = {"/v1/chat/completions": {"post": {"requestBody": {"content": content}}}}
    with served(answering(**{"openapi.json": {"paths": paths}})) as url:
        server = await discovered(url)
    assert server.info.capabilities == {Capability.CACHED_TOKENS}
    assert {found.NO_EVENTS, found.NO_SALT} <= set(server.findings)
    assert found.BLOCK_SIZE_UNKNOWN not in server.findings


async def test_a_server_that_is_not_well_or_not_there():
    with served(answering(health=None)) as url, pytest.raises(EngineUnavailable):
        await discovered(url)
    with served(Starlette()) as url, pytest.raises(EngineRejected):
        await discovered(url)
    with pytest.raises(EngineUnavailable):
        await discovered("http://127.0.0.1:1")


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
