"""Serves `/v1/chat/completions` and `/v1/completions`: request bytes in, answer bytes out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from engine_adapter.errors import EngineUnavailable
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from engine_adapter.torch_engine.answers import END_OF_STREAM, Piece, TokenUsage, error_event
from engine_adapter.torch_engine.generation import Generation
from engine_adapter.torch_engine.metrics import EngineMetrics
from engine_adapter.torch_engine.prepare import Prepared, prepare
from engine_adapter.torch_engine.protocol import ChatRequest, CompletionRequest, parse
from engine_adapter.torch_engine.requests import RequestFailed, RequestRefused, Token
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.torch_engine.web import as_api_error, error_body, read_body
from engine_adapter.types import TOOL_S

_log = logging.getLogger("kvpin.engine")


class CompletionRoute:
    """The ASGI app of one of the two routes."""

    def __init__(self, kind: type[ChatRequest | CompletionRequest]) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. When the client leaves, its generation ends at once."""
        app = scope["app"]
        service: EngineService = app.state.host.ready()
        metrics: EngineMetrics = app.state.metrics
        body = await read_body(scope, receive, app.state.max_body_bytes)
        request = await off_loop(lambda: parse(body, self._kind), ms=len(body) / JSON_BYTES_PER_MS)
        answer = CompletionAnswer(service, metrics, await prepare(service, request))
        await while_client_stays(receive, answer.serve(send))


async def while_client_stays(receive: Receive, answer: Coroutine[Any, Any, None]) -> None:
    """Runs `answer` to its end, or until the client leaves. Raises what it raises."""
    serving = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        serving.cancel()  # unless it is done
    await asyncio.wait((serving,))
    if not serving.cancelled():
        serving.result()


async def _client_leaves(receive: Receive) -> None:
    message: Message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


@dataclass
class CompletionAnswer:
    """The answer to one request while it is generated."""

    service: EngineService
    metrics: EngineMetrics
    prepared: Prepared
    _has_token: bool = field(default=False, init=False)

    async def serve(self, send: Send) -> None:
        """Sends the answer. Nothing is sent before the first token, so that a failure has its own status.

        Raises:
            RequestFailed, RequestRefused, EngineUnavailable: before anything was sent.
        """
        started = time.perf_counter()
        async with Generation(self.service.engine, self.prepared.requests) as generation:
            if self.prepared.streams:
                await self._stream(generation, send, started)
            else:
                await self._send_whole(generation, send, started)

    async def _send_head(self, send: Send, cached_tokens: int) -> None:
        streams = self.prepared.streams
        content_type = b"text/event-stream; charset=utf-8" if streams else b"application/json"
        headers = [(b"content-type", content_type), (b"x-kv-cached-tokens", str(cached_tokens).encode())]
        if streams:
            headers.append((b"cache-control", b"no-cache"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _stream(self, generation: Generation, send: Send, started: float) -> None:
        pieces: list[tuple[int, Piece]] = []
        while not self._has_token:
            pieces += await self._next_pieces(generation, started)
        await self._send_head(send, generation.cached_tokens)
        pending = self.prepared.writer.opening()
        while True:
            pending += b"".join(self.prepared.writer.piece(index, piece) for index, piece in pieces)
            if self._is_done:
                break
            if pending:
                await _send_part(send, pending)
                pending = b""
            try:
                pieces = await self._next_pieces(generation, started)
            except (RequestFailed, RequestRefused, EngineUnavailable) as error:
                await _end_broken(send, error)
                return
        await _send_last(send, pending + self.prepared.writer.end(self._usage(generation)))

    async def _send_whole(self, generation: Generation, send: Send, started: float) -> None:
        choices = [Piece() for _ in self.prepared.readers]
        while not self._is_done:
            for index, piece in await self._next_pieces(generation, started):
                choices[index].add(piece)
        body = self.prepared.writer.whole(choices, self._usage(generation))
        await self._send_head(send, generation.cached_tokens)
        await _send_last(send, body)

    @property
    def _is_done(self) -> bool:
        return all(reader.finish_reason is not None for reader in self.prepared.readers)

    async def _next_pieces(self, generation: Generation, started: float) -> list[tuple[int, Piece]]:
        """New text and tokens of each choice."""
        for index, outputs in (await generation.outputs()).items():
            if not self._has_token and any(isinstance(output, Token) for output in outputs):
                self._has_token = True
                self.metrics.first_token_seconds.observe(time.perf_counter() - started)
            self.prepared.readers[index].accept(outputs)
            reason = self.prepared.readers[index].finish_reason
            if reason is not None:
                generation.cancel(index)
            if reason == "tool_calls":
                generation.await_turn(index, TOOL_S)
        return [
            (index, piece) for index, reader in enumerate(self.prepared.readers) if (piece := reader.take())
        ]

    def _usage(self, generation: Generation) -> TokenUsage:
        prompt = self.prepared.prompt_tokens
        made = sum(self.prepared.answered + reader.completion_tokens for reader in self.prepared.readers)
        return TokenUsage(prompt, min(generation.cached_tokens, prompt), made)


async def _end_broken(send: Send, error: RequestFailed | RequestRefused | EngineUnavailable) -> None:
    """Ends a stream with an error event. When the engine has ended, the stream is not closed cleanly: the
    server then cuts the connection, and nobody takes the answer for a whole one."""
    _log.warning("a stream ends with an error event: %s", error)
    known = as_api_error(error)
    event = error_event(error_body(known)) if known is not None else b""
    if isinstance(error, EngineUnavailable):
        await _send_part(send, event)
    else:
        await _send_last(send, event + END_OF_STREAM)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
