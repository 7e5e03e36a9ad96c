"""Operations on KV, flush, offload, restore, warm, pin and unpin, and their progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import KvVerb
from proxy.api.admin.bodies import Flush, Offload, OnTarget, Pin, Restore, Unpin, Warm
from proxy.api.admin.endpoint import Endpoint, answer, read_body
from proxy.control.kv import KvVerbs
from proxy.control.operations import Operation, OperationAnswer, Operations, OperationState
from proxy.control.pinning import Pinning
from proxy.control.warm import Warming

_Body = TypeVar("_Body", bound=OnTarget | Unpin)
_STATES = ", ".join(state.value for state in OperationState)


class OperationList(msgspec.Struct):
    """Operations, newest first."""

    operations: list[OperationAnswer]


class KvRoutes:
    """Starts operations, lists them, and cancels them."""

    def __init__(self, kv: KvVerbs, warming: Warming, pinning: Pinning, operations: Operations) -> None:
        self._kv = kv
        self._warming = warming
        self._pinning = pinning
        self._operations = operations

    async def flush(self, body: Flush) -> Operation:
        """Drops KV."""
        return await self._kv.operate(KvVerb.FLUSH, body)

    async def offload(self, body: Offload) -> Operation:
        """GPU → host."""
        return await self._kv.operate(KvVerb.OFFLOAD, body)

    async def restore(self, body: Restore) -> Operation:
        """Host → GPU."""
        return await self._kv.operate(KvVerb.RESTORE, body, warm_instead=body.fallback == "warm")

    async def warm(self, body: Warm) -> Operation:
        """Computes a prefix."""
        return await self._warming.warm(body, everywhere=body.engines == "all")

    async def pin(self, body: Pin) -> Operation:
        """Keeps a prefix."""
        return await self._pinning.pin(body, body.ttl_s)

    async def unpin(self, body: Unpin) -> Operation:
        """Ends a pin."""
        return self._pinning.unpin(body.pin_id)

    async def list_operations(self, _request: Request) -> Response:
        """All operations, newest first."""
        return answer(OperationList([_described(operation) for operation in self._operations.newest()]))

    async def get_operation(self, request: Request) -> Response:
        """One operation."""
        return answer(_described(self._operations.get(request.path_params["operation_id"])))

    async def delete_operation(self, request: Request) -> Response:
        """Cancels an operation."""
        return answer(_described(self._operations.cancel(request.path_params["operation_id"])))

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The routes as data."""
        return (
            _start("/flush", Flush, self.flush, "Drops KV, and the KV that follows it."),
            _start("/offload", Offload, self.offload, "Moves KV from the GPU tier to host memory."),
            _start("/restore", Restore, self.restore, "Moves KV from host memory to the GPU tier."),
            _start("/warm", Warm, self.warm, "Computes a prefix before it is needed."),
            _start("/pin", Pin, self.pin, "Protects a prefix from eviction for a time."),
            _start("/unpin", Unpin, self.unpin, "Ends a pin."),
            Endpoint(
                "GET", "/operations", self.list_operations, "Running and recent operations.", OperationList
            ),
            Endpoint(
                "GET",
                "/operations/{operation_id}",
                self.get_operation,
                f"An operation's progress and state: {_STATES}.",
                OperationAnswer,
            ),
            Endpoint(
                "DELETE",
                "/operations/{operation_id}",
                self.delete_operation,
                "Cancels an operation; what is done stays done.",
                OperationAnswer,
            ),
        )


def _start(
    path: str, kind: type[_Body], begin: Callable[[_Body], Awaitable[Operation]], summary: str
) -> Endpoint:
    """An endpoint that starts an operation and waits for it as long as the body says.

    It answers with the operation: 200 when it has ended, 202 while it runs, 502 if it failed on an engine. An
    operation that failed for another reason has the status of that error.
    """

    async def handler(request: Request) -> Response:
        body = await read_body(request, kind)
        operation = await begin(body)
        await operation.wait(body.wait_s)
        return answer(_described(operation), operation.status)

    return Endpoint("POST", path, handler, summary, OperationAnswer, body=kind, statuses=(200, 202, 502))


def _described(operation: Operation) -> OperationAnswer:
    return msgspec.convert(operation, OperationAnswer, from_attributes=True)
