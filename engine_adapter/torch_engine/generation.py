"""The bridge between the event loop and the engine thread, for the choices of one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from engine_adapter.errors import EngineUnavailable
from engine_adapter.torch_engine.engine import Engine
from engine_adapter.torch_engine.requests import (
    Finished,
    GenerationRequest,
    Output,
    PromptScores,
    RequestFailed,
    RequestRefused,
    Scheduled,
    Token,
)
from engine_adapter.types import KvTarget, Retention

Outputs = list[Token | PromptScores | Finished]


class Generation:
    """Submits one request per choice on entry; cancels those that are not done on exit.

    Choices of one prompt share its KV: the engine computes a block for the first of them, and the others
    wait for it. Outputs wait here until they are read. `max_tokens` bounds their number, and a client that
    reads slowly delays nobody else.

    Attributes:
        cached_tokens: prompt tokens that came from cache, for the first choice.
    """

    def __init__(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, list[Output]] = {}
        self._wake = asyncio.Event()
        self._open: set[int] = set()
        self.cached_tokens = 0

    async def __aenter__(self) -> Self:
        """Raises RequestRefused or EngineUnavailable."""
        try:
            for index, request in enumerate(self._requests):
                self._engine.submit(request, partial(self._from_engine, index))
                self._open.add(index)
        except Exception:
            self._cancel_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_all()

    def cancel(self, index: int) -> None:
        """Ends one choice: nothing more of it is read."""
        if index in self._open:
            self._open.remove(index)
            self._engine.cancel(self._requests[index].request_id)
        self._pending.pop(index, None)

    def await_turn(self, index: int, seconds: float) -> None:
        """Retains the KV of the prompt of a choice that has ended: its next turn is expected that soon."""
        request = self._requests[index]
        target = KvTarget(request.token_ids, request.extra_ids, request.cache_salt)
        retention = Retention(1, seconds, request.retention.owner)
        with suppress(EngineUnavailable):  # it stops, and the answer is whole
            self._engine.call(lambda cache: cache.await_turn(target, retention, time.monotonic()))

    async def outputs(self) -> dict[int, Outputs]:
        """The outputs of each choice since the last call, of at least one. Finished is the last of a choice.

        Raises:
            RequestFailed, RequestRefused: the engine failed on a request, or gave it up.
            EngineUnavailable: the engine stopped.
        """
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, {}
        found: dict[int, Outputs] = {}
        for index, outputs in pending.items():
            found[index] = []
            for output in outputs:
                if isinstance(output, Scheduled):
                    if not index:
                        self.cached_tokens = output.cached_tokens
                    continue
                found[index].append(output)
                if isinstance(output, Finished):
                    self._open.discard(index)
                    _check(output)
        return found

    def _cancel_all(self) -> None:
        for index in list(self._open):
            self.cancel(index)

    def _from_engine(self, index: int, outputs: list[Output]) -> None:
        """Hands the outputs over; runs in the engine thread."""
        self._loop.call_soon_threadsafe(self._arrive, index, outputs)

    def _arrive(self, index: int, outputs: list[Output]) -> None:
        if index not in self._open:
            return
        self._pending.setdefault(index, []).extend(outputs)
        self._wake.set()


def _check(last: Finished) -> None:
    if last.reason == "error":
        raise RequestFailed(f"the engine failed on this request: {last.message}")
    if last.reason == "refused":
        raise RequestRefused(last.message or "it cannot be served", param=last.param or "prompt")
    if last.reason == "cancelled":
        raise EngineUnavailable(last.message or "the engine is shutting down")
