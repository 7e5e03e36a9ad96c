"""Serves `/v1/chat/completions` and `/v1/completions`: request bytes in, answer bytes out."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.types import Message, Receive, Scope, Send

from engine_adapter.errors import EngineUnavailable
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from engine_adapter.torch_engine.answers import END_OF_STREAM, Piece, TokenUsage, error_event
from engine_adapter.torch_engine.metrics import EngineMetrics
from engine_adapter.torch_engine.prepare import Prepared, prepare
from engine_adapter.torch_engine.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    inputs_of,
    parse,
    salt_of,
)
from engine_adapter.torch_engine.requests import (
    GenerationRequest,
    RequestFailed,
    RequestRefused,
    SamplingParams,
    Token,
)
from engine_adapter.torch_engine.scheduler import check_token_id
from engine_adapter.torch_engine.service import EngineService, Generation
from engine_adapter.torch_engine.web import ApiError, as_api_error, error_body, json_response, read_body
from engine_adapter.types import TOOL_S, TokenIds

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


# --- serves `/v1/embeddings`: of each text the last hidden state after its last token, normalised -------
# A text runs in the engine's steps like any other prompt: it waits its turn, takes blocks of the KV cache and
# shares them. The one token that the engine generates after it is dropped.

MAX_TOKENS = 300_000
"""Most tokens of all texts of a request; as at OpenAI."""
AT_ONCE = 64
"""Texts of a request that the engine gets at a time, so that other requests have their turn between them."""
# Numbers that are written as JSON in about 1 ms.
_NUMBERS_PER_MS = 8192


class EmbeddingRoute:
    """The ASGI app of the route."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. When the client leaves, its texts are computed no further."""
        state = scope["app"].state
        service: EngineService = state.host.ready()
        request = parse(await read_body(scope, receive, state.max_body_bytes), EmbeddingRequest)
        service.check_model(request.model)
        hidden_size = service.model.hidden_size
        if request.dimensions not in (None, hidden_size):
            raise ApiError(
                f"dimensions is {request.dimensions}; embeddings of this model have {hidden_size}",
                param="dimensions",
            )
        requests = await _requests(service, request)

        async def answer() -> None:
            vectors: list[bytes] = []
            for first in range(0, len(requests), AT_ONCE):
                vectors += await _vectors(service, requests[first : first + AT_ONCE])
            tokens = sum(len(each.token_ids) for each in requests)
            ms = len(vectors) * hidden_size / _NUMBERS_PER_MS
            response = await off_loop(lambda: json_response(_body(service, request, vectors, tokens)), ms=ms)
            await response(scope, receive, send)

        await while_client_stays(receive, answer())


async def _requests(service: EngineService, request: EmbeddingRequest) -> list[GenerationRequest]:
    """A request to the engine for each text, in their order; raises ApiError and RequestRefused."""
    inputs = inputs_of(request)
    salt = salt_of(request.cache_salt)
    for name, each in inputs.items():
        if isinstance(each, str):
            service.check_chars(len(each), name)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    size = sum(map(len, inputs.values()))
    prompts = await service.tokenizer.off_loop(size, lambda: _tokens(service, inputs, special=special))
    total = sum(map(len, prompts))
    if total > MAX_TOKENS:
        raise ApiError(f"input has {total} tokens; at most {MAX_TOKENS} are taken", param="input")
    request_id = secrets.token_hex(12)
    return [
        GenerationRequest(
            f"{request_id}-{index}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=1),
            cache_salt=salt,
            priority=request.priority or 0,
            wants_hidden=True,
        )
        for index, prompt in enumerate(prompts)
    ]


def _tokens(
    service: EngineService, inputs: Mapping[str, str | TokenIds[int]], *, special: bool
) -> list[TokenIds[int]]:
    """The token ids of each text, checked."""
    prompts = []
    for name, each in inputs.items():
        if isinstance(each, str):
            token_ids = service.tokenizer.encode(each, add_special_tokens=special)
            if not token_ids:
                raise ApiError(f"{name} has no tokens", param=name)
        else:
            token_ids = each
            for index, token in enumerate(each):
                check_token_id(token, f"{name}[{index}]", service.model.vocab_size)
        service.check_fits(len(token_ids), name)
        prompts.append(token_ids)
    return prompts


async def _vectors(service: EngineService, requests: list[GenerationRequest]) -> list[bytes]:
    """The hidden state of each request; raises RequestFailed, RequestRefused and EngineUnavailable."""
    found: dict[int, bytes] = {}
    async with Generation(service.engine, requests) as generation:
        while len(found) < len(requests):
            for index, outputs in (await generation.outputs()).items():
                for output in outputs:
                    if isinstance(output, Token) and output.hidden is not None:
                        found[index] = output.hidden
    return [found[index] for index in range(len(requests))]


def _body(
    service: EngineService, request: EmbeddingRequest, vectors: list[bytes], tokens: int
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.model.name, "usage": usage}


def _shown(vector: bytes, encoding_format: str | None) -> str | list[float]:
    """The normalised vector as numbers, or as OpenAI's base64: of little-endian float32."""
    values = np.frombuffer(vector, dtype=np.float32)
    length = np.linalg.norm(values)
    normal: NDArray[np.float32] = (values / length if length else values).astype("<f4")
    if encoding_format == "base64":
        return base64.b64encode(normal.tobytes()).decode()
    numbers: list[float] = normal.tolist()
    return numbers
