"""Flush, offload, restore: one operation over every engine a target concerns."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial

from engine_adapter import Capability, KvVerb
from proxy.control.context import Control
from proxy.control.operations import Operation, Part, new_operation, run_parts
from proxy.control.targets import Selection, Share, Target, require_able, select
from proxy.control.warm import warm_on
from proxy.core.audit import Trust
from proxy.core.pins import Pin
from proxy.errors import BadRequest


async def operate(control: Control, verb: KvVerb, target: Target, *, warm_instead: bool = False) -> Operation:
    """Starts the operation.

    Args:
        control: the collaborators.
        verb: what to do.
        target: on what.
        warm_instead: engines that cannot restore compute the prefix again.

    Raises:
        BadRequest, NotFound, NoEngine: a target that cannot be resolved.
        NotSupported: none of the engines concerned can do it.
    """
    capability = Capability(verb.value)
    selection = await select(control, target, capability)
    if warm_instead and selection.prefix is None:
        raise BadRequest("only a prefix can be warmed in place of a restore", param="fallback")
    if not warm_instead:
        require_able(selection, capability)
    pairs = [(Part(share.engine.id, verb.value), share) for share in selection.shares]
    others = [Part(share.engine.id, "warm" if warm_instead else verb.value) for share in selection.unable]
    parts = [*(part for part, _ in pairs), *others]
    if not warm_instead:
        for part, share in zip(others, selection.unable, strict=True):
            part.fail(str(share.engine.adapter.not_supported(capability)))

    async def work(_operation: Operation) -> None:
        running = [
            (part, partial(_operate_on, control, verb, share, selection, part)) for part, share in pairs
        ]
        if warm_instead and selection.prefix is not None:
            running += [
                (part, partial(warm_on, control, selection.prefix, share.engine, part))
                for part, share in zip(others, selection.unable, strict=True)
            ]
        await run_parts(running)

    operation = new_operation(verb.value, selection.label, parts, selection.note)
    return control.operations.start(control.tasks, operation, work)


async def _operate_on(control: Control, verb: KvVerb, share: Share, selection: Selection, part: Part) -> None:
    """One engine's part."""
    if verb is KvVerb.FLUSH:
        _clear_view(control, share, selection)
    complete = False
    try:
        for target in share.targets:
            before = part.progress
            async with aclosing(share.engine.adapter.operate(verb, target)) as steps:
                async for progress in steps:
                    part.advance(before, progress)
        complete = not any(part.left.values())
    finally:
        if verb is KvVerb.FLUSH and not complete:
            _rebuild_view(control, share)


def _clear_view(control: Control, share: Share, selection: Selection) -> None:
    """What is being flushed counts as gone at once: no request is sent after it."""
    engine, pool, prefix = share.engine, share.pool, selection.prefix
    if prefix is not None:
        hashes = prefix.chain.hashes
        pool.forget(engine, hashes)
        control.pins.forget_engine(engine.id, partial(_starts_with, hashes[0] if hashes else None))
    elif all(target.cache_salt is None for target in share.targets):
        pool.wipe(engine)
        control.pins.forget_engine(engine.id)
    elif engine.audit.trust is Trust.APPROXIMATE:
        # Whose KV a block is cannot be told from its hash, and no event will come.
        pool.wipe(engine)


def _starts_with(first_block: int | None, pin: Pin) -> bool:
    return first_block is not None and pin.first_block == first_block


def _rebuild_view(control: Control, share: Share) -> None:
    """Some of what was cleared from the view is still there: learn what, from the engine."""
    ingest = control.flow.ingest
    if (
        ingest is not None
        and share.engine.audit.trust is Trust.PRECISE
        and share.engine.id in share.pool.engines
    ):
        ingest.follow(share.engine, share.pool)
