"""A vLLM without a model, but with a cache of real size and a clock, for the routers of `routers.py`.

HTTP routes, metrics, answers and KV events are those of the tests' fake vLLM; this engine adds the time that
a GPU would take. It computes prompts one after the other at a fixed rate. It looks up the cache when a prompt
begins and stores its blocks when it ends. Tokens come at a fixed pace, independently for each request.
kvpin's queue term assumes just that, which favours kvpin. Real engines mix chunks of several prompts with
decode; `kvpin replay --model chunked` models them.

    python benchmarks/mock_engine.py --port 8001 [--kv-tokens 100000] [--prefill-rate 10000] [--token-ms 15]
                                     [--window-groups 5 --window 1024]

With --nixl, engines pass KV to each other (`mock_nixl.py`): a pull takes `--transfer-rate`, and no computing.

With --window-groups N, it serves a hybrid model in the same memory: N layers with a sliding window for each
layer of full attention. Their KV cache groups share the blocks (`hybrid_pages.py`).

`GET /mock` reports what it did since `POST /mock/restart`, after which it looks like a new process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from harness import ROOT
from hybrid_pages import HybridPages, HybridRunning
from mock_nixl import MockNixl
from router_work import BLOCK_TOKENS, MODEL, answer_ids, tokenizer, words
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from xxhash import xxh3_64_intdigest

sys.path.insert(0, str(ROOT))
from tests.fake_engines.cache import CachePrompt, PageCache, RunningPrompt
from tests.fake_engines.core import EngineCore, Generation
from tests.fake_engines.nixl import Found
from tests.fake_engines.vllm import FakeVllm, VllmOptions

CHAT = "/v1/chat/completions"
# Who asks for one of these gets the fake's own, slower answer.
RARE_FIELDS = ("vllm_xargs", "tools")


@dataclass(frozen=True, slots=True)
class Clock:
    """The speed of the engine.

    Attributes:
        prefill_rate: tokens a second that it computes, one prompt after the other.
        token_s: seconds from one token of an answer to the next.
    """

    prefill_rate: float
    token_s: float


@dataclass(slots=True)
class Record:
    """The work of an engine.

    Attributes:
        requests: requests that began to run.
        busy_s: seconds spent on computing prompts.
        first_token_s: seconds of each request from its arrival to its first token.
        cpu_s: CPU seconds of the process when the record began.
    """

    requests: int = 0
    busy_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    cpu_s: float = field(default_factory=time.process_time)


class QuickCache(PageCache):
    """The fake's cache with a quicker hash, and a look-up that stores nothing yet."""

    def hash_of(self, prompt: CachePrompt, at: int, parent: int | None) -> int:
        """See `PageCache.hash_of`."""
        start, end = at * self.page_size, (at + 1) * self.page_size
        before = repr(prompt.namespace).encode() if parent is None else parent.to_bytes(8, "little")
        return xxh3_64_intdigest(before + array("i", prompt.tokens[start:end]).tobytes())

    def look_up(self, prompt: CachePrompt, *, read: bool, max_tokens: int) -> RunningPrompt:  # noqa: ARG002 - as HybridPages
        """A request that holds the pages it found."""
        matched = self._matched(prompt) if read else []
        self.queries += len(prompt.tokens)
        self.hits += len(matched) * self.page_size
        running = RunningPrompt(self, prompt, len(matched) * self.page_size, list(prompt.tokens))
        for page in matched:
            running.hold(page)
        return running


