"""Serves `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`: request bytes in, answer bytes out."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_adapter.errors import EngineUnavailable
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from engine_adapter.torch_engine.answers import (
    END_OF_STREAM,
    AnswerWriter,
    ChoiceReader,
    CompletionWriter,
    Detokenizer,
    Echo,
    Piece,
    event_of,
    shown,
)
from engine_adapter.torch_engine.grammar import Grammar, Structure, ToolUse, structure_of, tool_use_of
from engine_adapter.torch_engine.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    PromptRequest,
    answered_of,
    as_api_error,
    body_of,
    choices_of,
    error_body,
    inputs_of,
    json_response,
    parse,
    prompt_of,
    retention_of,
    salt_of,
    sampling_of,
)
from engine_adapter.torch_engine.requests import (
    GenerationRequest,
    RequestFailed,
    RequestRefused,
    SamplingParams,
    Token,
)
from engine_adapter.torch_engine.scheduler import check_token_ids
from engine_adapter.torch_engine.service import EnginePrompt, EngineService, Generation
from engine_adapter.torch_engine.tool_calls import format_of
from engine_adapter.types import TOOL_S, TokenIds, extra_array

_log = logging.getLogger("kvpin.engine")
_LOGPROBS_PER_MS = 150
_ANSWERED_PER_MS = 100  # tokens of an answer that goes on: each is read again


def completion_of(
    kind: type[ChatRequest | CompletionRequest],
) -> Callable[[EngineService, Request], Awaitable[ASGIApp]]:
    """Answers the requests of one of the two kinds. When a client leaves, its generation ends at once."""

    async def answer(service: EngineService, request: Request) -> ASGIApp:
        body = await body_of(request)
        asked = await off_loop(lambda: parse(body, kind), ms=len(body) / JSON_BYTES_PER_MS)
        return _while_client_stays((await prepare(service, asked)).serve)

    return answer


def _while_client_stays(serve: Callable[[Send], Coroutine[Any, Any, None]]) -> ASGIApp:
    """Runs `serve` to its end, or until the client leaves. Raises what it raises."""

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        async def client_leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        serving = asyncio.ensure_future(serve(send))
        leaving = asyncio.ensure_future(client_leaves())
        try:
            await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            serving.cancel()  # unless it is done
        await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()

    return app


@dataclass(kw_only=True)
class CompletionAnswer:
    """The answer to one checked request while it is generated."""

    service: EngineService
    requests: list[GenerationRequest]  # to the engine; one per choice, as `readers`
    readers: list[ChoiceReader]
    writer: AnswerWriter
    streams: bool
    prompt_tokens: int
    _started: float = field(default_factory=time.perf_counter, init=False)
    _has_token: bool = field(default=False, init=False)

    async def serve(self, send: Send) -> None:
        """Sends the answer. Nothing is sent before the first token, so that a failure has its own status:
        until then, it raises RequestFailed, RequestRefused and EngineUnavailable."""
        async with Generation(self.service.engine, self.requests) as generation:
            await (self._stream if self.streams else self._send_whole)(generation, send)

    async def _send_head(self, send: Send, cached_tokens: int) -> None:
        content_type = b"text/event-stream; charset=utf-8" if self.streams else b"application/json"
        headers = [(b"content-type", content_type), (b"x-kv-cached-tokens", str(cached_tokens).encode())]
        headers += [(b"cache-control", b"no-cache")] if self.streams else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _stream(self, generation: Generation, send: Send) -> None:
        pieces: list[tuple[int, Piece]] = []
        while not self._has_token:
            pieces += await self._next_pieces(generation)
        await self._send_head(send, generation.cached_tokens)
        pending = self.writer.opening()
        if self.writer.with_logprobs:  # an echo's are many
            write = partial(b"".join, starmap(self.writer.piece, pieces))
            pending += await off_loop(write, ms=self._ms(piece for _, piece in pieces))
            pieces = []
        while True:
            pending += b"".join(self.writer.piece(index, piece) for index, piece in pieces)
            if self._is_done:
                break
            if pending:
                await _send_body(send, pending, more=True)
                pending = b""
            try:
                pieces = await self._next_pieces(generation)
            except (RequestFailed, RequestRefused, EngineUnavailable) as error:
                await _end_broken(send, error)
                return
        await _send_body(send, pending + self.writer.end(self._usage(generation)))

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        choices = [Piece() for _ in self.readers]
        while not self._is_done:
            for index, piece in await self._next_pieces(generation):
                choices[index].add(piece)
        write = partial(self.writer.whole, choices, self._usage(generation))
        body = await off_loop(write, ms=self._ms(choices)) if self.writer.with_logprobs else write()
        await self._send_head(send, generation.cached_tokens)
        await _send_body(send, body)

    def _ms(self, pieces: Iterable[Piece]) -> float:
        """Milliseconds in which the log probabilities of pieces are written."""
        entries = 1 + (self.requests[0].sampling.logprobs or 0)
        return entries * sum(len(piece.echoed) + len(piece.tokens) for piece in pieces) / _LOGPROBS_PER_MS

    @property
    def _is_done(self) -> bool:
        return all(reader.finish_reason is not None for reader in self.readers)

    async def _next_pieces(self, generation: Generation) -> list[tuple[int, Piece]]:
        for index, outputs in (await generation.outputs()).items():
            if not self._has_token and any(isinstance(output, Token) for output in outputs):
                self._has_token = True
                self.service.metrics.first_token_seconds.observe(time.perf_counter() - self._started)
            self.readers[index].accept(outputs)
            reason = self.readers[index].finish_reason
            if reason is not None:
                generation.cancel(index)
            if reason == "tool_calls":
                generation.await_turn(index, TOOL_S)
        return [(index, piece) for index, reader in enumerate(self.readers) if (piece := reader.take())]

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """OpenAI's `usage`: the tokens of the prompt, counted once, and of all choices."""
        prompt, answered = self.prompt_tokens, len(self.writer.answered)
        made = sum(answered + reader.completion_tokens for reader in self.readers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": min(generation.cached_tokens, prompt)},
        }


