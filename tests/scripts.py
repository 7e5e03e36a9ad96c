"""Scripts of `FakeEngine`: the answers that tests ask of it most."""

import asyncio
from collections.abc import Sequence

from tests.fakes import Exchange, Script

HeaderList = Sequence[tuple[str, str]]
EVENTS = (("content-type", "text/event-stream"),)


def sends(content, status=200, headers=()) -> Script:
    """A whole answer."""

    async def script(exchange):
        await exchange.send(content, status, headers)

    return script


def streams(*chunks: bytes, headers=EVENTS, pause_s=0.0) -> Script:
    """A stream to its end. `pause_s`: after each chunk, so that it is read alone."""

    async def script(exchange):
        await _begin(exchange, chunks, headers, pause_s)
        await exchange.end()

    return script


def dies(*chunks: bytes, headers: HeaderList | None = EVENTS, pause_s=0.0, abort=False) -> Script:
    """A stream whose engine dies after these chunks. Without headers, it dies before it begins."""

    async def script(exchange):
        if headers is not None:
            await _begin(exchange, chunks, headers, pause_s)
        exchange.die(abort=abort)

    return script


def hangs(*chunks: bytes, headers: HeaderList | None = EVENTS) -> Script:
    """A stream that does not end: its client has to leave. Without headers, it does not begin."""

    async def script(exchange):
        if headers is not None:
            await _begin(exchange, chunks, headers, 0.0)
        await exchange.left.wait()

    return script


async def _begin(exchange: Exchange, chunks, headers, pause_s: float) -> None:
    await exchange.start(headers=headers)
    for chunk in chunks:
        await exchange.chunk(chunk)
        if pause_s:
            await asyncio.sleep(pause_s)
