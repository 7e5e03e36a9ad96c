"""vLLMs that come back with another chat template, that differ from each other, and that load LoRA adapters
while they run. The engine tells the token ids of each prompt: they must be those that it makes of the same
request without kvpin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.make_checkpoint import checkpoint_path
from tests.live.conftest import Kvpin, running_kvpin
from tests.live.server_world import MODEL, RunningServer, free_port
from tests.processes import wait_until
from tests.vllm_live.vllm_world import EVENT_PORTS, HTTP_PORTS, VllmOptions, running_vllm

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

CHAT = "/v1/chat/completions"
OTHER = "{% for each in messages %}[{{ each.role }}] {{ each.content }}\n{% endfor %}[assistant]"
WISHING = (
    "{% if mood is defined %}Be {{ mood }}.\n{% endif %}{% for each in messages %}[{{ each.role }}] "
    "{{ each.content }}\n{% endfor %}[assistant]"
)
# Chats of one form that are audited first: later ones are sent with token ids.
AUDITED = 20


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
    return asked | {"return_token_ids": True} | fields


async def prompts_of(url: str, texts: list[str]) -> list[tuple[str | None, list[int]]]:
    """The engine that served each chat, of those that are sent at once, and its prompt. One without an engine
    is sent again, as clients do."""
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:

        async def ask(text: str) -> tuple[str | None, list[int]]:
            for _ in range(600):
                try:
                    answer = await client.post(url + CHAT, json=chat(text))
                except httpx.TransportError:
                    await asyncio.sleep(0.5)
                    continue
                if answer.status_code not in (502, 503):
                    told = answer.raise_for_status().json()
                    return answer.headers.get("x-kvpin-engine"), told["prompt_token_ids"]
                await asyncio.sleep(0.5)
            raise AssertionError(answer.text)

        return await asyncio.gather(*map(ask, texts))


async def wrong(kvpin: Kvpin, servers: dict[str, RunningServer], texts: list[str]) -> int:
    """Chats whose prompt is not the one that the engine which served it makes of the same messages."""
    straight = {
        name: dict(zip(texts, await prompts_of(each.url, texts), strict=True))
        for name, each in servers.items()
    }
    served = zip(texts, await prompts_of(kvpin.url, texts), strict=True)
    return sum(ids != straight[str(engine)][text][1] for text, (engine, ids) in served)


@contextmanager
def kvpin_over(tmp_path: Path, **servers: RunningServer) -> Iterator[Kvpin]:
    for each in servers.values():
        each.wait()
    engines = [f"--engine=vllm={each.url},id={name}" for name, each in servers.items()]
    with running_kvpin(tmp_path / "kvpin.log", *engines) as kvpin:
        yield kvpin


def template(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "template.jinja"
    path.write_text(text)
    return "--chat-template", str(path)


async def test_another_chat_template(tmp_path, tell):
    port, event_port = free_port(HTTP_PORTS), free_port(EVENT_PORTS)
    with ExitStack() as stack:
        server = stack.enter_context(running_vllm(tmp_path / "one.log", port=port, event_port=event_port))
        kvpin = stack.enter_context(kvpin_over(tmp_path, a=server))
        before = await wrong(kvpin, {"a": server}, [f"before {n}" for n in range(3 * AUDITED)])
        server.kill()
        options = VllmOptions(flags=template(tmp_path, OTHER))
        server = stack.enter_context(
            running_vllm(tmp_path / "two.log", options, port=port, event_port=event_port)
        )
        at_once = asyncio.create_task(prompts_of(kvpin.url, texts := [f"after {n}" for n in range(60)]))
        await asyncio.to_thread(server.wait)
        served, right = await at_once, await prompts_of(server.url, texts)
        first = sum(ids != expected for (_, ids), (_, expected) in zip(served, right, strict=True))
        later = await wrong(kvpin, {"a": server}, [f"later {n}" for n in range(200)])
        tell(f"wrong prompts: {before} of {3 * AUDITED} before, {first} of 60 at once, {later} of 200 later")
        assert (before, first, later) == (0, 0, 0)  # a vLLM does not tell of its template


async def test_two_with_other_default_arguments_of_the_template(tmp_path, tell):
    flags = template(tmp_path, WISHING)
    with ExitStack() as stack:
        one = stack.enter_context(running_vllm(tmp_path / "one.log", VllmOptions(flags=flags)))
        one.wait()
        wish = ("--default-chat-template-kwargs", '{"mood": "brief"}')
        two = stack.enter_context(running_vllm(tmp_path / "two.log", VllmOptions(flags=(*flags, *wish))))
        kvpin = stack.enter_context(kvpin_over(tmp_path, a=one, b=two))
        servers = {"a": one, "b": two}
        found = await wrong(kvpin, servers, [f"chat {n}" for n in range(160)])
        tell(f"wrong prompts: {found} of 160")
        assert found == 0
        findings = kvpin.engines()["b"]["findings"] + kvpin.engines()["a"]["findings"]
        assert any("of the same model" in each for each in findings)
        stats = kvpin.admin("GET", "stats").json()["pools"][0]["tokenisation"]
        assert stats["source"] == "local" or "tokenises" in stats["detail"]


async def test_adapters_that_come_and_go(tmp_path):
    options = VllmOptions(environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})
    with ExitStack() as stack:
        server = stack.enter_context(running_vllm(tmp_path / "one.log", options))
        kvpin = stack.enter_context(kvpin_over(tmp_path, a=server))
        client = stack.enter_context(httpx.Client(timeout=120, trust_env=False))

        def load(seed: int) -> None:
            fields = {"lora_name": "eve", "lora_path": str(checkpoint_path("lora", seed))}
            client.post(f"{server.url}/v1/load_lora_adapter", json=fields).raise_for_status()

        def names() -> set[str]:
            return {each["id"] for each in client.get(f"{kvpin.url}/v1/models").json()["data"]}

        def reused(text: str) -> tuple[int, int]:
            answer = client.post(kvpin.url + CHAT, json=chat(text, model="eve")).raise_for_status()
            usage = answer.json()["usage"]["prompt_tokens_details"] or {}
            return int(answer.headers["x-kvpin-predicted-tokens"]), usage.get("cached_tokens") or 0

        load(1)
        text = "the same long question about a river and a mill " * 8
        assert reused(text) == (0, 0), "found at once, without a 404"
        predicted, reported = reused(text)
        assert predicted == reported > 0
        client.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "eve"}).raise_for_status()
        wait_until(lambda: "eve" not in names(), kvpin.process, kvpin.log, 30)
        load(2)
        predicted, reported = reused(text)
        assert predicted == reported, "the KV of the old one is not the new one's"
