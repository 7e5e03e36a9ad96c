"""Warming: a one-token completion of a prefix, so that its KV is there before it is needed."""

from __future__ import annotations

import uuid
from functools import partial

import msgspec
from starlette.types import Message

from engine_adapter import Capability, EngineRejected, JsonBody
from proxy.control.context import Control
from proxy.control.operations import Operation, Part, new_operation, run_parts
from proxy.control.targets import Prefix, Target, prefix_of
from proxy.errors import BadRequest, NoEngine
from proxy.fleet.engine import Engine
from proxy.flow import Ready
from proxy.request.calls import Call, Reply
from proxy.request.records import RequestRecord

_PATH = "/v1/completions"


async def warm(control: Control, target: Target, *, everywhere: bool = False) -> Operation:
    """Starts computing a prefix on the engine placement picks, on the target's `engine`, or on all ready
    engines of the pool.

    Raises:
        BadRequest, NotFound: a target that is no prefix or is wrong.
        NoEngine: no engine can take it now.
        NotSupported: the prefix has extra ids, and the engine takes none.
    """
    if everywhere and target.engine is not None:
        raise BadRequest('engines: "all" excludes engine', param="engines")
    prefix = await prefix_of(control, target)
    engines = _choose(prefix, target.engine, everywhere=everywhere)
    if prefix.prompt.extra_ids is not None:
        for engine in engines:
            if not engine.can(Capability.EXTRA_IDS):
                raise engine.adapter.not_supported(Capability.EXTRA_IDS)
    parts = [(Part(engine.id, "warm"), engine) for engine in engines]

    async def work(_operation: Operation) -> None:
        await run_parts([(part, partial(warm_on, control, prefix, engine, part)) for part, engine in parts])

    operation = new_operation("warm", prefix.label, (part for part, _ in parts))
    return control.operations.start(control.tasks, operation, work)


async def warm_on(control: Control, prefix: Prefix, engine: Engine, part: Part) -> None:
    """Computes the prefix on one engine. It takes the same way as any request, without a client."""
    flow, ready = control.flow, _request(prefix)
    candidates = [candidate for candidate in flow.candidates(ready) if candidate.engine == engine.id]
    if not candidates:
        raise NoEngine(f"engine {engine.id!r} takes no requests now")
    part.total = len(prefix.chain.hashes)
    record = RequestRecord.of(ready.call)
    await flow.run_on(ready, prefix.pool.place(candidates, prefix.chain), Reply(_discard), record)
    if record.error is not None:
        raise EngineRejected(record.error, status=record.status or 502)
    part.done = part.total


def _choose(prefix: Prefix, engine_id: str | None, *, everywhere: bool) -> list[Engine]:
    adapter = prefix.prompt.adapter
    ready = {
        engine.id: engine
        for engine in prefix.pool.ready()
        if engine_id in (None, engine.id) and (adapter is None or adapter in engine.adapters)
    }
    if not ready:
        raise NoEngine(
            f"engine {engine_id!r} takes no requests now" if engine_id else "no engine takes requests now"
        )
    if everywhere:
        return list(ready.values())
    if engine_id is not None:
        return [ready[engine_id]]
    candidates = prefix.pool.candidates(prefix.chain, prefix.prompt)
    return [ready[prefix.pool.place(candidates, prefix.chain).engine]]


def _request(prefix: Prefix) -> Ready:
    """The one-token completion that leaves the prefix in an engine's cache."""
    pool, prompt = prefix.pool, prefix.prompt
    fields = {
        "model": prompt.adapter or pool.model,
        "prompt": prompt.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if prompt.extra_ids is not None:
        fields["extra_ids"] = prompt.extra_ids.tolist()
    body = JsonBody(msgspec.json.encode(fields))
    call = Call(f"warm-{uuid.uuid4().hex}", "POST", _PATH, {"content-type": "application/json"}, body)
    return Ready(call, pool, prompt.salt, prompt.adapter, prompt, prefix.chain)


async def _discard(_message: Message) -> None:
    """Nobody waits for the answer; its KV is what was wanted."""
