"""Two engines for hostile trials, each a process: one that is well, and one that does what a prompt tells it.

    python -m tests.hostile.engines well|broken

The last message of a prompt names what the broken engine does: `BREAKS` has all. Both answer any other route,
so that what kvpin lets through reaches somebody.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from tests.fakes import DONE, Exchange, FakeEngine, event
from tests.hostile.engine_texts import BROKEN_HEADS, SECRET, text_of

STREAM_EVENTS = 8
_MIB = 1 << 20
_MOST_READ = _MIB
_JSON = (("content-type", "application/json"),)
_PAGE_HEADERS = ("clear-site-data", "refresh", "strict-transport-security", "location")
"""Headers that act on the browser that gets them, or on its other pages."""
_OF_SOMEBODY = {"id": "of-somebody", "data": [{"id": "of-somebody"}], "object": "list", "output": []}
"""An object of any other route, also an answer of /v1/responses."""


def _delta(text: str) -> bytes:
    return event(
        {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    )


def _whole(text: str, **fields: object) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage, **fields}


async def _well(exchange: Exchange, prompt: str) -> None:
    text = text_of(prompt)
    if not _streams(exchange):
        await asyncio.sleep(0.02)
        await exchange.send(_whole(text))
        return
    await exchange.start()
    for _ in range(STREAM_EVENTS):
        await asyncio.sleep(0.003)
        await exchange.chunk(_delta("."))
    await exchange.chunk(_delta(text) + DONE)
    await exchange.end()


# --- what an engine may do wrong ---------------------------------------------------------------------------


async def _echoes_in_an_error(exchange: Exchange, mib: int) -> None:
    await exchange.send({"error": {"message": f"{SECRET} " + "x" * (mib * _MIB), "code": 500}}, status=500)


async def _event_without_end(exchange: Exchange, mib: int) -> None:
    await exchange.start()
    await exchange.chunk(_delta("a") + b'data: {"choices":[{"index":0,"delta":{"content":"')
    for _ in range(mib * 16):
        await exchange.chunk(bytes(b"x" * (_MIB // 16)))
    await exchange.chunk(b'"}}]}\n\n' + DONE)
    await exchange.end()


async def _says_done_and_stops(exchange: Exchange, _: int) -> None:
    await exchange.start()
    await exchange.chunk(_delta("a") + b"data: the end is [DONE]\n\n")
    await asyncio.sleep(0.05)  # so that it is read before the connection breaks
    exchange.die()


async def _headers_for_browsers(exchange: Exchange, _: int) -> None:
    await exchange.send(_whole("x"), headers=[(name, '"*"') for name in _PAGE_HEADERS])


async def _whole_without_end(exchange: Exchange, mib: int) -> None:
    await exchange.start(headers=_JSON)
    for _ in range(mib * 16):
        await exchange.chunk(b"x" * (_MIB // 16))
    await exchange.end()


async def _raw(exchange: Exchange, raw: str) -> None:
    await exchange._connection.write(raw.encode())
    exchange.die()


async def _bomb(exchange: Exchange, mib: int) -> None:
    packed = b"\x1f\x8b" + bytes(mib * _MIB)
    await exchange.send(packed, headers=[*_JSON, ("content-encoding", "gzip")])


async def _odd_usage(exchange: Exchange, _: int) -> None:
    odd = {
        "prompt_tokens": -(2**63),
        "completion_tokens": 2**70,
        "prompt_tokens_details": {"cached_tokens": 1e300},
    }
    await exchange.send(_whole("x", usage=odd))


async def _deep(exchange: Exchange, mib: int) -> None:
    await exchange.send(b'{"choices":' + b"[" * (mib * _MIB), headers=_JSON)


async def _many_events(exchange: Exchange, mib: int) -> None:
    await exchange.start()
    for _ in range(mib * 16):
        await exchange.chunk(b"data: {}\n\n:\n\n" * (_MIB // 16 // 13))
    await exchange.chunk(DONE)
    await exchange.end()


async def _forged_headers(exchange: Exchange, _: int) -> None:
    await exchange.send(_whole("x"), headers=[("x-kvpin-engine", "forged"), ("x-kvpin-cached-tokens", "9")])


async def _silent(exchange: Exchange, _: int) -> None:
    await exchange.left.wait()


BREAKS: dict[str, Callable[[Exchange, int], Awaitable[None]]] = {
    "echo in an error": _echoes_in_an_error,
    "an event without end": _event_without_end,
    "[DONE] in the text": _says_done_and_stops,
    "headers for browsers": _headers_for_browsers,
    "an answer without end": _whole_without_end,
    "a bomb": _bomb,
    "odd usage": _odd_usage,
    "deep JSON": _deep,
    "many events": _many_events,
    "forged headers": _forged_headers,
    "silence": _silent,
    **{name: lambda exchange, _, raw=raw: _raw(exchange, raw) for name, raw in BROKEN_HEADS.items()},
}


async def _broken(exchange: Exchange, prompt: str) -> None:
    name, _, mib = prompt.partition(":")
    if name in BREAKS:
        await BREAKS[name](exchange, int(mib or 1))
    else:
        await _well(exchange, prompt)


async def _serve(name: str) -> None:
    chats = {"well": _well, "broken": _broken}[name]

    async def script(exchange: Exchange) -> None:
        engine.seen.clear()
        engine.connections = [each for each in engine.connections if not each.lost]
        if exchange.target == "/health":
            await exchange.send({"status": "ok"})
        elif exchange.target == "/v1/models":
            await exchange.send({"data": [{"id": name, "max_model_len": 32_768}]})
        elif exchange.target == "/v1/chat/completions":
            await chats(exchange, _prompt(exchange) or "")
        else:
            await exchange.send(_OF_SOMEBODY)

    async with FakeEngine(name, script) as engine:
        print(f"listening on {engine.url},", flush=True)
        await asyncio.Event().wait()


def _streams(exchange: Exchange) -> bool:
    try:
        return bool(exchange.json.get("stream"))
    except (ValueError, RecursionError):
        return False


def _prompt(exchange: Exchange) -> str | None:
    """The last message of a chat; None where there is none, or reading would take long."""
    if len(exchange.body) > _MOST_READ:
        return None
    try:
        return exchange.json["messages"][-1]["content"][:200]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
