"""Features that need no more than a question and its answer, for clients that hide the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from features import TOO_LONG, World, status_of


class Ask(Protocol):
    """Asks one question; `api_key`, `model`, `max_retries` and `timeout` are the client's."""

    async def __call__(self, world: World, prompt: str, **changes: Any) -> str: ...


def plain(
    ask: Ask,
    pieces: Callable[[World, str], AsyncIterator[str]],
    check: Callable[[Any], None] = lambda _: None,
    before_death: tuple[str, ...] = ("The tide ", "The ", ""),
) -> dict[str, Callable[..., Any]]:
    """Feature → its function, for a client that is used through `ask` and, for streams, `pieces`.

    `check` gets errors with a status; `before_death` is what the client may have of a stream that breaks off.
    """
    client = _Plain(ask, pieces, check, before_death)
    return {name: getattr(client, name) for name in vars(_Plain) if not name.startswith("_")}


@dataclass(frozen=True)
class _Plain:
    _ask: Ask
    _pieces: Callable[[World, str], AsyncIterator[str]]
    _check: Callable[[Any], None]
    _before_death: tuple[str, ...]

    async def chat(self, world: World) -> None:
        assert await self._ask(world, world.fresh())

    async def stream(self, world: World) -> None:
        prompt = world.fresh()
        whole = await self._ask(world, prompt)
        pieces = [piece async for piece in self._pieces(world, prompt)]
        assert "".join(pieces) == whole
        assert len(pieces) > 2

    async def parallel(self, world: World) -> None:
        assert all(await asyncio.gather(*(self._ask(world, world.fresh()) for _ in range(8))))

    async def wrong_key(self, world: World) -> None:
        assert await self._status(world, "Hi", api_key="wrong") == 401

    async def no_model(self, world: World) -> None:
        assert await self._status(world, "Hi", model="no-such-model") == 404

    async def bad_request(self, world: World) -> None:
        prompt = world.wish("refuse-400")[0] if world.is_fake else TOO_LONG
        assert await self._status(world, prompt) == 400

    async def rate_limit(self, world: World) -> None:
        prompt, key = world.wish("fail-429")
        started = time.monotonic()
        assert await self._ask(world, prompt, max_retries=1)
        assert time.monotonic() - started >= 1  # retry-after
        assert await self._count(world, key) == 2
        assert await self._status(world, world.wish("refuse-429")[0]) == 429

    async def server_error(self, world: World) -> None:
        prompt, key = world.wish("fail-503")
        assert await self._ask(world, prompt, max_retries=1)
        assert await self._count(world, key) == 2
        assert await self._status(world, world.wish("refuse-500")[0]) == 500

    async def no_retry(self, world: World) -> None:
        prompt, key = world.wish("refuse-500-final")
        assert await self._status(world, prompt, max_retries=2) == 500
        assert await self._count(world, key) == 1

    async def cancel(self, world: World) -> None:
        prompt, key = world.wish("endless")
        async with aclosing(self._pieces(world, prompt)) as pieces:
            async for _ in pieces:
                break
        assert await self._ask(world, f"do: left {key}") == "left"

    async def death(self, world: World) -> None:
        got: list[str] = []
        try:
            async for piece in self._pieces(world, world.wish("die")[0]):
                got.append(piece)
        except Exception:  # each client has its own
            assert "".join(got) in self._before_death
        else:
            raise AssertionError(f"a clean end after {got}")
        assert status_of(await self._error(world, world.wish("die")[0])) != 200

    async def timeout(self, world: World) -> None:
        error = await self._error(world, world.wish("hang")[0], timeout=0.5)
        chain = []
        while error is not None:
            chain.append(f"{type(error).__name__}: {error}".lower())
            error = error.__cause__ or error.__context__
        assert any("timeout" in each or "timed out" in each for each in chain), chain

    async def _count(self, world: World, key: str) -> int:
        return int(await self._ask(world, f"do: count {key}"))

    async def _error(self, world: World, prompt: str, **changes: Any) -> BaseException | None:
        try:
            got = await self._ask(world, prompt, **changes)
        except Exception as error:
            return error
        raise AssertionError(f"no error, but {got!r}")

    async def _status(self, world: World, prompt: str, **changes: Any) -> int | None:
        error = await self._error(world, prompt, **changes)
        self._check(error)
        return status_of(error)
