"""The bridge between the event loop and the engine thread, for one request."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from engine_adapter.errors import EngineUnavailable
from engine_adapter.torch_engine.engine import Engine
from engine_adapter.torch_engine.requests import (
    Finished,
    GenerationRequest,
    Output,
    RequestFailed,
    Scheduled,
    Token,
)


class Generation:
    """Submits a request on entry; cancels it on exit unless it is done.

    Outputs wait here until they are read. The request's `max_tokens` bounds their number, and a client that
    reads slowly delays nobody else.

    Attributes:
        cached_tokens: prompt tokens that came from cache.
    """

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._pending: list[Output] = []
        self._wake = asyncio.Event()
        self._done = False
        self.cached_tokens = 0

    async def __aenter__(self) -> Self:
        """Raises RequestRefused or EngineUnavailable."""
        self._engine.submit(self._request, self._from_engine)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self._engine.cancel(self._request.request_id)

    async def scheduled(self) -> None:
        """Returns when the prompt is about to run; `cached_tokens` is then known.

        Raises:
            RequestFailed: the engine failed on this request.
            EngineUnavailable: the engine stopped.
        """
        await self._wait()
        first = self._pending[0]
        if isinstance(first, Scheduled):
            self.cached_tokens = first.cached_tokens
            del self._pending[0]
        else:
            self._check(self._pending)

    async def outputs(self) -> list[Token | Finished]:
        """The outputs since the last call, at least one. Finished is the last of all.

        Raises:
            RequestFailed: the engine failed on this request.
            EngineUnavailable: the engine stopped.
        """
        await self._wait()
        outputs, self._pending = self._pending, []
        self._wake.clear()
        self._check(outputs)
        return [output for output in outputs if not isinstance(output, Scheduled)]

    async def _wait(self) -> None:
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()

    def _check(self, outputs: list[Output]) -> None:
        last = outputs[-1]
        if not isinstance(last, Finished):
            return
        self._done = True
        if last.reason == "error":
            raise RequestFailed(f"the engine failed on this request: {last.message}")
        if last.reason == "cancelled":
            raise EngineUnavailable(last.message or "the engine is shutting down")

    def _from_engine(self, outputs: list[Output]) -> None:
        """Hands the outputs over; runs in the engine thread."""
        self._loop.call_soon_threadsafe(self._arrive, outputs)

    def _arrive(self, outputs: list[Output]) -> None:
        self._pending.extend(outputs)
        self._wake.set()
