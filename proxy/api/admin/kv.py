"""Operations on KV: flush, offload, restore, warm, pin, unpin, and how they come along."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import KvVerb
from proxy.api.admin.answers import OperationAnswer, OperationList
from proxy.api.admin.bodies import Flush, Offload, Pin, Restore, Unpin, Warm
from proxy.api.admin.endpoint import Endpoint, Handler, answer, read_body
from proxy.control import Control
from proxy.control.kv import operate
from proxy.control.operations import Operation, OperationState, Part
from proxy.control.pinning import pin, unpin
from proxy.control.warm import warm

_Body = TypeVar("_Body", bound=msgspec.Struct)


async def flush(control: Control, body: Flush) -> Operation:
    """Forgets KV."""
    return await operate(control, KvVerb.FLUSH, body)


async def offload(control: Control, body: Offload) -> Operation:
    """GPU → host."""
    return await operate(control, KvVerb.OFFLOAD, body)


async def restore(control: Control, body: Restore) -> Operation:
    """Host → GPU."""
    return await operate(control, KvVerb.RESTORE, body, warm_instead=body.fallback == "warm")


async def post_warm(control: Control, body: Warm) -> Operation:
    """Prefills ahead of need."""
    return await warm(control, body, everywhere=body.engines == "all")


async def post_pin(control: Control, body: Pin) -> Operation:
    """Keeps a prefix."""
    return await pin(control, body, body.ttl_s)


async def post_unpin(control: Control, body: Unpin) -> Operation:
    """Lets it go."""
    return unpin(control, body.pin_id)


async def list_operations(control: Control, _request: Request) -> Response:
    """Newest first."""
    operations = [_describe(operation) for operation in control.operations.newest()]
    return answer(OperationList, {"operations": operations})


async def get_operation(control: Control, request: Request) -> Response:
    """How it comes along."""
    operation = control.operations.get(request.path_params["operation_id"])
    return answer(OperationAnswer, _describe(operation))


async def delete_operation(control: Control, request: Request) -> Response:
    """Ends it where it is."""
    operation = control.operations.cancel(control.tasks, request.path_params["operation_id"])
    return answer(OperationAnswer, _describe(operation))


def _starts(kind: type[_Body], begin: Callable[[Control, _Body], Awaitable[Operation]]) -> Handler:
    """A handler that starts an operation and waits for it as long as the body says: 200 when it has
    ended, 202 while it runs."""

    async def handler(control: Control, request: Request) -> Response:
        body = await read_body(request, control.max_body_bytes, kind)
        operation = await begin(control, body)
        ended = await operation.wait(body.wait_s)  # type: ignore[attr-defined]  # every such body has it
        return answer(OperationAnswer, _describe(operation), 200 if ended else 202)

    return handler


def _describe(operation: Operation) -> dict[str, Any]:
    return {
        "id": operation.operation_id,
        "verb": operation.verb,
        "target": operation.target,
        "state": operation.state.value,
        "started": operation.started,
        "finished": operation.finished,
        "engines": [_describe_part(part) for part in operation.parts],
        "note": operation.note,
        "result": operation.result,
        "error": operation.error,
    }


def _describe_part(part: Part) -> dict[str, Any]:
    return {
        "engine": part.engine,
        "verb": part.verb,
        "state": part.state.value,
        "done": part.done,
        "total": part.total,
        "bytes": part.bytes,
        "left": part.left,
        "error": part.error,
    }


def _operation(path: str, handler: Handler, body: type[msgspec.Struct], summary: str) -> Endpoint:
    return Endpoint("POST", path, handler, summary, OperationAnswer, body=body, statuses=(200, 202))


_STATES = ", ".join(state.value for state in OperationState)

ENDPOINTS = (
    _operation("/flush", _starts(Flush, flush), Flush, "Forgets KV, and what follows it."),
    _operation("/offload", _starts(Offload, offload), Offload, "Moves KV from the GPU tier to host memory."),
    _operation("/restore", _starts(Restore, restore), Restore, "Moves KV from host memory to the GPU tier."),
    _operation("/warm", _starts(Warm, post_warm), Warm, "Computes a prefix before it is needed."),
    _operation("/pin", _starts(Pin, post_pin), Pin, "Protects a prefix from eviction for a time."),
    _operation("/unpin", _starts(Unpin, post_unpin), Unpin, "Ends a pin."),
    Endpoint("GET", "/operations", list_operations, "Running and recent operations.", OperationList),
    Endpoint(
        "GET",
        "/operations/{operation_id}",
        get_operation,
        f"How an operation comes along: {_STATES}.",
        OperationAnswer,
    ),
    Endpoint(
        "DELETE",
        "/operations/{operation_id}",
        delete_operation,
        "Cancels an operation; what it has done stays done.",
        OperationAnswer,
    ),
)
