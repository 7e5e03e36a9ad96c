"""Each form of request, twice: what is predicted of the second is what the engine reports.

On an embedded engine, and on a llama-server whose template writes all it is given.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from engine_adapter import EngineRejected, JsonBody, make_adapter
from proxy.prompt import PromptBuilder, RegisteredTables, verify_exactness
from scripts.make_gguf import gguf_path
from tests.engines import engine_spec
from tests.live.llama_world import llama_world
from tests.live.prompt_forms import REQUESTS, WITNESS
from tests.llama import running_llama_server

pytestmark = pytest.mark.live

# The embedded engine's blocks.
BLOCK = 16
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GGUF file with the witness as its template."""
    return model_of(tmp_path_factory.mktemp("model") / "witness.gguf", WITNESS)


def model_of(path, template):
    make = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", template]
    subprocess.run([*make, gguf_path("tiny"), path], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def llama_kvpin(model, tmp_path_factory):
    with llama_world(tmp_path_factory.mktemp("world"), model=model, host_cache=False) as world:
        yield world


# What the engines refuse themselves.
BROKEN = {"arguments that are broken", "no arguments"}
NOT_EMBEDDED = {"chat_template_kwargs of the renderer"}


def twice(kvpin, path, body):
    """Asks twice. Of the second answer: prompt tokens, those reused, predicted, and counted by kvpin."""
    for _ in range(2):
        answer = kvpin.post(path, body).raise_for_status()
    usage = answer.json()["usage"]
    record = kvpin.record_of(answer)
    predicted = int(answer.headers["x-kvpin-predicted-tokens"])
    return (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        predicted,
        record["n_tokens"],
    )


@pytest.mark.parametrize(("path", "fields"), REQUESTS.values(), ids=REQUESTS)
def test_on_the_embedded_engine(kvpin, path, fields, request):
    salt = request.node.name  # so that forms share nothing
    body = {"model": "kvpin-tiny", "max_tokens": 2, "temperature": 0, "cache_salt": salt, **fields}
    if request.node.callspec.id in NOT_EMBEDDED:
        assert kvpin.post(path, body).status_code == httpx.codes.BAD_REQUEST
        return
    tokens, reported, predicted, seen = twice(kvpin, path, body)
    assert predicted == reported == (tokens - 1) // BLOCK * BLOCK > 0
    assert seen == tokens


@pytest.mark.parametrize(("path", "fields"), REQUESTS.values(), ids=REQUESTS)
def test_on_a_llama_server(llama_kvpin, path, fields, request):
    body = {"model": "tiny", "max_tokens": 2, "temperature": 0, **fields}
    if request.node.callspec.id in BROKEN:
        url = f"{llama_kvpin.servers[0].url}/v1/{path}"
        assert httpx.post(url, json=body, timeout=TIMEOUT_S, trust_env=False).is_error
        return
    tokens, reported, predicted, seen = twice(llama_kvpin.kvpin, path, body)
    assert predicted == reported == tokens - 1
    assert seen == tokens


@asynccontextmanager
async def rendering(url):
    """A server's adapter, a builder whose prompts were compared with the server's, and who makes them."""
    async with aclosing(make_adapter(engine_spec("llama_server", url, model="tiny"))) as adapter:
        info = await adapter.connect()
        builder = PromptBuilder(info, tables=RegisteredTables(), engines=lambda _: [adapter])
        assert await builder.load(info.tokenizer)
        yield adapter, builder, (await verify_exactness(builder, adapter)).source


async def test_the_ids_are_the_servers(llama_kvpin):
    """What is rendered here, to the token: for most forms nobody but kvpin renders."""
    async with rendering(llama_kvpin.servers[0].url) as (adapter, builder, source):
        assert source == "local"
        sources = {}
        for name, (path, fields) in REQUESTS.items():
            body = JsonBody(msgspec.json.encode({"model": "tiny", **fields}))
            prompt = await builder.build(f"/v1/{path}", body, salt=None)
            try:
                theirs = await adapter.tokenize(f"/v1/{path}", body)
            except EngineRejected:
                theirs = None
            assert (None if prompt is None else prompt.token_ids) == theirs, name
            sources[name] = None if prompt is None else prompt.source
    assert sources["tools"] == sources["parallel calls"] == sources["parts"] == "local"
    assert sources["tools with fractions"] == sources["documents"] == "engine"


@pytest.fixture
def adding_server(model, tmp_path):
    """A server whose tokenizer begins each text with a token of its own, 0."""
    path = Path(shutil.copy(model, tmp_path))
    change = [sys.executable, "-m", "gguf.scripts.gguf_set_metadata", "--force", path]
    subprocess.run([*change, "tokenizer.ggml.add_bos_token", "1"], check=True, capture_output=True)
    with running_llama_server(tmp_path / "log", path) as server:
        yield server


async def test_a_server_adds_special_tokens_whatever_a_completion_says(adding_server):
    async with rendering(adding_server.url) as (_, builder, _):
        for given, source in ((True, "local"), (False, "engine")):
            body = {"model": "tiny", "prompt": "Brest", "add_special_tokens": given, "max_tokens": 1}
            prompt = await builder.build("/v1/completions", JsonBody(msgspec.json.encode(body)), salt=None)
            async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
                answer = await client.post(f"{adding_server.url}/v1/completions", json=body)
            assert len(prompt.token_ids) == answer.json()["usage"]["prompt_tokens"]
            assert (prompt.token_ids[0], prompt.source) == (0, source)


@pytest.fixture
def trimming_server(tmp_path):
    content = (
        "{{ m.content | trim }}[{{ m.content.strip() }}|{{ m.content.lstrip() }}|{{ m.content.rstrip() }}]"
    )
    template = f"{{% for m in messages %}}<|im_start|>{content}<|im_end|>{{% endfor %}}"
    with running_llama_server(tmp_path / "log", model_of(tmp_path / "trim.gguf", template)) as server:
        yield server


async def test_a_server_strips_the_white_space_of_ascii_alone(trimming_server):
    async with rendering(trimming_server.url) as (adapter, builder, _):
        for space in map(
            chr, (*range(1, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x2010), 0x2028, 0x202F, 0x3000)
        ):
            chat = {"model": "tiny", "messages": [{"role": "user", "content": f"{space}Brest{space}"}]}
            body = JsonBody(msgspec.json.encode(chat))
            prompt = await builder.build("/v1/chat/completions", body, salt=None)
            assert prompt.source == "local"
            assert prompt.token_ids == await adapter.tokenize("/v1/chat/completions", body), ascii(space)
