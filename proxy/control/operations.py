"""Operations: work on one or more engines that may take long, its progress, and a bounded history of it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import anyio
import msgspec

from engine_adapter import EngineError, KvProgress
from proxy.errors import NotFound, ProxyError, status_of
from proxy.runtime.tasks import Supervisor

HISTORY = 256


class OperationState(StrEnum):
    """The state of an operation, and of one engine's part of it."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PartAnswer(msgspec.Struct):
    """One engine's part of an operation.

    Attributes:
        engine: the engine's id.
        verb: what is done on this engine; differs from the operation's verb where a fallback was asked for.
        done: blocks moved or dropped so far.
        total: blocks found to move or drop.
        bytes: bytes moved or dropped so far.
        left: blocks that stay, by reason.
        error: why the part failed.
    """

    engine: str
    verb: str
    state: OperationState = OperationState.RUNNING
    done: int = 0
    total: int = 0
    bytes: int = 0
    left: dict[str, int] = {}
    error: str | None = None


class Part(PartAnswer, kw_only=True):
    """One engine's part of a running operation."""

    _scope: anyio.CancelScope | None = None

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does the engine's work and keeps its outcome. A failure here does not stop the other engines."""
        with anyio.CancelScope() as self._scope:
            try:
                await work()
            except (EngineError, ProxyError, TimeoutError) as error:
                self.fail(str(error) or "the engine did not answer in time")
            else:
                self.state = OperationState.DONE
        if self._scope.cancelled_caught:
            self.fail("the engine was removed")

    def fail(self, why: str) -> None:
        """The part has failed."""
        self.state, self.error = OperationState.FAILED, why

    def stop(self) -> None:
        """Ends this part, because its engine is removed. The other parts go on."""
        if self._scope is not None:
            self._scope.cancel()

    def advance(self, before: KvProgress, now: KvProgress) -> None:
        """Adds the progress on one target to that on the targets before it."""
        both = before.plus(now)
        self.done, self.total, self.bytes, self.left = both.done, both.total, both.bytes, dict(both.left)

    @property
    def progress(self) -> KvProgress:
        """The progress so far."""
        return KvProgress(self.done, self.total, self.bytes, dict(self.left))


class OperationAnswer(msgspec.Struct, kw_only=True):
    """An operation. Times are Unix seconds.

    Attributes:
        operation_id: its id.
        verb: what is done, e.g. `flush`.
        target: what it is done to, in a word or two; never prompt text.
        parts: one for each engine.
        note: why there is nothing to do, or what the operation may have missed.
        result: what the verb returns, e.g. a pin's id.
        error: what failed, in one sentence.
    """

    operation_id: str = msgspec.field(name="id")
    verb: str
    target: str
    parts: tuple[PartAnswer, ...] = msgspec.field(name="engines", default=())
    state: OperationState = OperationState.RUNNING
    note: str | None = None
    result: dict[str, Any] = {}
    error: str | None = None
    started: float = msgspec.field(default_factory=time.time)
    finished: float | None = None


class Operation(OperationAnswer, kw_only=True):
    """An operation that runs, or has run.

    Attributes:
        status: the HTTP status of the answer to whoever started it.
    """

    parts: tuple[Part, ...] = msgspec.field(name="engines", default=())
    status: int = HTTPStatus.ACCEPTED
    _over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    async def wait(self, seconds: float) -> bool:
        """Waits for the end; False when the operation still runs after `seconds`."""
        with anyio.move_on_after(seconds):
            await self._over.wait()
        return self._over.is_set()

    def end(
        self, state: OperationState, error: str | None = None, status: int = HTTPStatus.BAD_GATEWAY
    ) -> None:
        """Ends the operation. Only the first call counts. `status`: its HTTP status if it failed."""
        if self._over.is_set():
            return
        self.state, self.error, self.finished = state, error, time.time()
        self.status = status if state is OperationState.FAILED else HTTPStatus.OK
        for part in self.parts:
            if part.state is OperationState.RUNNING:
                part.state = state
        self._over.set()

    def settle(self) -> None:
        """The work has returned: the operation is done, unless an engine failed."""
        failed = [part for part in self.parts if part.state is OperationState.FAILED]
        if not failed:
            return self.end(OperationState.DONE)
        first = f"{failed[0].engine}: {failed[0].error}"
        return self.end(OperationState.FAILED, f"{len(failed)} of {len(self.parts)} engines failed: {first}")


class Operations:
    """Running and recent operations, oldest first. Only finished ones leave the history."""

    def __init__(self, tasks: Supervisor) -> None:
        self._tasks = tasks
        self._operations: OrderedDict[str, Operation] = OrderedDict()

    def start(
        self, operation: Operation, work: Callable[[Operation], Coroutine[Any, Any, None]]
    ) -> Operation:
        """Runs `work` on the operation in the background."""
        self._operations[operation.operation_id] = operation
        self._trim()
        self._tasks.start(_task(operation.operation_id), _run(operation, work))
        return operation

    def get(self, operation_id: str) -> Operation:
        """The operation of that id; raises NotFound."""
        operation = self._operations.get(operation_id)
        if operation is None:
            raise NotFound(f"there is no operation {operation_id!r}", param="operation_id")
        return operation

    def newest(self) -> list[Operation]:
        """All operations, newest first."""
        return list(reversed(self._operations.values()))

    def cancel(self, operation_id: str) -> Operation:
        """Ends a running operation; what is done stays done. Raises NotFound."""
        operation = self.get(operation_id)
        operation.end(OperationState.CANCELLED, "cancelled")
        self._tasks.cancel(_task(operation_id))
        return operation

    def stop_on(self, engine_id: str) -> None:
        """The engine is removed: ends its part of every running operation."""
        for operation in self._operations.values():
            for part in operation.parts:
                if part.engine == engine_id and part.state is OperationState.RUNNING:
                    part.stop()

    def _trim(self) -> None:
        over = (o for o in list(self._operations.values()) if o.state is not OperationState.RUNNING)
        while len(self._operations) > HISTORY and (oldest := next(over, None)) is not None:
            del self._operations[oldest.operation_id]


def new_operation(verb: str, target: str, parts: Iterable[Part] = (), note: str | None = None) -> Operation:
    """An operation that is not started yet."""
    name = f"op-{uuid.uuid4().hex[:16]}"
    return Operation(operation_id=name, verb=verb, target=target, parts=tuple(parts), note=note)


async def run_parts(parts: Iterable[tuple[Part, Callable[[], Awaitable[None]]]]) -> None:
    """Runs the work of all engines at once."""
    async with anyio.create_task_group() as group:
        for part, work in parts:
            group.start_soon(part.run, work)


async def _run(operation: Operation, work: Callable[[Operation], Coroutine[Any, Any, None]]) -> None:
    try:
        await work(operation)
        operation.settle()
    except (ProxyError, EngineError) as error:
        operation.end(OperationState.FAILED, str(error), status_of(error))
    except asyncio.CancelledError:
        operation.end(OperationState.CANCELLED, "cancelled")
        raise
    finally:
        # Still open here only after a bug, which the supervisor logs.
        why = "kvpin failed on this operation; the log has the details"
        operation.end(OperationState.FAILED, why, HTTPStatus.INTERNAL_SERVER_ERROR)


def _task(operation_id: str) -> str:
    return f"operation {operation_id}"
