"""Engines that come back with another template, context or model at their address, while clients go on."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from scripts.make_gguf import gguf_path, write_shuffled
from tests.fakes import serving
from tests.live.conftest import Kvpin, running_kvpin
from tests.llama import RunningLlama, running_llama_server
from tests.processes import wait_until

pytestmark = pytest.mark.live

# scripts/test-nightly runs longer; by hand: CHURN_S=1200 pytest tests/live/test_changed_engines.py -k random
CHURN_S = float(os.environ.get("CHURN_S", "10"))
# fmt: off
WORDS = ("river", "runs", "over", "stones", "and", "an", "old", "mill", "turns", "while", "rain", "falls",
         "on", "fields", "near", "town")
# fmt: on
ALICE = '[[api_keys]]\nkey = "alice-key-of-16-letters"\ntenant = "alice"\nmodels = ["model-a"]\n'


class Servers:
    """llama-servers that come back changed on their ports."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self.stack, self.tmp_path, self.started = stack, tmp_path, 0

    def start(self, model: Path, *flags: str, port: int = 0, ctx: int = 2048) -> RunningLlama:
        self.started += 1
        log = self.tmp_path / f"llama-{self.started}.log"
        server = running_llama_server(log, model, *flags, slots=2, ctx=ctx, port=port)
        return self.stack.enter_context(server)

    def change(self, old: RunningLlama, *flags: str, ctx: int = 2048) -> RunningLlama:
        """Ends a server, and starts it with other flags on the same port."""
        old.kill()
        return self.start(old.model, *flags, port=old.port, ctx=ctx)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, tmp_path)


@contextmanager
def kvpin_over(tmp_path: Path, *servers: RunningLlama) -> Iterator[Kvpin]:
    engines = [f"--engine=llama_server={server.url},id=e{at},model=m" for at, server in enumerate(servers)]
    with running_kvpin(tmp_path / "kvpin.log", *engines) as kvpin:
        yield kvpin


def until_logged(kvpin: Kvpin, text: str) -> None:
    """Returns once kvpin has written this to its log."""
    wait_until(lambda: text in kvpin.log.read_text(), kvpin.process, kvpin.log, 60)


def texts(seed: int, n: int) -> list[str]:
    """Texts that share their first words."""
    draw = random.Random(seed)  # noqa: S311 - the same each time
    return [" ".join(["the", "old", "mill", *draw.choices(WORDS, k=40)]) for _ in range(n)]


