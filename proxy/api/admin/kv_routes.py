"""Operations on KV, flush, offload, restore, warm, pin and unpin, and their progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import KvVerb
from proxy.api.admin.endpoint import Endpoint, Query, answer, int_query, read_body
from proxy.api.admin.request_bodies import Flush, Offload, OnTarget, Pin, Restore, Unpin, Warm
from proxy.control.kv import KvVerbs
from proxy.control.operations import Operation, OperationAnswer, Operations, OperationState
from proxy.control.pinning import Pinning
from proxy.control.prefixes import MAX_DEPTH, MAX_PREFIXES, Prefixes, PrefixesAnswer
from proxy.control.warm import Warming

_Body = TypeVar("_Body", bound=OnTarget | Unpin)
_STATES = ", ".join(state.value for state in OperationState)


class OperationList(msgspec.Struct):
    """Operations, newest first."""

    operations: list[OperationAnswer]


def kv_routes(
    kv: KvVerbs, warming: Warming, pinning: Pinning, operations: Operations
) -> tuple[Endpoint, ...]:
    """Starts operations, lists them, and cancels them."""
    flush, offload = partial(kv.operate, KvVerb.FLUSH), partial(kv.operate, KvVerb.OFFLOAD)

    async def restore(body: Restore) -> Operation:
        return await kv.operate(KvVerb.RESTORE, body, warm_instead=body.fallback == "warm")

    async def unpin(body: Unpin) -> Operation:
        return pinning.unpin(body.pin_id)

    async def list_operations(_request: Request) -> Response:
        return answer(OperationList([_described(operation) for operation in operations.newest()]))

    async def get_operation(request: Request) -> Response:
        return answer(_described(operations.get(request.path_params["operation_id"])))

    async def delete_operation(request: Request) -> Response:
        return answer(_described(operations.cancel(request.path_params["operation_id"])))

    one = "/operations/{operation_id}"
    progress = f"An operation's progress and state: {_STATES}."
    return (
        _start("/flush", Flush, flush, "Drops KV, and the KV that follows it."),
        _start("/offload", Offload, offload, "Moves KV from the GPU tier to host memory."),
        _start("/restore", Restore, restore, "Moves KV from host memory to the GPU tier."),
        _start(
            "/warm",
            Warm,
            lambda body: warming.warm(body, everywhere=body.engines == "all"),
            "Computes a prefix before it is needed.",
        ),
        _start(
            "/pin",
            Pin,
            lambda body: pinning.pin(body, body.ttl_s),
            "Protects a prefix from eviction for a time.",
        ),
        _start("/unpin", Unpin, unpin, "Ends a pin."),
        Endpoint(
            "GET",
            "/operations",
            list_operations,
            "Running and recent operations.",
            OperationList,
            others="do",
            join=_all_operations,
        ),
        Endpoint("GET", one, get_operation, progress, OperationAnswer, others="know"),
        Endpoint(
            "DELETE",
            one,
            delete_operation,
            "Cancels an operation; what is done stays done.",
            OperationAnswer,
            others="know",
        ),
    )


def _all_operations(_request: Request, answers: list[dict[str, Any]]) -> dict[str, Any]:
    operations = [each for answer in answers for each in answer["operations"]]
    return {"operations": sorted(operations, key=lambda operation: -operation["started"])}


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

    more: dict[str, Any] = {"statuses": (200, 202, 502), "others": "do" if kind is Flush else "know"}
    return Endpoint("POST", path, handler, summary, OperationAnswer, body=kind, **more)


def _described(operation: Operation) -> OperationAnswer:
    return msgspec.convert(operation, OperationAnswer, from_attributes=True)


DEPTH, PREFIXES = 8, 200


def prefix_routes(prefixes: Prefixes) -> tuple[Endpoint, ...]:
    """Shows what engines hold of the last prompts."""

    async def get_prefixes(request: Request) -> Response:
        depth = int_query(request, "depth", DEPTH, MAX_DEPTH)
        most = int_query(request, "limit", PREFIXES, MAX_PREFIXES)
        under, words = request.query_params.get("under"), request.query_params.get("words") == "true"
        return answer(await prefixes.look(under, depth, most, words=words))

    return (
        Endpoint(
            "GET",
            "/prefixes",
            get_prefixes,
            "The prefix tree of the last prompts, and which engines hold what of it.",
            PrefixesAnswer,
            query=(
                Query("under", "string", "The id of the prefix to begin with; by default all prompts."),
                Query(
                    "depth", "integer", f"How many below each other, 1 to {MAX_DEPTH}; {DEPTH} by default."
                ),
                Query("words", "boolean", "With the first words of each: prompt text. By default without."),
                Query("limit", "integer", f"How many in all, 1 to {MAX_PREFIXES}; {PREFIXES} by default."),
            ),
        ),
    )