class TimedCore(EngineCore):
    """Requests that take their time: one queue of prompts, first come, first served."""

    def __init__(
        self, cache: QuickCache | HybridPages, clock: Clock, end_of_step: Callable[[], None]
    ) -> None:
        super().__init__(cache, end_of_step=end_of_step)
        self.record = Record()
        self._quick = cache
        self._clock = clock
        self._prefills = asyncio.Lock()
        self._closed = asyncio.Event()
        self._free_at = 0.0

    @asynccontextmanager
    async def generate(
        self, prompt: CachePrompt, max_tokens: int, *, read: bool = True
    ) -> AsyncIterator[Generation]:
        """See `EngineCore.generate`. Returns once the first token is there."""
        arrived = time.monotonic()
        self.waiting += 1
        try:
            await self._prefills.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        running = None
        try:
            try:
                running = await self._begin(prompt, max_tokens, read=read)
                await self._compute(len(prompt.tokens) - running.cached_tokens, arrived)
                running.store(len(prompt.tokens))
                self.end_of_step()
            finally:
                self._prefills.release()
            self.record.first_token_s.append(time.monotonic() - arrived)
            output = self._output(prompt, max_tokens, running)
            yield Generation(running.cached_tokens, len(prompt.tokens), output, running)
        finally:
            if running is not None:
                running.close()
                self._closed.set()
            self.running -= 1

    def receive(self, prompt: CachePrompt) -> None:
        """Stores the KV of a prompt that another engine computed."""
        running = self._quick.look_up(prompt, read=True, max_tokens=0)
        if running is not None:
            running.store(len(prompt.tokens))
            running.close()
            self.end_of_step()

    async def _begin(
        self, prompt: CachePrompt, max_tokens: int, *, read: bool
    ) -> RunningPrompt | HybridRunning:
        """The request with its pages, once there is room for it."""
        while True:
            running = self._quick.look_up(prompt, read=read, max_tokens=max_tokens)
            if running is not None:
                return running
            self._closed.clear()
            await self._closed.wait()

    async def _compute(self, tokens: int, arrived: float) -> None:
        """Takes the time for the tokens, from the end of the prompt before; late timers do not add up."""
        seconds = tokens / self._clock.prefill_rate
        self._free_at = max(self._free_at, arrived) + seconds
        self.record.requests += 1
        self.record.busy_s += seconds
        await _until(self._free_at)

    async def _output(
        self, prompt: CachePrompt, max_tokens: int, running: RunningPrompt | HybridRunning
    ) -> AsyncIterator[int]:
        began = time.monotonic()
        for at, token in enumerate(answer_ids(prompt.tokens, max_tokens)):
            await _until(began + at * self._clock.token_s)
            running.append(token)
            self.end_of_step()
            yield token


class MockVllm(FakeVllm):
    """The fake with a clock."""

    def __init__(
        self,
        options: VllmOptions,
        clock: Clock,
        *,
        window_groups: int = 0,
        window_tokens: int = 0,
        port: int = 0,
        transfer_rate: float = 80_000,
    ) -> None:
        """`window_groups`: of a hybrid model, with windows of `window_tokens`. `port`, `transfer_rate`: of
        its connector, if the options name one."""
        self._clock = clock
        self._port, self._transfer_rate = port, transfer_rate
        self._windows = {"groups": window_groups, "window_tokens": window_tokens} if window_groups else None
        super().__init__(options)
        for publisher in self.publishers:
            publisher.topic = ""  # as vLLM's is, unless it is given one; peers that are told no topic want it
        self.app.router.routes += [
            Route("/mock", self._told),
            Route("/mock/restart", self._restarted, methods=["POST"]),
            Route("/mock/nixl", self._nixl, methods=["GET", "POST"]),
        ]

    def restart(self) -> None:
        """As another process, which has seen nothing: what one router sent is no weight for the next."""
        super().restart()
        self.seen.clear()
        self.rendered.clear()

    def usage(self, generation: Generation, count: int, *, was_pulled: bool = False) -> dict:
        """The usage that an answer of `count` tokens reports."""
        cached = 0 if was_pulled else generation.cached_tokens
        return self._usage(generation.prompt_tokens, count, cached)

    def prompt_of(self, token_ids: list[int]) -> CachePrompt:
        """The prompt of a request that names nothing else."""
        return self._prompt({"model": MODEL}, token_ids)

    async def pulled(self, prompt: CachePrompt, body: dict) -> tuple[CachePrompt, bool]:
        """Pulls a prompt's KV if the request names an engine that keeps it. Returns the prompt that this
        engine has then, and whether it pulled."""
        params = body.get("kv_transfer_params") or {}
        if self.nixl is None or not params.get("do_remote_prefill"):
            return prompt, False
        found, prompt = await self._with_kv(self.cores[0], prompt, params)
        return prompt, found is not Found.NOTHING

    async def _with_kv(
        self, core: EngineCore, prompt: CachePrompt, params: dict
    ) -> tuple[Found, CachePrompt]:
        found, prompt = await super()._with_kv(core, prompt, params)
        if found is not Found.NOTHING and isinstance(core, TimedCore):
            core.receive(prompt)
        return found, prompt

    def _connector(self) -> MockNixl:
        rate, lease_s = self._transfer_rate, self.options.kv_lease_duration
        return MockNixl(lease_s, self._port, transfer_rate=rate)

    async def _nixl(self, request: Request) -> Response:
        """Its leases; or, for another engine, the KV of one."""
        if self.nixl is None:
            return Response(status_code=404)
        if request.method == "GET":
            return JSONResponse(self.nixl.told)
        asked = await request.json()
        if asked["engine"] != self.nixl.id:
            return Response(status_code=404)
        return JSONResponse(self.nixl.give(asked["request"]).name)

    def _core(self, rank: int) -> TimedCore:
        plain = super()._core(rank)
        cache = QuickCache(plain.cache.page_size, plain.cache.capacity, plain.cache.listener)
        if self._windows is not None:
            cache = HybridPages(cache, cache.capacity, cache.listener, **self._windows)
        return TimedCore(cache, self._clock, plain.end_of_step)

    def _chat_prompt(self, body: dict) -> CachePrompt:
        if not body.get("messages") or any(name in body for name in RARE_FIELDS):
            return super()._chat_prompt(body)
        return self._prompt(body, tokenizer().chat(body["messages"]).token_ids)

    def _serve(self, path: str, read: Callable[[dict], CachePrompt]) -> Callable:
        thorough = super()._serve(path, read)

        async def serve(request: Request) -> Response | QuickStream:
            body = await self._body(request)
            is_rare = not body.get("stream") or any(name in body for name in RARE_FIELDS)
            if path != CHAT or is_rare:
                return await thorough(request)
            limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
            prompt, was_pulled = await self.pulled(read(body), body)
            tells_tokens = body.get("return_token_ids") is True
            return QuickStream(self, prompt, limit, was_pulled=was_pulled, tells_tokens=tells_tokens)

        return serve

    async def _told(self, _: Request) -> Response:
        record = self.cores[0].record
        return JSONResponse(
            {
                "requests": record.requests,
                "busy_s": record.busy_s,
                "cpu_s": time.process_time() - record.cpu_s,
                "first_token_s": record.first_token_s,
            }
        )

    async def _restarted(self, _: Request) -> Response:
        self.restart()
        return Response()


