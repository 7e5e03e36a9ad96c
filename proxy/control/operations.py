"""Long work with progress: one operation over any number of engines, and a bounded history of them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import anyio

from engine_adapter import EngineError, KvProgress
from proxy.errors import NotFound, ProxyError
from proxy.tasks import Supervisor

HISTORY = 256


class OperationState(StrEnum):
    """Of an operation, and of one engine's part in it."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Part:
    """One engine's part of an operation.

    Attributes:
        engine: its id.
        verb: what is done on it; differs from the operation's where a fallback was asked for.
        done, total: blocks acted on, blocks found to act on.
        bytes: moved or dropped.
        left: blocks that had to stay, by reason.
        error: why it failed.
    """

    engine: str
    verb: str
    state: OperationState = OperationState.RUNNING
    done: int = 0
    total: int = 0
    bytes: int = 0
    left: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    _scope: anyio.CancelScope | None = field(default=None, repr=False)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does the engine's work and keeps how it ended; an engine's failure does not stop the others'."""
        with anyio.CancelScope() as self._scope:
            try:
                await work()
            except (EngineError, ProxyError, TimeoutError) as error:
                self.fail(str(error) or "no answer in time")
            else:
                self.state = OperationState.DONE
        if self._scope.cancelled_caught:
            self.fail("the engine was removed")

    def fail(self, why: str) -> None:
        """The part has failed."""
        self.state, self.error = OperationState.FAILED, why

    def stop(self) -> None:
        """The engine goes away: its part ends, the others go on."""
        if self._scope is not None:
            self._scope.cancel()

    def advance(self, before: KvProgress, now: KvProgress) -> None:
        """Notes progress on top of what earlier targets of the same part did."""
        self.done = before.done + now.done
        self.total = before.total + now.total
        self.bytes = before.bytes + now.bytes
        names = [*before.left, *now.left]
        self.left = {name: before.left.get(name, 0) + now.left.get(name, 0) for name in names}

    @property
    def progress(self) -> KvProgress:
        """What was done so far."""
        return KvProgress(self.done, self.total, self.bytes, dict(self.left))


@dataclass(slots=True)
class Operation:
    """One piece of work an operator asked for. Times in Unix seconds.

    Attributes:
        operation_id: its name.
        verb: e.g. `flush`.
        target: what it acts on, in a word or two; never prompt text.
        parts: one for each engine.
        note: why there was nothing to do, where there was nothing.
        result: what the verb yields beyond progress.
        error: what failed, in one sentence.
    """

    operation_id: str
    verb: str
    target: str
    parts: tuple[Part, ...] = ()
    state: OperationState = OperationState.RUNNING
    note: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    started: float = field(default_factory=time.time)
    finished: float | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def wait(self, seconds: float) -> bool:
        """Waits for its end; False when it still runs after `seconds`."""
        with anyio.move_on_after(seconds):
            await self._over.wait()
        return self._over.is_set()

    def end(self, state: OperationState, error: str | None = None) -> None:
        """It is over, once and for all."""
        if self._over.is_set():
            return
        self.state, self.error, self.finished = state, error, time.time()
        for part in self.parts:
            if part.state is OperationState.RUNNING:
                part.state = state
        self._over.set()

    def settle(self) -> None:
        """Its work has returned: done, unless an engine failed."""
        failed = [part for part in self.parts if part.state is OperationState.FAILED]
        if not failed:
            return self.end(OperationState.DONE)
        first = f"{failed[0].engine}: {failed[0].error}"
        return self.end(
            OperationState.FAILED, f"{len(failed)} of {len(self.parts)} engine(s) failed: {first}"
        )


class Operations:
    """Running and recent operations, oldest first; running ones are never dropped."""

    def __init__(self) -> None:
        self._operations: OrderedDict[str, Operation] = OrderedDict()

    def start(
        self,
        tasks: Supervisor,
        operation: Operation,
        work: Callable[[Operation], Coroutine[Any, Any, None]],
    ) -> Operation:
        """Runs `work` on the operation in the background."""
        self._operations[operation.operation_id] = operation
        self._trim()
        tasks.start(_task(operation.operation_id), _run(operation, work))
        return operation

    def get(self, operation_id: str) -> Operation:
        """The operation of that id; raises NotFound."""
        operation = self._operations.get(operation_id)
        if operation is None:
            raise NotFound(f"there is no operation {operation_id!r}", param="operation_id")
        return operation

    def newest(self) -> list[Operation]:
        """All of them, newest first."""
        return list(reversed(self._operations.values()))

    def cancel(self, tasks: Supervisor, operation_id: str) -> Operation:
        """Ends a running operation; what it has done stays done. Raises NotFound."""
        operation = self.get(operation_id)
        operation.end(OperationState.CANCELLED, "cancelled")
        tasks.cancel(_task(operation_id))
        return operation

    def stop_on(self, engine_id: str) -> None:
        """The engine goes away: ends its part of every running operation."""
        for operation in self._operations.values():
            for part in operation.parts:
                if part.engine == engine_id and part.state is OperationState.RUNNING:
                    part.stop()

    def _trim(self) -> None:
        over = (o for o in list(self._operations.values()) if o.state is not OperationState.RUNNING)
        while len(self._operations) > HISTORY and (oldest := next(over, None)) is not None:
            del self._operations[oldest.operation_id]


def new_operation(verb: str, target: str, parts: Iterable[Part] = (), note: str | None = None) -> Operation:
    """An operation that has yet to be started."""
    return Operation(f"op-{uuid.uuid4().hex[:16]}", verb, target, tuple(parts), note=note)


async def run_parts(parts: Iterable[tuple[Part, Callable[[], Awaitable[None]]]]) -> None:
    """All engines at once."""
    async with anyio.create_task_group() as group:
        for part, work in parts:
            group.start_soon(part.run, work)


async def _run(operation: Operation, work: Callable[[Operation], Coroutine[Any, Any, None]]) -> None:
    try:
        await work(operation)
        operation.settle()
    except (ProxyError, EngineError) as error:
        operation.end(OperationState.FAILED, str(error))
    except asyncio.CancelledError:
        operation.end(OperationState.CANCELLED, "cancelled")
        raise
    finally:
        # Only a bug gets here with the operation still open; the supervisor logs it.
        operation.end(OperationState.FAILED, "kvpin failed on this operation; the log has the details")


def _task(operation_id: str) -> str:
    return f"operation {operation_id}"
