"""Engines and statistics; operations on KV and their progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from engine_adapter import EngineSpecError, KvVerb
from proxy.api.admin.endpoint import (
    Drain,
    Endpoint,
    Flush,
    Offload,
    OnTarget,
    Pin,
    Query,
    Restore,
    Unpin,
    Warm,
    answer,
    operation,
    read_body,
)
from proxy.control.engines import (
    DrainedEngine,
    EngineAnswer,
    RemovalAnswer,
    RemovedEngine,
    Stats,
    describe_drained,
    describe_engine,
    names_served,
    stats,
    warning_of,
)
from proxy.control.kv import KvOrders
from proxy.control.operations import Operation, OperationAnswer, Operations, OperationState
from proxy.control.prefixes import MAX_DEPTH, MAX_PREFIXES, Prefixes, PrefixesAnswer
from proxy.control.reconciler import Reconciler
from proxy.errors import BadRequest
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.peers.peers import Peers
from proxy.settings import EngineSettings

# --- engines and statistics -----------------------------------------------------------------------------


class SourceAnswer(msgspec.Struct):
    """A source that kvpin finds engines in. `engines` are the ids that it named last. They may be
    old if there is an `error`."""

    source: str
    engines: list[str]
    error: str | None


class EngineList(msgspec.Struct):
    """All engines, and the sources that some of them were found in. `removed` are the engines that operators
    have removed, the last first: those that settings or sources name, and those of the last day."""

    engines: list[EngineAnswer]
    sources: list[SourceAnswer]
    removed: list[RemovedEngine]


def engine_routes(
    fleet: Fleet, reconciler: Reconciler, kv: KvOrders, peers: Peers | None = None, *, reuse: bool
) -> tuple[Endpoint, ...]:
    """Lists, adds, removes and drains engines, and tells what they hold."""

    def is_told() -> bool:
        return peers is None or peers.bus.is_connected

    def described(engine: Engine) -> EngineAnswer:
        return describe_engine(engine, fleet.pool_of(engine))

    @operation("GET", "/stats")
    async def get_stats() -> Stats:
        """What every pool and engine holds and has predicted."""
        return await stats(fleet, kv.active(), peers, reuse=reuse)

    @operation("GET", "/engines")
    async def list_engines() -> EngineList:
        """All engines, and where they were found."""
        found = [
            SourceAnswer(source.name, [each.entry.id for each in source.found], source.error)
            for source in reconciler.sources.values()
        ]
        listed = [described(engine) for engine in fleet.engines.values()]
        return EngineList(listed, found, reconciler.removed())

    @operation("POST", "/engines", body=EngineSettings, statuses=(201,), others="follow")
    async def post_engine(body: dict[str, Any]) -> EngineAnswer:
        """Adds an engine at all kvpins of the group; 409 when its id or its address is taken."""
        return described(reconciler.add(_settings(body)))

    @operation("DELETE", "/engines/{engine_id}", others="follow")
    async def delete_engine(engine_id: str) -> RemovalAnswer:
        """Drops an engine at all kvpins of the group; its requests in flight go on to their end."""
        engine = fleet.engine(engine_id)
        names = names_served(engine, fleet)
        undo = f"they fail; {await reconciler.remove(engine)} brings {engine.id} back"
        return RemovalAnswer(id=engine.id, warning=warning_of(fleet, names, undo, is_told=is_told()))

    @operation("POST", "/engines/{engine_id}/drain", others="follow")
    async def post_drain(body: Drain, engine_id: str) -> DrainedEngine:
        """No kvpin of the group sends the engine new requests; with `undo`, they do again."""
        engine = reconciler.drain(fleet.engine(engine_id), undo=body.undo)
        return describe_drained(engine, fleet, is_told=is_told())

    return get_stats, list_engines, post_engine, delete_engine, post_drain


def _settings(body: dict[str, Any]) -> EngineSettings:
    """The engine that a body describes, checked as in the settings; raises BadRequest naming the field."""
    values = {name: value for name, value in body.items() if value is not None}
    try:
        return EngineSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # about several fields; the message names them
            raise BadRequest(message, param=first.get("ctx", {}).get("param")) from error
        name = str(first["loc"][0])
        if name == "kind" and message.startswith("unknown engine kind"):
            raise EngineSpecError(message) from error
        raise BadRequest(f"{name}: {message}", param=name) from error


# --- operations on KV, flush, offload, restore, warm, pin and unpin, and their progress -----------------

_Body = TypeVar("_Body", bound=OnTarget | Unpin)
_STATES = ", ".join(state.value for state in OperationState)
_OPERATION = "/operations/{operation_id}"


class OperationList(msgspec.Struct):
    """Operations, newest first."""

    operations: list[OperationAnswer]


def kv_routes(kv: KvOrders, operations: Operations) -> tuple[Endpoint, ...]:
    """Starts operations, lists them, and cancels them."""
    flush, offload = partial(kv.operate, KvVerb.FLUSH), partial(kv.operate, KvVerb.OFFLOAD)

    async def restore(body: Restore) -> Operation:
        return await kv.operate(KvVerb.RESTORE, body, warm_instead=body.fallback == "warm")

    async def unpin(body: Unpin) -> Operation:
        return kv.unpin(body.pin_id)

    @operation("GET", "/operations", others="do", join=_all_operations)
    async def list_operations() -> OperationList:
        """Running and recent operations."""
        return OperationList([_described(operation) for operation in operations.newest()])

    @operation("GET", _OPERATION, summary=f"An operation's progress and state: {_STATES}.", others="know")
    async def get_operation(operation_id: str) -> OperationAnswer:
        return _described(operations.get(operation_id))

    @operation("DELETE", _OPERATION, others="know")
    async def delete_operation(operation_id: str) -> OperationAnswer:
        """Cancels an operation; what is done stays done."""
        return _described(operations.cancel(operation_id))

    return (
        _start("/flush", Flush, flush, "Drops KV, and the KV that follows it."),
        _start("/offload", Offload, offload, "Moves KV from the GPU tier to host memory."),
        _start("/restore", Restore, restore, "Moves KV from host memory to the GPU tier."),
        _start(
            "/warm",
            Warm,
            lambda body: kv.warm(body, everywhere=body.engines == "all"),
            "Computes a prefix before it is needed.",
        ),
        _start(
            "/pin",
            Pin,
            lambda body: kv.pin(body, body.ttl_s),
            "Protects a prefix from eviction for a time.",
        ),
        _start("/unpin", Unpin, unpin, "Ends a pin."),
        list_operations,
        get_operation,
        delete_operation,
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


_WITHIN = (
    Query("under", "string", "The id of the prefix to begin with; by default all prompts."),
    Query.number("depth", "How many below each other", 8, MAX_DEPTH),
    Query("words", "boolean", "With the first words of each: prompt text. By default without."),
    Query.number("limit", "How many in all", 200, MAX_PREFIXES),
)


def prefix_routes(prefixes: Prefixes) -> tuple[Endpoint, ...]:
    """Shows what engines hold of the last prompts."""

    @operation("GET", "/prefixes", query=_WITHIN)
    async def get_prefixes(under: str | None, depth: int, limit: int, *, words: bool) -> PrefixesAnswer:
        """The prefix tree of the last prompts, and which engines hold what of it."""
        return await prefixes.look(under, depth, limit, words=words)

    return (get_prefixes,)
