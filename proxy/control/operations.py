"""Operations: the target that an operator names, the work on its engines, and a bounded history of it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Any

import anyio
import msgspec

from engine_adapter import EngineError, JsonBody
from proxy.errors import BadRequest, NotFound, ProxyError, status_of
from proxy.runtime import Supervisor, within

# --- target ---------------------------------------------------------------------------------------------
# The target of an operation, as an operator names it: a prefix, the KV of an engine, of a tenant, or all.

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]

PREFIXES = ("messages", "prompt", "token_ids", "prompt_cache_key", "request_id")
# Prefixes of requests that kvpin served: they bring model, salt and LoRA adapter.
_OF_REQUESTS = ("prompt_cache_key", "request_id")
# Fields that go with one kind of prefix only.
_COMPANIONS = {
    "tools": "messages",
    "chat_template_kwargs": "messages",
    "add_generation_prompt": "messages",
    "extra_ids": "token_ids",
    "prompt_table": "token_ids",
    "add_special_tokens": "prompt",
    "tokens": "request_id",
}


class Target(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The target of an operation.

    Exactly one of `messages`, `prompt`, `token_ids`, `prompt_cache_key`, `request_id`, `engine`, `tenant` and
    `all` names it. `engine` and `tenant` may also narrow down a prefix.

    Attributes:
        messages: a chat, with `tools` and `chat_template_kwargs` as in a request. By default without the
            generation prompt: longer chats share the prefix up to there.
        prompt: text of a completion, with `add_special_tokens`.
        token_ids: a prompt as token ids, with `extra_ids` or `prompt_table`.
        prompt_cache_key: the prompt of the last request with this key.
        request_id: the prompt of that recent request; with `tokens` only so many tokens of its beginning.
        engine: everything on that engine; beside a prefix or a tenant, only on that engine.
        tenant: all KV of that tenant; beside a prefix, the tenant whose KV it is.
        all: everything on all engines, or on those of `model`.
        cache_salt: the salt that a client sends with its requests; beside `engine` or `all`, only its KV.
        model: the served model; needed where there are several. With the name of a LoRA adapter, a prefix
            is that adapter's.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    token_ids: list[TokenId] | None = None
    extra_ids: list[int] | None = None
    prompt_table: Name | None = None
    prompt_cache_key: Name | None = None
    request_id: Name | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    engine: Name | None = None
    tenant: Name | None = None
    all: bool = False
    cache_salt: Name | None = None
    model: Name | None = None


def kind_of(target: Target) -> str:
    """The kind of a target. Raises BadRequest, which names the field, if there is not exactly one."""
    given = [name for name in PREFIXES if getattr(target, name) is not None]
    if target.all:
        given.append("all")
    if not given and (target.tenant or target.engine):
        given = ["tenant" if target.tenant else "engine"]
    if not given:
        raise BadRequest(
            f"name a target: one of {', '.join(PREFIXES)}, engine, tenant, or all: true", param="target"
        )
    if len(given) > 1:
        raise BadRequest(f"{given[1]} excludes {given[0]}: name one target", param=given[1])
    kind = given[0]
    if target.all and (target.engine or target.tenant):
        raise BadRequest("all means every engine and tenant: leave it out", param="all")
    for name, needed in _COMPANIONS.items():
        if getattr(target, name) is not None and kind != needed:
            raise BadRequest(f"{name} goes with {needed}", param=name)
    if target.cache_salt is not None and kind in _OF_REQUESTS:
        raise BadRequest(f"a {kind} brings the salt of its request", param="cache_salt")
    return kind


def request_of(target: Target, model: str) -> tuple[str, JsonBody]:
    """The request whose prompt the prefix is."""
    fields: dict[str, Any] = {"model": model}
    if target.messages is not None:
        fields |= {name: getattr(target, name) for name in ("messages", "tools", "chat_template_kwargs")}
        fields["add_generation_prompt"] = target.add_generation_prompt or False
        path = "/v1/chat/completions"
    else:
        if target.token_ids is not None and not target.token_ids:
            raise BadRequest("token_ids is empty", param="token_ids")
        fields["prompt"] = target.prompt if target.prompt is not None else target.token_ids
        fields |= {
            name: getattr(target, name) for name in ("extra_ids", "prompt_table", "add_special_tokens")
        }
        path = "/v1/completions"
    given = {name: value for name, value in fields.items() if value is not None}
    return path, JsonBody(msgspec.json.encode(given))


# --- operations -----------------------------------------------------------------------------------------
# Operations: work on one or more engines that may take long, its progress, and a bounded history of it.

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


class OperationPart(PartAnswer, kw_only=True):
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
    """An operation that runs, or has run."""

    parts: tuple[OperationPart, ...] = msgspec.field(name="engines", default=())
    status: int = HTTPStatus.ACCEPTED  # the HTTP status of the answer to whoever started it
    _over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    async def wait(self, seconds: float) -> bool:
        """Waits for the end; False when the operation still runs after `seconds`."""
        await within(seconds, self._over.wait())
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


class Operations:
    """Running and recent operations, oldest first. Only finished ones leave the history."""

    def __init__(self, tasks: Supervisor) -> None:
        self._tasks = tasks
        self._operations: OrderedDict[str, Operation] = OrderedDict()

    def start(
        self,
        verb: str,
        target: str,
        parts: Iterable[OperationPart],
        work: Callable[[Operation], Coroutine[Any, Any, None]],
        note: str | None = None,
    ) -> Operation:
        """Begins an operation: runs `work` on it in the background."""
        name = f"op-{uuid.uuid4().hex[:16]}"
        operation = Operation(operation_id=name, verb=verb, target=target, parts=tuple(parts), note=note)
        self._operations[name] = operation
        over = (o for o in list(self._operations.values()) if o.state is not OperationState.RUNNING)
        while len(self._operations) > HISTORY and (oldest := next(over, None)) is not None:
            del self._operations[oldest.operation_id]
        self._tasks.start(f"operation {name}", _run(operation, work))
        return operation

    def get(self, operation_id: str) -> Operation:
        """The operation of that id; raises NotFound."""
        if (operation := self._operations.get(operation_id)) is None:
            raise NotFound(f"there is no operation {operation_id!r}", param="operation_id")
        return operation

    def newest(self) -> list[Operation]:
        """All operations, newest first."""
        return list(reversed(self._operations.values()))

    def cancel(self, operation_id: str) -> Operation:
        """Ends a running operation; what is done stays done. Raises NotFound."""
        operation = self.get(operation_id)
        operation.end(OperationState.CANCELLED, "cancelled")
        self._tasks.cancel(f"operation {operation_id}")
        return operation

    def stop_on(self, engine_id: str) -> None:
        """The engine is removed: ends its part of every running operation."""
        for operation in self._operations.values():
            for part in operation.parts:
                if part.engine == engine_id and part.state is OperationState.RUNNING:
                    part.stop()


async def run_parts(parts: Iterable[tuple[OperationPart, Callable[[], Awaitable[None]]]]) -> None:
    """Runs the work of all engines at once."""
    async with anyio.create_task_group() as group:
        for part, work in parts:
            group.start_soon(part.run, work)


async def _run(operation: Operation, work: Callable[[Operation], Coroutine[Any, Any, None]]) -> None:
    try:
        await work(operation)
        if failed := [part for part in operation.parts if part.state is OperationState.FAILED]:
            first = f"{failed[0].engine}: {failed[0].error}"
            why = f"{len(failed)} of {len(operation.parts)} engines failed: {first}"
            operation.end(OperationState.FAILED, why)
        operation.end(OperationState.DONE)
    except (ProxyError, EngineError) as error:
        operation.end(OperationState.FAILED, str(error), status_of(error))
    except asyncio.CancelledError:
        operation.end(OperationState.CANCELLED, "cancelled")
        raise
    finally:
        # Still open here only after a bug, which the supervisor logs.
        why = "kvpin failed on this operation; the log has the details"
        operation.end(OperationState.FAILED, why, HTTPStatus.INTERNAL_SERVER_ERROR)
