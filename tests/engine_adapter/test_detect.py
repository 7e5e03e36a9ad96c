"""Which kind of engine answers: real ones where they are at hand, and what others answer where not."""

import pytest

from engine_adapter import EngineRejected, EngineSpec, EngineSpecError, EngineUnavailable, detect_kind
from engine_adapter.detect import release_of
from engine_adapter.http.adapter import wrong_kind
from tests.fake_engines.lmdeploy import running_lmdeploy
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.tensorrt_llm import running_trtllm
from tests.fake_engines.vllm import running_vllm
from tests.fakes import FakeEngine

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


async def kind_of(url, **fields):
    return await detect_kind(EngineSpec("", url, "x", **fields))


async def test_the_embedded_engine(embedded_engine):
    assert await kind_of(embedded_engine.url) == "embedded"
    assert await kind_of(f"{embedded_engine.url}/v1/") == "embedded"


async def test_a_llama_server(llama):
    assert await kind_of(llama.url) == "llama_server"


@pytest.mark.parametrize(
    ("running", "kind"),
    [
        (running_vllm, "vllm"),
        (running_sglang, "sglang"),
        (running_trtllm, "tensorrt_llm"),
        (running_lmdeploy, "lmdeploy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_large_engines(running, kind):
    with running() as engine:
        assert await kind_of(engine.url) == kind


@pytest.fixture
async def engine():
    """Answers the `routes` of the test with JSON, any other with 404."""
    async with FakeEngine() as engine:
        engine.routes = {}

        async def script(exchange):
            answer = engine.routes.get(exchange.target)
            if isinstance(answer, int):
                await exchange.send({"error": {"message": "no key"}}, status=answer)
            else:
                await exchange.send({} if answer is None else answer, status=404 if answer is None else 200)

        engine.script = script
        yield engine


@pytest.mark.parametrize(
    ("route", "answer", "kind"),
    [
        ("/v1/metadata", {"modelInfo": [{"shortName": "x"}], "version": "1.10"}, "nim"),
        ("/props", {"default_generation_settings": {}, "total_slots": 4}, "llama_server"),
        ("/kv_event_sources", {"0": {"endpoint": "tcp://*:5557"}}, "vllm"),
        ("/server_info", {"disaggregated_params": None, "kv_cache_hash_algo": "v1"}, "tensorrt_llm"),
        ("/server_info", {"tokenizer_path": "/m", "version": "0.5.23"}, "sglang"),
        ("/get_server_info", {"tokenizer_path": "/m"}, "sglang"),
        ("/server_info", {"vllm_config": "…"}, "openai_compatible"),
        ("/kv_event_sources", {}, "openai_compatible"),
        ("/props", ["x"], "openai_compatible"),
        ("/props", b"not JSON", "openai_compatible"),
    ],
)
async def test_by_its_routes_where_the_owner_of_its_models_does_not_tell(engine, route, answer, kind):
    engine.routes = {"/v1/models": MODELS, route: answer}
    assert await kind_of(engine.url) == kind


async def test_a_nim_is_one_whatever_is_inside(engine):
    models = {"data": [{"id": "m", "owned_by": "vllm"}]}
    engine.routes = {"/v1/models": models, "/v1/metadata": {"assetInfo": [], "version": "2.0"}}
    assert await kind_of(engine.url) == "nim"


async def test_the_key_goes_along(engine):
    engine.routes = {"/v1/models": MODELS}
    await kind_of(engine.url, api_key="k")
    assert {exchange.headers["authorization"] for exchange in engine.seen} == {"Bearer k"}


async def test_a_kind_that_is_known_without_the_key(engine):
    engine.routes = {"/v1/models": 401, "/kv_event_sources": {"0": {"endpoint": "tcp://*:1"}}}
    assert await kind_of(engine.url) == "vllm"


async def test_what_is_no_engine(engine):
    with pytest.raises(EngineRejected, match="lists no model"):
        await kind_of(engine.url)
    engine.routes = {"/v1/models": {"data": [{"id": "m", "owned_by": "kvpin"}]}}
    with pytest.raises(EngineSpecError, match="is a kvpin"):
        await kind_of(engine.url)
    await engine.stop()
    with pytest.raises(EngineUnavailable):
        await kind_of(engine.url)


@pytest.mark.parametrize(("owner", "kind"), [("kvpin", "embedded"), ("sglang", "sglang")])
def test_a_kind_that_is_not_the_named_one(owner, kind):
    models = {"data": [{"id": "m", "owned_by": owner}]}
    assert f"--engine {kind}=http://x;" in wrong_kind(models, EngineSpec("vllm", "http://x", "e")).remedy
    assert wrong_kind(models, EngineSpec(kind, "http://x", "e")) is None
    assert wrong_kind(MODELS, EngineSpec("vllm", "http://x", "e")) is None


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.32.0", (0, 32, 0)), ("0.32.0+cpu", (0, 32, 0)), ("0.27rc1", (0, 27)), ("", ()), ("v1", ())],
)
def test_a_version_begins_with_numbers(version, release):
    assert release_of(version) == release
