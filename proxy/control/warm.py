"""Warming: a one-token completion of a prefix, so that its KV is there before it is needed."""

from __future__ import annotations

import uuid
from functools import partial

import msgspec
from starlette.types import Message

from engine_adapter import Capability, EngineRejected, JsonBody
from proxy.calls import Call, Reply
from proxy.control.context import Control
from proxy.control.operations import Operation, Part, new_operation, run_parts
from proxy.control.targets import Prefix, Target, prefix_of
from proxy.engine import Engine
from proxy.errors import BadRequest, NoEngine
from proxy.lower_tiers import expect_below, look_below

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
    """Computes the prefix on one engine, as any request would be: leased, counted, audited."""
    pool, chain = prefix.pool, prefix.chain
    candidates = [
        candidate for candidate in pool.candidates(chain, prefix.prompt) if candidate.engine == engine.id
    ]
    if not candidates:
        raise NoEngine(f"engine {engine.id!r} takes no requests now")
    placement = pool.place(candidates, chain)
    part.total = len(chain.hashes)
    body = _body(prefix, engine)
    call = Call(f"warm-{uuid.uuid4().hex}", "POST", _PATH, {"content-type": "application/json"}, body)
    with pool.lease(placement, chain) as lease:
        async with lease.patience(), engine.adapter.hold(_PATH, body, prefix.kv) as hold:
            await look_below(pool, lease, prefix.prompt, chain)
            placement = lease.refine(hold)
            outcome = await control.flow.forwarder.forward(
                engine.adapter,
                call,
                hold,
                Reply(_discard),
                {},
                lambda: lease.first_byte(streamed=False),
            )
        lease.succeeded = outcome.error is None
        if outcome.error is not None:
            raise EngineRejected(outcome.error, status=outcome.status)
        expect_below(pool, engine, chain)
    part.done = part.total
    if control.flow.ingest is not None and placement.firm and outcome.cached_tokens is not None:
        control.flow.ingest.audit(engine, placement.predicted_tokens, outcome.cached_tokens)


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


def _body(prefix: Prefix, engine: Engine) -> JsonBody:
    """The completion that leaves the prefix in the engine's cache."""
    prompt = prefix.prompt
    model = engine.info.model if engine.info is not None else prefix.pool.model
    fields = {
        "model": prompt.adapter or model,
        "prompt": prompt.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if prompt.extra_ids is not None:
        fields["extra_ids"] = prompt.extra_ids.tolist()
    if prompt.salt is not None and engine.can(Capability.CACHE_SALT):
        fields["cache_salt"] = prompt.salt
    return JsonBody(msgspec.json.encode(fields))


async def _discard(_message: Message) -> None:
    """Nobody waits for the answer; its KV is what was wanted."""