async def said(url: str, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests that are sent at once. One without an engine is sent again, as clients do."""
    async with httpx.AsyncClient(
        timeout=120, trust_env=False, limits=httpx.Limits(max_connections=8)
    ) as client:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            for _ in range(240):
                answer = await client.post(f"{url}{path}", json=body)
                if answer.status_code not in (502, 503):
                    return answer.raise_for_status().json()
                await asyncio.sleep(0.25)
            raise AssertionError(answer.text)

        return await asyncio.gather(*map(ask, bodies))


def asked(prompts: list[str]) -> list[dict[str, Any]]:
    return [
        {"model": "m", "prompt": text, "max_tokens": 6, "temperature": 0, "n_predict": 6} for text in prompts
    ]


async def test_another_chat_template(servers, tmp_path):
    """Chats are followed again by the new template: predictions are exact, and the next turn reuses."""
    template = tmp_path / "other.jinja"
    template.write_text(
        "Welcome.\n{% for each in messages %}[{{ each.role }}] {{ each.content }}\n{% endfor %}[assistant]"
    )
    server = servers.start(gguf_path("tiny"))
    with kvpin_over(tmp_path, server) as kvpin:
        assert await _reused(kvpin, 1) == 10
        servers.change(server, "--chat-template-file", str(template))
        await said(kvpin.url, "/v1/chat/completions", [_chat("again")])  # the server is back
        until_logged(kvpin, "engine has changed")
        assert await _reused(kvpin, 2) == 10


def _chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}


async def _reused(kvpin: Kvpin, seed: int) -> int:
    """Of ten chats that are asked twice, those whose second time was reused exactly as predicted."""
    found = 0
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for text in texts(seed, 10):
            for _ in range(2):
                answer = await client.post(f"{kvpin.url}/v1/chat/completions", json=_chat(text))
            usage = answer.raise_for_status().json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            found += cached == int(answer.headers["x-kvpin-predicted-tokens"]) > 20
    return found


async def test_contexts_of_different_length(servers, tmp_path):
    """A prompt is refused only if no server takes it, whichever connected first and whatever came back."""
    small, large = servers.start(gguf_path("tiny"), ctx=512), servers.start(gguf_path("tiny"), ctx=2048)
    with kvpin_over(tmp_path, small, large) as kvpin:
        long = [" ".join(["mill", *texts(seed, 25)]) for seed in range(6)]
        answers = await said(kvpin.url, "/v1/completions", asked(long))
        assert all(answer["usage"]["prompt_tokens"] > 900 for answer in answers)
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await said(kvpin.url, "/v1/completions", asked([" ".join(texts(9, 80))]))
        servers.change(small, ctx=8192)
        until_logged(kvpin, "context 512 ")
        (answer,) = await said(kvpin.url, "/v1/completions", asked([" ".join(texts(9, 80))]))
        assert answer["usage"]["prompt_tokens"] > 2048


async def test_another_model_at_the_address_of_an_engine_that_tells_nothing_else(tmp_path):
    """It joins the pool of its own model: no key of the old model reaches it."""
    served = "model-a"

    async def models(_request):
        return JSONResponse({"object": "list", "data": [{"id": served, "object": "model"}]})

    async def chat(_request):
        message = {"role": "assistant", "content": served}
        return JSONResponse({"model": served, "choices": [{"index": 0, "message": message}]})

    app = Starlette(
        routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    )
    settings = tmp_path / "settings.toml"
    settings.write_text(ALICE)
    async with serving(app) as url, AsyncExitStack() as stack:
        engine = f"--engine=openai_compatible={url},id=e,share_kv=true"
        running = running_kvpin(tmp_path / "log", engine, f"--config={settings}", tokenised=False)
        kvpin = await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        body = {"model": "model-a", "messages": [{"role": "user", "content": "x"}]}
        headers = {"authorization": "Bearer alice-key-of-16-letters"}
        ask = f"{kvpin.url}/v1/chat/completions"
        client = httpx.AsyncClient(timeout=30, trust_env=False, headers=headers)
        await stack.enter_async_context(client)
        assert (await client.post(ask, json=body)).json()["model"] == "model-a"
        served = "model-b"
        await asyncio.to_thread(until_logged, kvpin, "engine has changed")
        answer = await client.post(ask, json=body)
        assert answer.status_code in (403, 404, 503)
        assert "model-b" not in answer.text


async def test_servers_that_come_back_changed_at_random_moments(servers, tmp_path):
    """Under load, two servers are killed and come back with other files, templates and contexts. Each tells
    the prompt that it computed: tokens of another vocabulary would be another text. Chats go as messages."""
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for each in messages %}[{{ each.role }}] {{ each.content }}\n{% endfor %}[assistant]"
    )
    shuffled, path = tmp_path / "shuffled.gguf", tmp_path / "model.gguf"
    write_shuffled(shuffled, "tiny")
    files, flags = (gguf_path("tiny"), shuffled), ((), ("--chat-template-file", str(template)))
    draw, served, changes = random.Random(int(CHURN_S)), 0, 0  # noqa: S311 - the same each time
    shutil.copy(files[0], path)
    running = [servers.start(path), servers.start(path)]
    ends = 0.0

    async def churn() -> None:
        nonlocal changes
        while time.monotonic() < ends:
            await asyncio.sleep(draw.uniform(1, 4))
            at = draw.randrange(2)
            shutil.copy(draw.choice(files), tmp_path / "next.gguf")
            (tmp_path / "next.gguf").replace(path)
            flag, ctx = draw.choice(flags), draw.choice((1024, 4096))
            running[at] = await asyncio.to_thread(servers.change, running[at], *flag, ctx=ctx)
            changes += 1

    async def load(client: httpx.AsyncClient, url: str) -> list[str]:
        nonlocal served
        wrong = []
        while time.monotonic() < ends:
            text = f"{draw.random()} {draw.choice(texts(3, 24))}"
            (body,) = asked([text])
            told = await client.post(f"{url}/completion", json=body)
            if told.status_code == 200:
                served += 1
                if told.json()["prompt"] != text:
                    wrong.append(told.text)
            chatted = await client.post(f"{url}/v1/chat/completions", json=_chat(text))
            served += chatted.status_code == 200
        return wrong

    with kvpin_over(tmp_path, *running) as kvpin:
        ends = time.monotonic() + CHURN_S
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            *found, _ = await asyncio.gather(*(load(client, kvpin.url) for _ in range(4)), churn())
    wrong = [each for part in found for each in part]
    assert not wrong, f"{len(wrong)} of {served} after {changes} changes: {wrong[0]}"
    assert served > changes > 0, f"{served} served, {changes} changes"