class QuickStream:
    """An answer as an event stream: what `answers.event_stream` sends, for less of a busy machine's time."""

    def __init__(
        self,
        engine: MockVllm,
        prompt: CachePrompt,
        max_tokens: int,
        *,
        was_pulled: bool = False,
        tells_tokens: bool = False,
    ) -> None:
        """`tells_tokens`: the ids of the prompt and the answer, as kvpin asks for to move a stream."""
        self._engine = engine
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._was_pulled = was_pulled
        self._tells_tokens = tells_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Serves the request."""
        core, prompt, tells = self._engine.cores[0], self._prompt, self._tells_tokens
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        async with core.generate(prompt, self._max_tokens) as generation:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            ids = {"prompt_token_ids": list(prompt.tokens)} if tells else {}
            await _send(send, _chunk({"role": "assistant", "content": ""}, **ids))
            count = 0
            async for token in generation.output:
                count += 1
                finish = "length" if count == self._max_tokens else None
                more = {"token_ids": [token]} if tells else {}
                await _send(send, _chunk({"content": words()[token]}, finish, more))
            usage = self._engine.usage(generation, count, was_pulled=self._was_pulled)
            await _send(send, _event(choices=[], usage=usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _chunk(delta: dict, finish: str | None = None, more: dict | None = None, **fields: object) -> bytes:
    return _event(choices=[{"index": 0, "delta": delta, "finish_reason": finish, **(more or {})}], **fields)


def _event(**fields: object) -> bytes:
    head = {"id": "cmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(head | fields, separators=(",", ":")).encode() + b"\n\n"


async def _until(moment: float) -> None:
    seconds = moment - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


def parser() -> argparse.ArgumentParser:
    """The options of an engine."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--kv-tokens", type=int, default=100_000)
    options.add_argument("--prefill-rate", type=float, default=10_000, help="tokens a second")
    options.add_argument("--token-ms", type=float, default=15, help="from token to token")
    options.add_argument("--window-groups", type=int, default=0, help="of a hybrid model")
    options.add_argument("--window", type=int, default=1024, help="tokens of their window")
    options.add_argument("--nixl", action="store_true", help="passes KV to others and pulls theirs")
    options.add_argument("--transfer-rate", type=float, default=80_000, help="tokens a second")
    options.add_argument("--event-ports", type=int, nargs=2, default=(0, 0), help="of KV events and replay")
    return options


def made_engine(arguments: argparse.Namespace) -> MockVllm:
    """The engine that the options describe, with all loaded that it needs."""
    options = VllmOptions(
        model=MODEL,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=arguments.kv_tokens // BLOCK_TOKENS * (1 + arguments.window_groups) + 1,
        max_model_len=32_768,
        event_ports=tuple(arguments.event_ports),
        nixl=arguments.nixl,
    )
    engine = MockVllm(
        options,
        Clock(arguments.prefill_rate, arguments.token_ms / 1000),
        window_groups=arguments.window_groups,
        window_tokens=arguments.window,
        port=arguments.port,
        transfer_rate=arguments.transfer_rate,
    )
    words()  # not while a client waits
    gc.collect()
    gc.freeze()  # what was loaded need not be looked through again and again
    return engine


def main() -> None:
    """Serves one engine until it is ended."""
    arguments = parser().parse_args()
    # Routers try out other protocols on it, which is worth no warning.
    uvicorn.run(made_engine(arguments).app, port=arguments.port, log_level="critical", access_log=False)


if __name__ == "__main__":
    main()
