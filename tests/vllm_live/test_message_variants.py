"""What kvpin renders itself is what vLLM's own code renders: all ways to write a chat, all templates.

`vllm launch render` is vLLM's server without an engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_adapter import EngineRejected, JsonBody
from engine_adapter.types import TokenIds
from engine_adapter.vllm import prompts
from engine_adapter.vllm.adapter import VllmAdapter
from engine_adapter.vllm.prompts import VLLM_INPUT
from proxy.prompt.render import CHAT_PATH
from tests.engines import engine_spec
from tests.live.message_variants import compare, model_with_bos
from tests.live.server_world import MODEL, free_port, running_server
from tests.vllm_live.vllm_world import HTTP_PORTS, vllm

pytestmark = [pytest.mark.live, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with_bos(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model, tmp_path_factory) -> Iterator[str]:
    port = free_port(HTTP_PORTS)
    command = (
        *(vllm(), "launch", "render", str(model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--trust-request-chat-template"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    log = tmp_path_factory.mktemp("vllm") / "log"
    with running_server(log, command, {"VLLM_NO_USAGE_STATS": "1"}, port=port, event_port=0) as server:
        server.wait()
        yield server.url


class Renderer(VllmAdapter):
    """Sends the template with each chat."""

    renders = True
    template = ""

    def use(self, template: str) -> None:
        self.template = template

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        if path == CHAT_PATH:
            body = body.replace(chat_template=self.template)
        if self.renders:
            return (await prompts.render(self._control, path, body, MODEL)).token_ids
        return await prompts.tokenize(self._control, path, body, MODEL)

    async def serve(self, body: JsonBody, ours: TokenIds[int] | None = None) -> TokenIds[int] | None:
        body = body.replace(chat_template=self.template)
        if ours is not None:
            body = body.replace(kv_transfer_params={"prompt_token_ids": ours.tolist()})
        try:
            return (await prompts.render(self._control, CHAT_PATH, body, MODEL)).token_ids
        except EngineRejected:
            return None


@pytest.mark.parametrize("renders", [True, False], ids=["render", "tokenize"])
async def test_no_difference_goes_unnoticed(url, model, renders, tell):
    engine = Renderer(engine_spec("vllm", url))
    engine.renders = renders
    try:
        counts, unnoticed = await compare(engine, VLLM_INPUT, model)
    finally:
        await engine.aclose()
    tell(f"{dict(counts)}; {len(unnoticed)} differ unnoticed")
    assert unnoticed == []
