import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.tensorrt_llm import discovery as found
from engine_adapter.tensorrt_llm.discovery import Discovered, discover
from engine_adapter.types import Capability, EngineSpec
from tests.engines import served
from tests.fake_engines.tensorrt_llm import running_trtllm

EVERYTHING = {
    Capability.KV_EVENTS,
    Capability.CACHED_TOKENS,
    Capability.CACHE_SALT,
    Capability.TOKENIZE,
    Capability.FLUSH,
}


async def discovered(url: str) -> Discovered:
    control = ControlClient(EngineSpec("tensorrt_llm", url, "t"))
    try:
        return await discover(control, "i")
    finally:
        await control.aclose()


async def looked_at(**options) -> Discovered:
    with running_trtllm(**options) as server:
        buffered = len(server.fake.events)
        server_found = await discovered(server.url)
        assert (len(server.fake.events), server.fake.polls) == (buffered, 0)  # its events are untouched
        return server_found


async def test_a_server_that_tells_all():
    server = await looked_at(tokens_per_block=64, gpu_blocks=10, max_model_len=512)
    assert (server.info.model, server.info.version, server.info.tokenizer) == (
        "tiny",
        "TensorRT-LLM 1.4.0",
        "/models/tiny",
    )
    assert (server.tokens_per_block, server.info.gpu_blocks, server.info.max_model_len) == (64, 10, 512)
    assert server.info.capabilities == EVERYTHING
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
    server = await looked_at(
        describes_itself=describes_itself,
        tells_block_size=False,
        prometheus=False,
        renders=False,
        reset_path=None,
    )
    assert server.info.capabilities == {Capability.KV_EVENTS, Capability.CACHED_TOKENS, Capability.CACHE_SALT}
    assert (server.tokens_per_block, server.info.max_model_len, server.info.tokenizer) == (32, None, None)
    assert not server.whole_blocks_only
    assert server.findings == (
        found.BLOCK_SIZE_UNKNOWN,
        found.PARTIAL_REUSE_UNTOLD,
        found.NO_TOKENIZE,
        found.NO_RESET,
    )


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


async def test_another_server():
    """No events, no salts, and a description of itself that fails."""
    routes = [
        Route("/health", lambda _: Response()),
        Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "org/m", "max_model_len": 77}]})),
        Route("/server_info", lambda _: JSONResponse(["no object"])),
        Route("/openapi.json", lambda _: Response(status_code=503)),
        Route("/metrics", lambda _: JSONResponse([])),
        Route("/kv_cache_events", lambda _: JSONResponse([])),
    ]
    with served(Starlette(routes=routes)) as url:
        server = await discovered(url)
    assert (server.info.model, server.info.version, server.info.tokenizer, server.info.max_model_len) == (
        "org/m",
        "TensorRT-LLM",
        "org/m",
        77,
    )
    assert server.info.capabilities >= {Capability.KV_EVENTS}  # there is a route, whatever it takes


async def test_a_description_of_routes_that_is_odd():
    paths = {"/kv_cache_events": 1, "/v1/completions": "post", "/v1/chat/completions": None}
    routes = [
        Route("/health", lambda _: Response()),
        Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "m"}]})),
        Route("/openapi.json", lambda _: JSONResponse({"paths": paths})),
    ]
    with served(Starlette(routes=routes)) as url:
        server = await discovered(url)
    assert found.NO_EVENTS in server.findings


async def test_a_server_without_events_or_salts():
    schema = {"properties": {"messages": {}}, "additionalProperties": False}
    content = {"application/json": {"schema": schema}}
    paths = {"/v1/chat/completions": {"post": {"requestBody": {"content": content}}}}
    routes = [
        Route("/health", lambda _: Response()),
        Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "m"}]})),
        Route("/openapi.json", lambda _: JSONResponse({"paths": paths})),
    ]
    with served(Starlette(routes=routes)) as url:
        server = await discovered(url)
    assert server.info.capabilities == {Capability.CACHED_TOKENS}
    assert {found.NO_EVENTS, found.NO_SALT} <= set(server.findings)
    assert found.BLOCK_SIZE_UNKNOWN not in server.findings


async def test_a_server_that_is_not_well_or_not_there():
    unwell = Starlette(routes=[Route("/health", lambda _: Response(status_code=503))])
    with served(unwell) as url, pytest.raises(EngineUnavailable):
        await discovered(url)
    with served(Starlette()) as url, pytest.raises(EngineRejected):
        await discovered(url)
    with pytest.raises(EngineUnavailable):
        await discovered("http://127.0.0.1:1")
