"""Flush, offload and restore: one operation over every engine that a target concerns."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from engine_adapter import Capability, KvTarget, KvVerb
from proxy.control.operations import Operation, Operations, Part, new_operation, run_parts
from proxy.control.target import Target
from proxy.control.target_engines import Selection, Share, Targets, parts_of, require_able
from proxy.control.warm import Warming
from proxy.core.audit import Trust
from proxy.core.retention import PinBook
from proxy.errors import BadRequest
from proxy.fleet.ingest import Ingest


@dataclass(frozen=True, slots=True)
class KvVerbs:
    """Starts operations on KV. `ingest` relearns what a flush left behind; None without reuse."""

    _targets: Targets
    _warming: Warming
    _pins: PinBook
    _ingest: Ingest | None
    _operations: Operations

    async def operate(self, verb: KvVerb, target: Target, *, warm_instead: bool = False) -> Operation:
        """Starts an operation on a target. With `warm_instead`, engines that cannot do it compute the prefix.

        Raises:
            BadRequest, NotFound, NoEngine: the target cannot be resolved.
            NotSupported: none of the engines concerned can do it.
        """
        capability = Capability(verb.value)
        selection = await self._targets.select(target, capability)
        if warm_instead and selection.prefix is None:
            raise BadRequest("only a prefix can be warmed in place of a restore", param="fallback")
        if not warm_instead:
            require_able(selection, capability)
        able, unable = parts_of(selection, capability)
        work = [(part, partial(self._do, verb, share, selection, part)) for part, share in able]
        if warm_instead and selection.prefix is not None:
            unable = [Part(share.engine.id, "warm") for share in selection.unable]
            work += [
                (part, partial(self._warming.warm_on, selection.prefix, share.engine, part))
                for part, share in zip(unable, selection.unable, strict=True)
            ]
        parts = [*(part for part, _ in able), *unable]
        operation = new_operation(verb.value, selection.label, parts, selection.note)
        return self._operations.start(operation, lambda _operation: run_parts(work))

    async def _do(self, verb: KvVerb, share: Share, selection: Selection, part: Part) -> None:
        if verb is KvVerb.FLUSH:
            self._clear_view(share, selection)
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
                self._rebuild_view(share)
        if verb is KvVerb.FLUSH and complete:
            self._end_pins(share, selection)
            if KvTarget() in share.targets:
                share.engine.salts.emptied()

    def _clear_view(self, share: Share, selection: Selection) -> None:
        """KV that is being flushed counts as gone at once, so that no request is sent to it."""
        engine, pool, prefix = share.engine, share.pool, selection.prefix
        if prefix is not None:
            pool.forget(engine, prefix.chain.hashes)
        elif all(target.cache_salt is None for target in share.targets):
            pool.wipe(engine)
        elif engine.audit.trust is Trust.APPROXIMATE:
            # A block's hash does not tell whose KV it is, and no event will.
            pool.wipe(engine)

    def _end_pins(self, share: Share, selection: Selection) -> None:
        """Ends the pins on KV that is gone. Where some is left, as engines may leave pinned KV, they stay:
        who wants it flushed can end them."""
        if selection.prefix is not None:
            hashes = selection.prefix.chain.hashes
            first = hashes[0] if hashes else None
            self._pins.forget_engine(
                share.engine.id, lambda pin: first is not None and pin.first_block == first
            )
        elif all(target.cache_salt is None for target in share.targets):
            self._pins.forget_engine(share.engine.id)

    def _rebuild_view(self, share: Share) -> None:
        """Some of the KV that was cleared from the view is still there: the engine's events tell which."""
        engine, pool = share.engine, share.pool
        is_followed = engine.audit.trust is Trust.PRECISE and engine.id in pool.engines
        if self._ingest is not None and is_followed:
            self._ingest.follow(engine, pool)
