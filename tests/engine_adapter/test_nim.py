"""A NIM is driven as the engine inside it, whichever that is."""

import json

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine_adapter import (
    Capability,
    EngineRejected,
    EngineUnavailable,
    JsonBody,
    NotSupported,
)
from engine_adapter.nim import HIDDEN, NOT_A_NIM, UNKNOWN
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from engine_adapter.sglang.adapter import SglangAdapter
from engine_adapter.tensorrt_llm.adapter import TensorRTLLMAdapter
from engine_adapter.vllm.adapter import VllmAdapter
from tests.engines import served
from tests.fake_engines.nim import FakeNim, running_nim
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.tensorrt_llm import running_trtllm
from tests.fake_engines.vllm import running_vllm

CHAT = "/v1/chat/completions"
HELLO = JsonBody(json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}).encode())
MODELS = Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "meta/llama", "owned_by": "system"}]}))
INSIDE = [
    (running_vllm, VllmAdapter, "vLLM 0.32.0"),
    (running_sglang, SglangAdapter, "SGLang"),
    (running_trtllm, TensorRTLLMAdapter, "TensorRT-LLM 1.4.0"),
]


@pytest.fixture
def nim(make):
    return lambda url, **fields: make("nim", url, **fields)


def around(fake, **fields) -> FakeNim:
    return FakeNim(tuple(fake.app.routes), **fields)


@pytest.mark.parametrize(
    ("running", "kind", "version"), INSIDE, ids=lambda value: getattr(value, "__name__", "")
)
async def test_it_is_the_engine_inside(nim, running, kind, version):
    with running() as engine, running_nim(around(engine.fake)) as url:
        adapter = nim(url)
        info = await adapter.connect()
        assert type(adapter._inner) is kind
        assert (adapter.spec.kind, adapter._inner.spec.id) == ("nim", "e")
        assert info.model == "tiny"
        assert info.version.startswith(f"NIM 2.0.0, {version}")
        assert Capability.TOKENIZE in info.capabilities
        assert not {HIDDEN, NOT_A_NIM} & set(adapter.findings())
        assert len(await adapter.tokenize(CHAT, HELLO)) > 0
        assert (await adapter.load()).running == 0
        inner = adapter._inner
        assert await adapter.connect() == info
        assert adapter._inner is inner


async def test_one_that_hides_what_is_inside_is_used_as_any(nim):
    """NIM 1.x."""
    with running_nim(FakeNim((MODELS,))) as url:
        adapter = nim(url)
        info = await adapter.connect()
        assert (info.model, info.version, info.capabilities) == ("meta/llama", "NIM 2.0.0", frozenset())
        assert type(adapter._inner) is OpenAICompatibleAdapter
        assert adapter.findings() == (HIDDEN,)
        assert "NIM_ENABLE_KV_CACHE_REUSE=1" in HIDDEN.remedy
        await adapter.load()
        with pytest.raises(NotSupported):
            await adapter.tokenize(CHAT, HELLO)


async def test_metrics_where_nim_2_has_them(nim):
    with running_vllm() as engine, running_nim(around(engine.fake, shut=("/metrics",))) as url:
        adapter = nim(url)
        info = await adapter.connect()
        assert (type(adapter._inner), info.tokens_per_block, info.gpu_blocks) == (VllmAdapter, 16, 128)
        assert (await adapter.load()).running == 0


async def test_one_that_does_not_pass_on_the_routes_of_its_engine_is_used_as_any(nim):
    fields = {"shut": ("/metrics",), "shows_metrics": False}
    with running_vllm() as engine, running_nim(around(engine.fake, **fields)) as url:
        adapter = nim(url)
        info = await adapter.connect()
        assert (info.model, adapter._inner.spec.kind) == ("tiny", UNKNOWN)
        (finding,) = adapter.findings()
    assert "vLLM is inside, but not all of its own routes are reachable" in finding.problem


async def test_an_engine_of_its_own_is_used_and_told_of(nim):
    with running_trtllm() as engine:
        adapter = nim(engine.url)
        info = await adapter.connect()
        assert type(adapter._inner) is TensorRTLLMAdapter
        assert info.version == "NIM, TensorRT-LLM 1.4.0"
        assert adapter.findings()[0] == NOT_A_NIM
        await adapter.load()


async def test_metadata_tells_the_release_where_nothing_else_does(nim):
    nims = [Route("/v1/metadata", lambda _: JSONResponse({"version": "1.10.1"})), MODELS]
    with served(Starlette(routes=nims)) as url:
        assert (await nim(url).connect()).version == "NIM 1.10.1"
    odd = [Route("/v1/version", lambda _: JSONResponse(["2.0"])), MODELS]
    with served(Starlette(routes=odd)) as url:
        assert (await nim(url).connect()).version == "NIM"


async def test_it_is_unavailable_while_its_model_is_loaded(nim):
    fake = FakeNim((MODELS,), ready=False)
    with running_nim(fake) as url:
        adapter = nim(url)
        with pytest.raises(EngineUnavailable):
            await adapter.connect()
        fake.ready = True
        await adapter.connect()
        fake.ready = False
        with pytest.raises(EngineUnavailable):
            await adapter.load()


async def test_who_is_not_let_in_is_told(nim):
    closed = Starlette(routes=[Route("/v1/health/ready", lambda _: Response(status_code=401))])
    with served(closed) as url, pytest.raises(EngineRejected):
        await nim(url).connect()
    with served(Starlette()) as url, pytest.raises(EngineRejected):
        await nim(url).connect()


async def test_another_engine_inside_is_another_adapter(nim):
    """The container at an address was replaced by one that shows its engine, and back."""

    async def app(scope, receive, send):
        await apps[0](scope, receive, send)

    with running_trtllm() as engine, served(app) as url:
        apps = [FakeNim((MODELS,)).app, around(engine.fake).app]
        adapter = nim(url)
        for kind in (OpenAICompatibleAdapter, TensorRTLLMAdapter, OpenAICompatibleAdapter):
            info = await adapter.connect()
            assert type(adapter._inner) is kind
            assert (HIDDEN in adapter.findings()) is (kind is OpenAICompatibleAdapter)
            assert (Capability.KV_EVENTS in info.capabilities) is (kind is TensorRTLLMAdapter)
            apps.reverse()