async def _end_broken(send: Send, error: RequestFailed | RequestRefused | EngineUnavailable) -> None:
    """Ends a stream with an error event. When the engine has ended, the stream is not closed cleanly: the
    server then cuts the connection, and nobody takes the answer for a whole one."""
    _log.warning("a stream ends with an error event: %s", error)
    known = as_api_error(error)
    # A bare end would look like a whole answer.
    event = event_of(error_body(known)) if known is not None else b""
    has_died = isinstance(error, EngineUnavailable)
    await _send_body(send, event if has_died else event + END_OF_STREAM, more=has_died)


async def _send_body(send: Send, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


# --- preparing: from a request to requests of the engine, one per choice, and their readers and writer ---


async def prepare(service: EngineService, request: PromptRequest) -> CompletionAnswer:
    """Checks a request and renders its prompt, before the engine sees it. Raises ApiError, ChatError,
    PromptTableError and RequestRefused: the client's fault."""
    is_chat = isinstance(request, ChatRequest)
    default = service.model.default_max_tokens if is_chat else None
    sampling = sampling_of(request, default_max_tokens=default)
    n = choices_of(request)
    use = _tool_use(service, request)
    structure = _structure(request, use)
    _check_contents(request)
    prompt = await service.prompt(request)
    service.check_length(request, len(prompt.token_ids))
    answered = answered_of(request, sampling)
    check_token_ids("answer_token_ids", enumerate(answered), service.model.vocab_size)
    salt = salt_of(request.cache_salt)
    grammar = None if structure is None else await service.grammars.compile(structure, salt)
    echo = _echo(service, request, prompt, sampling)
    skipped = frozenset() if _shows_special(service, use) else service.special_ids

    def begin() -> tuple[list[ChoiceReader], list[Grammar | None]]:
        readers = [
            ChoiceReader(
                Detokenizer(
                    service.tokenizer,
                    request.stops,
                    skipped=skipped,
                    after=prompt.token_ids,
                    min_tokens=sampling.min_tokens,
                ),
                end_tokens=sampling.ends(service.model.eos_token_ids),
                answered=answered,
                calls=None if use is None or use.reader is None else use.reader(),
                echo=echo,
                drops=sampling.max_tokens == 0,
            )
            for _ in range(n)
        ]
        return readers, [None if grammar is None else grammar.begin(answered) for _ in range(n)]

    reading_ms = len(answered) / _ANSWERED_PER_MS
    readers, grammars = await off_loop(begin, ms=reading_ms) if answered else begin()
    writer = (AnswerWriter if is_chat else CompletionWriter)(
        token_bytes=service.token_bytes,
        model=service.model.name,
        choices=n,
        with_logprobs=sampling.logprobs is not None,
        prompt_token_ids=prompt.token_ids.tolist() if request.return_token_ids else None,
        include_usage=request.include_usage,
        tells_tokens=bool(request.stream_token_ids),
        answered=answered,
        silent=skipped if echo is None else skipped - _spelled(service, echo),
    )
    extra_ids, most = prompt.extra_ids, sampling.max_tokens
    first = GenerationRequest(
        request_id=secrets.token_hex(12),
        token_ids=prompt.token_ids + answered,
        # The limits of what is still to be generated. The engine generates one token at least.
        sampling=replace(
            sampling,
            max_tokens=None if most is None else max(most - len(answered), 1),
            min_tokens=max(sampling.min_tokens - len(answered), 0),
        ),
        extra_ids=None if extra_ids is None else extra_ids + extra_array([0] * len(answered)),
        embeddings=prompt.tensors,
        cache_salt=salt,
        retention=retention_of(request),
        priority=request.priority or 0,
        answered=len(answered),
    )
    requests = [
        replace(
            first,
            request_id=f"{first.request_id}-{index}",
            sampling=_of_choice(first.sampling, index),
            constraint=grammars[index],
        )
        for index in range(n)
    ]
    return CompletionAnswer(
        service=service,
        requests=requests,
        readers=readers,
        writer=writer,
        streams=bool(request.stream),
        prompt_tokens=len(prompt.token_ids),
    )


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choice i has the request's seed + i, as elsewhere. The first choice alone scores the prompt."""
    if not index:
        return sampling
    seed = None if sampling.seed is None else sampling.seed + index
    return replace(sampling, seed=seed, prompt_logprobs=None)


def _check_contents(request: PromptRequest) -> None:
    """Refuses messages without content, as OpenAI does; templates would show the model nothing, or `None`.
    An answer of the model itself may be calls alone. Raises ApiError (400)."""
    messages = request.messages if isinstance(request, ChatRequest) else None
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        match message:
            case {"role": "user" | "system" | "developer" | "tool"} if message.get("content") is None:
                param = f"messages[{index}].content"
                raise ApiError(f"{param} is missing", param=param)


def _tool_use(service: EngineService, request: PromptRequest) -> ToolUse | None:
    """The tools that the answer may use, in the format of calls that the chat template shows the model."""
    if not isinstance(request, ChatRequest):
        return None
    template = service.tokenizer.template(request.tools) if request.tools else None
    format_, parallel = format_of(template or ""), request.parallel_tool_calls
    return tool_use_of(request.tools, request.tool_choice, parallel=parallel, format_=format_)


def _structure(request: PromptRequest, use: ToolUse | None) -> Structure | None:
    """The structure of the answer; raises ApiError (400) where other fields make it impossible."""
    asked = structure_of(request)
    of_tools = None if use is None else use.structure
    if asked is not None and of_tools is not None:
        if of_tools.kind != "tags":
            raise ApiError(f"tool_choice and {asked.param} exclude each other", param="tool_choice")
        of_tools = None
    structure = asked or of_tools
    if structure is not None:
        for name in ("ignore_eos", "min_tokens"):
            if getattr(request, name):
                raise ApiError(f"{name} and {structure.param} exclude each other", param=name)
    return structure


def _shows_special(service: EngineService, use: ToolUse | None) -> bool:
    """True if calls begin with a special token, which text usually leaves out."""
    opens = None if use is None or use.format_ is None else use.format_.opens
    return opens in service.tokenizer.special_tokens


def _echo(
    service: EngineService, request: PromptRequest, prompt: EnginePrompt, sampling: SamplingParams
) -> Echo | None:
    if not isinstance(request, CompletionRequest) or not request.echo:
        return None
    if request.answer_token_ids:
        raise ApiError("echo and answer_token_ids exclude each other", param="echo")
    if prompt.extra_ids is not None:
        raise ApiError("echo: embeddings in a prompt have no text", param="echo")
    given = prompt_of(request.prompt)
    text = given if isinstance(given, str) else service.tokenizer.decode(prompt.token_ids)
    return Echo(text, prompt.token_ids if sampling.prompt_logprobs is not None else None)


def _spelled(service: EngineService, echo: Echo) -> set[int]:
    """The special tokens that the text of an echo spells out. The tokenizer adds others."""
    special = service.special_ids.intersection(echo.unscored or ())
    return {token_id for token_id in special if shown(service.token_bytes.of(token_id)) in echo.text}


# --- serves `/v1/embeddings`: of each text the last hidden state after its last token, normalised -------
# A text runs in the engine's steps like any other prompt: it waits its turn, takes blocks of the KV cache and
# shares them. The one token that the engine generates after it is dropped.

MAX_TOKENS = 300_000
"""Most tokens of all texts of a request; as at OpenAI."""
AT_ONCE = 64
"""Texts of a request that the engine gets at a time, so that other requests have their turn between them."""
# Numbers that are written as JSON in about 1 ms.
_NUMBERS_PER_MS = 8192


async def embed(service: EngineService, request: Request) -> ASGIApp:
    """Embeds the texts of a request. When the client leaves, they are computed no further."""
    asked = parse(await body_of(request), EmbeddingRequest)
    service.check_model(asked.model)
    hidden_size = service.model.hidden_size
    if asked.dimensions not in (None, hidden_size):
        fault = f"dimensions is {asked.dimensions}; embeddings of this model have {hidden_size}"
        raise ApiError(fault, param="dimensions")
    requests = await _requests(service, asked)

    def written(vectors: list[bytes]) -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(vector, asked.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(len(each.token_ids) for each in requests)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_response({"object": "list", "data": data, "model": service.model.name, "usage": usage})

    async def serve(send: Send) -> None:
        vectors: list[bytes] = []
        for first in range(0, len(requests), AT_ONCE):
            vectors += await _vectors(service, requests[first : first + AT_ONCE])
        ms = len(vectors) * hidden_size / _NUMBERS_PER_MS
        await (await off_loop(lambda: written(vectors), ms=ms))(request.scope, request.receive, send)

    return _while_client_stays(serve)


async def _requests(service: EngineService, asked: EmbeddingRequest) -> list[GenerationRequest]:
    """A request to the engine for each text, in their order; raises ApiError and RequestRefused."""
    inputs = inputs_of(asked)
    salt = salt_of(asked.cache_salt)

    def checked(name: str, each: str | TokenIds[int]) -> TokenIds[int]:
        if isinstance(each, str):
            each = service.encode(each, name, special=asked.add_special_tokens)
        else:
            check_token_ids(name, enumerate(each), service.model.vocab_size)
        service.check_fits(len(each), name)
        return each

    def all_checked() -> list[TokenIds[int]]:
        prompts, left = [], MAX_TOKENS
        for name, each in inputs.items():
            prompts.append(checked(name, each))
            left -= len(prompts[-1])
            if left < 0:  # what follows is not encoded
                raise ApiError(f"input has more than {MAX_TOKENS} tokens", param="input")
        return prompts

    prompts = await service.tokenizer.off_loop(sum(map(len, inputs.values())), all_checked)
    request_id = secrets.token_hex(12)
    return [
        GenerationRequest(
            f"{request_id}-{index}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=1),
            cache_salt=salt,
            priority=asked.priority or 0,
            wants_hidden=True,
        )
        for index, prompt in enumerate(prompts)
    ]


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


def _shown(vector: bytes, encoding_format: str | None) -> str | list[float]:
    """The normalised vector as numbers, or as OpenAI's base64: of little-endian float32."""
    values = np.frombuffer(vector, dtype=np.float32)
    length = np.linalg.norm(values)
    normal: NDArray[np.float32] = (values / length if length else values).astype("<f4")
    if encoding_format == "base64":
        return base64.b64encode(normal.tobytes()).decode()
    numbers: list[float] = normal.tolist()
    return numbers
