"""Each form of request: on an embedded engine, what is predicted is what it reports; the ids are those of a
llama-server whose template writes all it is given."""

from __future__ import annotations

import subprocess
import sys

import httpx
import msgspec
import pytest

from engine_adapter import EngineRejected, JsonBody, make_adapter
from proxy.prompt import PromptBuilder, RegisteredTables, verify_exactness
from scripts.make_gguf import gguf_path
from tests.engines import engine_spec
from tests.live.llama_world import llama_world
from tests.live.prompt_forms import REQUESTS, WITNESS

pytestmark = pytest.mark.live

# The embedded engine's blocks.
BLOCK = 16


@pytest.fixture
def llama_kvpin(tmp_path):
    """Over a GGUF file with the witness as its template."""
    model = tmp_path / "witness.gguf"
    make = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", WITNESS]
    subprocess.run([*make, gguf_path("tiny"), model], check=True, capture_output=True)
    with llama_world(tmp_path, model=model, host_cache=False) as world:
        yield world


NOT_EMBEDDED = {"chat_template_kwargs of the renderer"}


@pytest.mark.parametrize(("path", "fields"), REQUESTS.values(), ids=REQUESTS)
def test_on_the_embedded_engine(kvpin, path, fields, request):
    salt = request.node.name  # so that forms share nothing
    body = {"model": "kvpin-tiny", "max_tokens": 2, "temperature": 0, "cache_salt": salt, **fields}
    if request.node.callspec.id in NOT_EMBEDDED:
        assert kvpin.post(path, body).status_code == httpx.codes.BAD_REQUEST
        return
    for _ in range(2):
        answer = kvpin.post(path, body).raise_for_status()
    usage, tokens = answer.json()["usage"], kvpin.record_of(answer)["n_tokens"]
    predicted = int(answer.headers["x-kvpin-predicted-tokens"])
    assert predicted == usage["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // BLOCK * BLOCK > 0
    assert tokens == usage["prompt_tokens"]


async def test_the_ids_are_the_servers(llama_kvpin):
    """What is rendered here, to the token: for most forms nobody but kvpin renders. They are as many as it
    then serves."""
    adapter = make_adapter(engine_spec("llama_server", llama_kvpin.servers[0].url, model="tiny"))
    try:
        builder = PromptBuilder(
            await adapter.connect(), tables=RegisteredTables(), engines=lambda _: [adapter]
        )
        assert await builder.load(builder.info.tokenizer)
        assert (await verify_exactness(builder, adapter)).source == "local"
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
            answer = llama_kvpin.kvpin.post(path, {"model": "tiny", "max_tokens": 1, **fields})
            served = answer.json()["usage"]["prompt_tokens"] if answer.is_success else None
            assert served == (None if theirs is None else len(theirs)), name
    finally:
        await adapter.aclose()
    assert sources["tools"] == sources["parallel calls"] == sources["parts"] == "local"
    assert sources["tools with fractions"] == sources["documents"] == "engine"
