"""The mock engine of `chaos.py`: `mock_engine.py` with texts that are not those of its neighbours.

    python benchmarks/chaos_mock.py --number 2 --port 8001

With `--model` it serves another model, and answers whatever it is asked for, as llama-server and SGLang do.
It serves chats alone; `/v1/messages` and `/v1/responses` reach it as chats. A chat with `padding` gets that
many bytes more in each chunk, for clients that read slowly.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from chaos_texts import Told, streamed, told
from harness import ROOT
from mock_engine import CHAT, Clock, MockVllm
from router_work import BLOCK_TOKENS, MODEL, words
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

sys.path.insert(0, str(ROOT))
from tests.fake_engines.cache import CachePrompt
from tests.fake_engines.vllm import VllmOptions


class DifferingVllm(MockVllm):
    """The mock with answers of its own."""

    def __init__(self, options: VllmOptions, clock: Clock, number: int, port: int) -> None:
        self._number = number
        super().__init__(options, clock, port=port)

    async def _body(self, request: Request) -> dict[str, Any]:
        if self.options.model != MODEL:
            return json.loads(await request.body())
        return await super()._body(request)

    def _serve(self, path: str, read: Callable[[dict], CachePrompt]) -> Callable:
        other = super()._serve(path, read)

        async def serve(request: Request) -> Response | Stream:
            body = await self._body(request)
            params = body.get("kv_transfer_params") or {}
            if path != CHAT or params.get("do_remote_decode"):
                return await other(request)
            prompt, _ = await self.pulled(read(body), body)
            limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
            if not body.get("stream"):
                return await self._whole(prompt, told(prompt.tokens, limit, self._number))
            is_greedy = body.get("temperature") == 0
            said = (streamed if is_greedy else told)(prompt.tokens, limit, self._number)
            return Stream(self, prompt, said, int(body.get("padding") or 0))

        return serve

    async def _whole(self, prompt: CachePrompt, said: Told) -> Response:
        async with self.cores[0].generate(prompt, len(said.pieces)) as generation:
            async for _ in generation.output:
                pass
        message = {"role": "assistant", "content": said.text}
        choice = {"index": 0, "message": message, "finish_reason": said.finish}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
        usage = self.usage(generation, len(said.pieces))
        return JSONResponse(head | {"choices": [choice], "usage": usage})


class Stream:
    """An answer as a stream. It ends without a word where `said.finish` is None."""

    def __init__(self, engine: DifferingVllm, prompt: CachePrompt, said: Told, padding: int) -> None:
        self._engine, self._prompt, self._said = engine, prompt, said
        self._head: dict[str, Any] = {"id": "cmpl-1", "object": "chat.completion.chunk", "model": MODEL}
        if padding:
            self._head["padding"] = "x" * padding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Serves the request."""
        said = self._said
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        async with self._engine.cores[0].generate(self._prompt, len(said.pieces)) as generation:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(send, {"role": "assistant", "content": ""})
            pieces = iter(said.pieces)
            async for _ in generation.output:
                await self._send(send, {"content": next(pieces)})
            if said.finish is not None:
                await self._send(send, {}, said.finish)
                usage = self._engine.usage(generation, len(said.pieces))
                await self._write(send, self._head | {"choices": [], "usage": usage})
        end = b"data: [DONE]\n\n" if said.finish is not None else b""
        await send({"type": "http.response.body", "body": end})

    async def _send(self, send: Send, delta: dict[str, str], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        await self._write(send, self._head | {"choices": [choice]})

    async def _write(self, send: Send, chunk: dict[str, Any]) -> None:
        body = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


def main() -> None:
    """Serves one engine until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, required=True, help="whose texts it tells")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--kv-tokens", type=int, default=12_000)
    parser.add_argument("--prefill-rate", type=float, default=8000, help="tokens a second")
    parser.add_argument("--token-ms", type=float, default=40, help="from token to token")
    parser.add_argument("--lease-s", type=float, help="of KV for other engines; it pulls theirs")
    parser.add_argument("--event-ports", type=int, nargs=2, default=(0, 0), help="of KV events and replay")
    arguments = parser.parse_args()
    options = VllmOptions(
        model=arguments.model,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=arguments.kv_tokens // BLOCK_TOKENS + 1,
        max_model_len=32_768,
        event_ports=tuple(arguments.event_ports),
        enable_scale_out=False,  # it renders nothing: responses reach it as chats, too
        nixl=arguments.lease_s is not None,
        kv_lease_duration=arguments.lease_s or 0.0,
    )
    clock = Clock(arguments.prefill_rate, arguments.token_ms / 1000)
    engine = DifferingVllm(options, clock, arguments.number, arguments.port)
    words()  # not while a client waits
    gc.collect()
    gc.freeze()  # what was loaded need not be looked through again and again
    uvicorn.run(engine.app, port=arguments.port, log_level="critical", access_log=False)


if __name__ == "__main__":
    main()
