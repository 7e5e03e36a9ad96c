"""Passing one request to one engine and its answer back, byte for byte.

send → refused? raise, nothing was sent to the client, so another engine may be tried
     → error of the client's making: same status, OpenAI's shape
     → JSON: read whole, so that an engine that dies in mid-answer costs the client nothing
     → stream: chunk by chunk as it comes; an engine that dies is told in the stream, which then breaks
     → stream of an engine that must be asked for one, while its client wants JSON: read whole, assembled
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from engine_adapter import (
    AnswerReader,
    EngineAdapter,
    EngineRejected,
    EngineUnavailable,
    Hold,
    IncomingResponse,
    Transport,
    read_answer_usage,
    read_error,
    read_streamed_usage,
)
from proxy.request.calls import Call, Reply
from proxy.request.error_table import error_body

# An engine that answers one of these has not served the request; another may.
REFUSALS = frozenset({429, 500, 502, 503, 504})
# Headers that end at a proxy, and those kvpin sets itself.
_NOT_PASSED_ON = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "server",
        "date",
        "x-kv-cached-tokens",
        "x-request-id",
    }
)
# What an engine's error tells its client about a retry, beside `x-ratelimit-*`.
RETRY_HEADERS = frozenset({"retry-after", "retry-after-ms", "x-should-retry"})
# What a stream says of itself, and an answer assembled from it does not.
_OF_A_STREAM = frozenset({"content-type", "content-length", "cache-control", "x-accel-buffering"})
# The usage and what follows it at the end of a stream fit well within this.
_TAIL_BYTES = 8192


# Called when an answer begins, with what breaks it off for a reason.
OnFirstByte = Callable[[Callable[[str], None]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a forwarded request: the status sent, and what the engine reported: cached tokens of the
    prompt, tokens of the answer, and of an answer that is no stream its own timing of the prefill."""

    status: int
    cached_tokens: int | None = None
    error: str | None = None
    output_tokens: int | None = None
    prefill: tuple[int, float] | None = None


class Forwarder:
    """Sends requests to engines through the one transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def forward(
        self,
        adapter: EngineAdapter,
        call: Call,
        hold: Hold,
        reply: Reply,
        headers: Mapping[str, str],
        on_first_byte: OnFirstByte,
    ) -> Outcome:
        """Forwards and answers.

        Args:
            adapter: the engine's.
            call: the request.
            hold: what of it goes to the engine, and who reads the answer on its way.
            reply: the client's side.
            headers: added to the answer.
            on_first_byte: called when the answer begins, with what breaks it off.

        Raises:
            EngineUnavailable, EngineRejected: before anything was sent to the client.
        """
        outgoing = adapter.prepare(call.method, call.path, call.headers, hold.body)
        async with await self._transport.send(outgoing) as response:
            if response.status >= 400:  # noqa: PLR2004 - HTTP
                return await _answer_error(response, reply, headers)
            kept = [(n.lower(), v) for n, v in response.headers.items() if n.lower() not in _NOT_PASSED_ON]
            if hold.answer is not None:  # what it leaves of the answer has another length
                kept = [(name, value) for name, value in kept if name != "content-length"]
            kept += headers.items()
            cached = adapter.cached_tokens(response.headers)
            if _is_json(response.headers):
                return await _answer_json(response, reply, kept, cached, hold.answer, on_first_byte)
            if hold.answer is not None and hold.answer.assembles:
                return await _answer_assembled(response, reply, kept, hold.answer, on_first_byte)
            return await _answer_stream(response, reply, kept, cached, hold.answer, on_first_byte)


async def _answer_json(
    response: IncomingResponse,
    reply: Reply,
    headers: list[tuple[str, str]],
    cached: int | None,
    reader: AnswerReader | None,
    on_first_byte: OnFirstByte,
) -> Outcome:
    content = await response.read()
    on_first_byte(response.hang_up)
    usage = read_answer_usage(content)
    reported = cached if cached is not None else usage.cached_tokens
    if reader is not None:
        kept = reader.feed(content)
        if not reader.assembles:
            content = kept + reader.finish()
            reported = reader.cached_tokens() if reported is None else reported
    await reply.start(response.status, [*headers, *_cached_header(reported)])
    await reply.finish(content)
    return Outcome(response.status, reported, output_tokens=usage.output_tokens, prefill=usage.prefill)


async def _answer_assembled(
    response: IncomingResponse,
    reply: Reply,
    headers: list[tuple[str, str]],
    reader: AnswerReader,
    on_first_byte: OnFirstByte,
) -> Outcome:
    """Nothing is sent before the engine's stream is whole: until then the request can go elsewhere."""
    async with aclosing(response.chunks()) as chunks:
        async for chunk in chunks:
            reader.feed(chunk)
    content = reader.finish()
    on_first_byte(response.hang_up)
    reported = reader.cached_tokens()
    kept = [(name, value) for name, value in headers if name not in _OF_A_STREAM]
    kept.append(("content-type", "application/json"))
    await reply.start(response.status, [*kept, *_cached_header(reported)])
    await reply.finish(content)
    usage = read_answer_usage(content)
    return Outcome(response.status, reported, output_tokens=usage.output_tokens, prefill=usage.prefill)


