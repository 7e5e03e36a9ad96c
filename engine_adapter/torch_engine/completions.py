"""Serves `/v1/chat/completions` and `/v1/completions`: request bytes in, answer bytes out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace

from starlette.types import Message, Receive, Scope, Send

from engine_adapter.errors import EngineUnavailable
from engine_adapter.torch_engine.admission import check_token_id
from engine_adapter.torch_engine.answers import (
    END_OF_STREAM,
    AnswerWriter,
    ChatShape,
    CompletionShape,
    Piece,
    Shape,
    Usage,
    error_event,
)
from engine_adapter.torch_engine.api_errors import as_api_error, error_body
from engine_adapter.torch_engine.bodies import read_body
from engine_adapter.torch_engine.detokenize import Detokenizer
from engine_adapter.torch_engine.generation import Generation
from engine_adapter.torch_engine.metrics import EngineMetrics
from engine_adapter.torch_engine.protocol import (
    ChatRequest,
    CompletionRequest,
    PromptRequest,
    answered_of,
    parse,
    retention_of,
    salt_of,
    sampling_of,
)
from engine_adapter.torch_engine.requests import Finished, GenerationRequest, RequestFailed, Token
from engine_adapter.torch_engine.service import EngineService
from engine_adapter.types import extra_array

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
        request = parse(await read_body(scope, receive, app.state.max_body_bytes), self._kind)
        answer = await _prepare(service, metrics, request)
        serving = asyncio.ensure_future(answer.serve(send))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not serving.done():
                serving.cancel()
        await _settle(serving)


async def _client_leaves(receive: Receive) -> None:
    message: Message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


async def _settle(serving: asyncio.Future[None]) -> None:
    """Waits for the end of an answer. A cancelled one is no error: its client left."""
    await asyncio.wait((serving,))
    if not serving.cancelled():
        serving.result()


async def _prepare(service: EngineService, metrics: EngineMetrics, request: PromptRequest) -> Answer:
    """Checks the request and renders its prompt, before the engine sees it."""
    default = service.model.default_max_tokens if isinstance(request, ChatRequest) else None
    sampling = sampling_of(request, default_max_tokens=default)
    salt = salt_of(request.cache_salt)
    retention = retention_of(request)
    prompt = await service.prompt(request)
    is_chat = isinstance(request, ChatRequest)
    service.check_length(request, len(prompt.token_ids))
    answered = answered_of(request, sampling)
    for index, token in enumerate(answered):
        check_token_id(token, f"answer_token_ids[{index}]", service.model.vocab_size)
    prompt_token_ids, token_ids = prompt.token_ids, prompt.token_ids + answered
    room = service.engine.max_model_len - len(prompt_token_ids)
    sampling = replace(
        sampling,
        max_tokens=min(sampling.max_tokens or room, room) - len(answered),
        min_tokens=max(sampling.min_tokens - len(answered), 0),
    )
    extra_ids = prompt.embeddings.extra_ids
    shape: Shape = ChatShape(service.tokenizer) if is_chat else CompletionShape(service.tokenizer, answered)
    writer = AnswerWriter(
        shape,
        model=service.model.name,
        with_logprobs=sampling.logprobs is not None,
        prompt_token_ids=prompt_token_ids.tolist() if request.return_token_ids else None,
        include_usage=request.include_usage,
        tells_tokens=bool(request.stream_token_ids),
        goes_on=bool(answered),
    )
    generation = GenerationRequest(
        request_id=secrets.token_hex(12),
        token_ids=token_ids,
        sampling=sampling,
        extra_ids=None if extra_ids is None else extra_ids + extra_array([0] * len(answered)),
        embeddings=prompt.embeddings.tensors,
        cache_salt=salt,
        retention=retention,
        priority=request.priority or 0,
        answered=len(answered),
    )
    return Answer(service, metrics, generation, writer, request)


class Answer:
    """The answer to one request while it is generated."""

    def __init__(
        self,
        service: EngineService,
        metrics: EngineMetrics,
        request: GenerationRequest,
        writer: AnswerWriter,
        asked: PromptRequest,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._request = request
        self._writer = writer
        self._streams = bool(asked.stream)
        self._detokenizer = Detokenizer(service.tokenizer, asked.stops)
        eos: frozenset[int] = frozenset() if request.sampling.ignore_eos else service.model.eos_token_ids
        self._end_tokens = eos.union(request.sampling.stop_token_ids)
        self._answered = request.answered
        self._completion_tokens = 0
        self._finish_reason: str | None = None
        # New text depends on the text before it: characters and stop strings may span both.
        for token_id in request.token_ids[len(request.token_ids) - request.answered :]:
            self._detokenizer.push(token_id)

    async def serve(self, send: Send) -> None:
        """Sends the answer. Nothing is sent before the first token, so that a failure has its own status.

        Raises:
            RequestFailed, EngineUnavailable: before anything was sent.
        """
        started = time.perf_counter()
        async with Generation(self._service.engine, self._request) as generation:
            await generation.scheduled()
            if self._streams:
                await self._stream(generation, send, started)
            else:
                await self._send_whole(generation, send, started)

    async def _send_head(self, send: Send, cached_tokens: int) -> None:
        content_type = b"text/event-stream; charset=utf-8" if self._streams else b"application/json"
        headers = [(b"content-type", content_type), (b"x-kv-cached-tokens", str(cached_tokens).encode())]
        if self._streams:
            headers.append((b"cache-control", b"no-cache"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _stream(self, generation: Generation, send: Send, started: float) -> None:
        piece = await self._next_piece(generation, started)
        await self._send_head(send, generation.cached_tokens)
        pending = self._writer.opening()
        while self._finish_reason is None:
            pending += self._writer.piece(piece)
            if pending:
                await _send_part(send, pending)
                pending = b""
            try:
                piece = await self._next_piece(generation, started)
            except (RequestFailed, EngineUnavailable) as error:
                await _end_broken(send, error)
                return
        last = self._writer.last(piece, self._finish_reason, self._usage(generation))
        await _send_last(send, pending + last)

    async def _send_whole(self, generation: Generation, send: Send, started: float) -> None:
        texts: list[str] = []
        tokens: list[Token] = []
        while self._finish_reason is None:
            piece = await self._next_piece(generation, started)
            texts.append(piece.text)
            tokens += piece.tokens
        whole = Piece("".join(texts), tokens)
        body = self._writer.whole(whole, self._finish_reason, self._usage(generation))
        await self._send_head(send, generation.cached_tokens)
        await _send_last(send, body)

    async def _next_piece(self, generation: Generation, started: float) -> Piece:
        """The next tokens and their text; sets the finish reason with the last of them."""
        piece = Piece()
        for output in await generation.outputs():
            if isinstance(output, Finished):
                self._finish_reason = output.reason
                break
            if not self._completion_tokens:
                self._metrics.first_token_seconds.observe(time.perf_counter() - started)
            self._completion_tokens += 1
            piece.tokens.append(output)
            if output.token_id not in self._end_tokens:
                piece.text += self._detokenizer.push(output.token_id)
            if self._detokenizer.stopped:
                self._finish_reason = "stop"
                return piece
        if self._finish_reason is not None:
            piece.text += self._detokenizer.finish()
            if self._detokenizer.stopped:
                self._finish_reason = "stop"
        return piece

    def _usage(self, generation: Generation) -> Usage:
        prompt = len(self._request.token_ids) - self._answered
        cached = min(generation.cached_tokens, prompt)
        return Usage(prompt, cached, self._answered + self._completion_tokens)


async def _end_broken(send: Send, error: RequestFailed | EngineUnavailable) -> None:
    """Ends a stream with an error event. When the engine has ended, the stream is not closed cleanly: the
    server then cuts the connection, and nobody takes the answer for a whole one."""
    _log.warning("a stream ends with an error event: %s", error)
    known = as_api_error(error)
    event = error_event(error_body(known)) if known is not None else b""
    if isinstance(error, RequestFailed):
        await _send_last(send, event + END_OF_STREAM)
    else:
        await _send_part(send, event)


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})