async def _answer_stream(
    response: IncomingResponse,
    reply: Reply,
    headers: list[tuple[str, str]],
    cached: int | None,
    reader: AnswerReader | None,
    on_first_byte: OnFirstByte,
) -> Outcome:
    tail = bytearray()
    async with aclosing(_watched(response, reader, tail)) as chunks:
        # Nothing is sent before the engine's first byte: until then the request can go elsewhere.
        first = await anext(chunks, b"")
        on_first_byte(response.hang_up)
        await reply.start(response.status, [*headers, *_cached_header(cached)])
        await reply.write(first)
        try:
            async for chunk in chunks:
                await reply.write(chunk)
        except EngineUnavailable as error:
            if not reply.complete:
                if _is_event_stream(response.headers):
                    await reply.write(b"\n\ndata: " + error_body(str(error), kind="server_error") + b"\n\n")
                # Not finished on purpose: a clean end would pass for a complete answer.
                return Outcome(response.status, cached, error=str(error))
    if reader is not None:
        rest = reader.finish()
        if rest:
            await reply.write(rest)
        cached = reader.cached_tokens()
    await reply.finish()
    usage = read_streamed_usage(bytes(tail))
    if cached is None:
        # A message tells it at its start, anything else at its end.
        cached = usage.cached_tokens
        cached = cached if cached is not None else read_streamed_usage(first).cached_tokens
    return Outcome(response.status, cached, output_tokens=usage.output_tokens)


async def _watched(
    response: IncomingResponse, reader: AnswerReader | None, tail: bytearray
) -> AsyncGenerator[bytes, None]:
    """What the client gets of a stream. `tail` keeps what the engine sent last."""
    async with aclosing(response.chunks()) as chunks:
        async for chunk in chunks:
            tail += chunk
            if len(tail) > 2 * _TAIL_BYTES:
                del tail[:-_TAIL_BYTES]
            kept = chunk if reader is None else reader.feed(chunk)
            if kept:
                yield kept


async def _answer_error(response: IncomingResponse, reply: Reply, headers: Mapping[str, str]) -> Outcome:
    """The engine's own error, in OpenAI's shape; raises when another engine may do better."""
    content = await response.read()
    error, advice = read_error(content), _retry_advice(response.headers)
    # An engine that says "do not retry" failed because of the request itself.
    if response.status in REFUSALS and advice.get("x-should-retry") != "false":
        raise EngineRejected(
            error.message,
            status=response.status,
            param=error.param,
            type=error.type,
            code=error.code,
            headers=advice,
        )
    kind = error.type or ("server_error" if response.status in REFUSALS else "invalid_request_error")
    body = error_body(error.message, kind=kind, param=error.param, code=error.code)
    every = {"content-type": "application/json", **advice, **headers}
    await reply.start(response.status, every.items())
    await reply.finish(body)
    return Outcome(response.status, error=error.message)


def _retry_advice(headers: Mapping[str, str]) -> dict[str, str]:
    """What an engine's error tells its client about a retry."""
    lower = {name.lower(): value for name, value in headers.items() if value.isascii()}
    return {
        name: value
        for name, value in lower.items()
        if name in RETRY_HEADERS or name.startswith("x-ratelimit-")
    }


def _cached_header(cached: int | None) -> list[tuple[str, str]]:
    return [] if cached is None else [("x-kvpin-cached-tokens", str(cached))]


def _is_json(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").startswith("application/json")


def _is_event_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/event-stream")
