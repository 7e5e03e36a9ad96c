"""What operators order about KV: flush, offload, restore, warm, pin."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from engine_adapter import Capability, EngineRejected, Headers, JsonBody, KvProgress, KvTarget, KvVerb
from proxy.control.operations import (
    PREFIXES,
    Operation,
    OperationPart,
    Operations,
    OperationState,
    Target,
    kind_of,
    run_parts,
)
from proxy.control.target_engines import Prefix, Selection, Share, Targets, parts_of
from proxy.core.admission import MAX_PRIORITY
from proxy.core.audit import Trust
from proxy.core.retention import AdminPin
from proxy.errors import BadRequest, NoEngine, NotFound
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.flow import Flow
from proxy.headers import PRIORITY_HEADER
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.comparison import Flush
from proxy.request.gate import Admission
from proxy.request.records import RequestRecord
from proxy.steps.preparation import Ready

_PATH = "/v1/completions"
_LAST = b"%d" % MAX_PRIORITY
MAX_TTL_S = 7 * 24 * 3600.0


class PinAnswer(msgspec.Struct):
    """A pin that holds now: what it protects, on which engines, and for how long. `kvpin` is the kvpin that
    holds it; null for the one that answers."""

    pin_id: str
    target: str
    engines: list[str]
    blocks: int
    expires_in_s: float
    kvpin: str | None = None


@dataclass(frozen=True, slots=True)
class KvOrders:
    """Starts and ends what operators order. `clock` gives monotonic seconds."""

    _fleet: Fleet
    _flow: Flow
    _targets: Targets
    _operations: Operations
    _clock: Callable[[], float] = time.monotonic

    # --- warming: a completion of one token, so that a prefix's KV is there before it is needed -----------
    # It lives like a client's request: it waits for its turn, behind those of clients.

    async def warm(self, target: Target, *, everywhere: bool = False) -> Operation:
        """Starts computing a prefix: on the target's `engine`, on every ready engine of the pool that
        computes prompts with `everywhere`, else where placement puts it.

        Raises:
            BadRequest, NotFound: the target is no prefix, or is wrong.
            NoEngine: no engine can take it now.
            NotSupported: the prefix has extra ids, and the engine takes none.
        """
        if everywhere and target.engine is not None:
            raise BadRequest('engines: "all" excludes engine', param="engines")
        prefix = await self._targets.prefix_of(target)
        engines = self._choose(prefix, target.engine, everywhere=everywhere)
        if prefix.prompt.extra_ids is not None:
            for engine in engines:
                if not engine.can(Capability.EXTRA_IDS):
                    raise engine.adapter.not_supported(Capability.EXTRA_IDS)
        pairs = [(OperationPart(engine.id, "warm"), engine) for engine in engines]
        work = [(part, partial(self.warm_on, prefix, engine, part)) for part, engine in pairs]
        parts = [part for part, _ in pairs]
        return self._operations.start("warm", prefix.label, parts, lambda _operation: run_parts(work))

    async def warm_on(self, prefix: Prefix, engine: Engine, part: OperationPart) -> None:
        """Computes the prefix on one engine. Like a request, it waits a moment for an engine that is away."""
        ready = msgspec.structs.replace(_request(prefix), home=engine.id)
        part.total = len(prefix.chain.hashes)
        record = RequestRecord.of(ready.call)
        with Admission.of_kvpin() as admitted:
            await self._flow.run(ready, Reply(Nobody()), record, admitted)
        if record.error is not None:
            raise EngineRejected(record.error, status=record.status or 502)
        part.done = part.total

    def _choose(self, prefix: Prefix, engine_id: str | None, *, everywhere: bool) -> list[Engine]:
        pool, request = prefix.pool, _request(prefix)
        computing = pool.computing(request.own_needs)
        if engine_id is not None:
            chosen = [engine for engine in computing if engine.id == engine_id]
            if not chosen and engine_id in pool.engines_for(request.own_needs):
                named = ", ".join(engine.id for engine in computing)
                raise BadRequest(
                    f"engine {engine_id!r} computes no prompts: name one of {named}", param="engine"
                )
            if not chosen:
                raise NoEngine(f"engine {engine_id!r} takes no requests now")
            return chosen
        candidates = self._flow.candidates(request)
        if not candidates:
            raise self._fleet.none_ready(pool, prefix.prompt.lora)
        if everywhere:
            return computing
        return [pool.engines[pool.place(candidates, prefix.chain).chosen.computed_by]]

    # --- flush, offload and restore: one operation over every engine that a target concerns ---------------

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
        able, unable = parts_of(selection, capability, is_required=not warm_instead)
        work = [(part, partial(self._do, verb, share, selection, part)) for part, share in able]
        if warm_instead and selection.prefix is not None:
            unable = [OperationPart(share.engine.id, "warm") for share in selection.unable]
            work += [
                (part, partial(self.warm_on, selection.prefix, share.engine, part))
                for part, share in zip(unable, selection.unable, strict=True)
            ]
        parts = [*(part for part, _ in able), *unable]
        return self._operations.start(
            verb.value, selection.label, parts, lambda _operation: run_parts(work), selection.note
        )

    async def _do(self, verb: KvVerb, share: Share, selection: Selection, part: OperationPart) -> None:
        if share.pool.engines.get(share.engine.id) is not share.engine:
            raise NoEngine("it is not connected any more")
        flush = self._clear_view(share, selection) if verb is KvVerb.FLUSH else None
        complete, now = False, KvProgress(0, 0)
        try:
            for target in share.targets:
                before = now
                async with aclosing(share.engine.adapter.operate(verb, target)) as steps:
                    async for progress in steps:
                        now = before.plus(progress)
                        part.done, part.total, part.bytes = now.done, now.total, now.bytes
                        part.left = dict(now.left)
            complete = not any(part.left.values())
        finally:
            if flush is not None and not complete:
                ingest, engine, pool = self._flow.attempts.ingest, share.engine, share.pool
                is_there = pool.engines.get(engine.id) is engine
                if ingest is not None and engine.audit.trust is Trust.PRECISE and is_there:
                    ingest.follow(engine, pool)  # some of the KV is still there: its events tell which
                if not part.done and flush in engine.flushed:
                    engine.flushed.remove(flush)
        if flush is not None and complete:
            self._end_pins(share, selection)
            if KvTarget() in share.targets:
                share.engine.salts.emptied()

    def _clear_view(self, share: Share, selection: Selection) -> Flush:
        """KV that is being flushed counts as gone at once, so that no request is sent to it. The flush is
        noted as the cause of later misses, and returned: one that flushed nothing is none."""
        engine, pool, prefix = share.engine, share.pool, selection.prefix
        salts = frozenset(target.cache_salt for target in share.targets)
        flush = Flush(time.time(), None if prefix is None else prefix.prompt, salts)
        engine.flushed.append(flush)
        if prefix is not None:
            pool.forget(engine, prefix.chain.hashes)
        elif salts <= {None} or engine.audit.trust is Trust.APPROXIMATE:
            # All KV; or that of some salts, and neither a block's hash nor an event will tell whose KV it is.
            pool.wipe(engine)
        return flush

    def _end_pins(self, share: Share, selection: Selection) -> None:
        """Ends the pins on KV that is gone. Where some is left, as engines may leave pinned KV, they stay:
        who wants it flushed can end them."""
        if selection.prefix is not None:
            if hashes := selection.prefix.chain.hashes:
                self._fleet.pins.forget_engine(share.engine.id, lambda pin: pin.first_block == hashes[0])
        else:
            salts = {target.cache_salt for target in share.targets}  # None: that of all KV
            self._fleet.pins.forget_engine(share.engine.id, lambda pin: None in salts or pin.salt in salts)

    # --- pins: a prefix protected from eviction on every engine that holds it -----------------------------

    async def pin(self, target: Target, ttl_s: float) -> Operation:
        """Starts pinning a prefix for `ttl_s` seconds. The operation's result holds the pin's id.

        Raises:
            BadRequest, NotFound, NoEngine: the target is no prefix, or cannot be resolved.
            NotSupported: the engines that hold the prefix cannot pin.
        """
        kind = kind_of(target)
        if kind not in PREFIXES:
            raise BadRequest(f"a pin needs a prefix: one of {', '.join(PREFIXES)}", param=kind)
        selection = await self._targets.select(target, Capability.PIN)
        pairs, unable = parts_of(selection, Capability.PIN, is_required=True)

        async def work(operation: Operation) -> None:
            held: dict[str, str] = {}
            try:
                await run_parts([(part, partial(_pin_on, share, ttl_s, part, held)) for part, share in pairs])
            finally:
                if held:
                    done = sum(part.done for part, _ in pairs)
                    self._note(operation, held, done, ttl_s, selection.prefix)
            if not held and all(part.state is OperationState.DONE for part in operation.parts):
                raise NotFound("no engine holds any of it: warm it first")

        parts = [*(part for part, _ in pairs), *unable]
        return self._operations.start("pin", selection.label, parts, work, selection.note)

    def unpin(self, pin_id: str) -> Operation:
        """Starts ending a pin on all its engines. Raises NotFound for one that has ended."""
        self._forget_lost()
        if (found := self._fleet.pins.take(pin_id, self._clock())) is None:
            raise NotFound(f"there is no pin {pin_id!r}", param="pin_id")
        engines = {name: own for name, own in found.engine_pins.items() if name in self._fleet.engines}
        pairs = [(OperationPart(name, "unpin"), own) for name, own in engines.items()]

        async def work(operation: Operation) -> None:
            left = dict(engines)
            try:
                await run_parts([(part, partial(self._unpin_on, own, part, left)) for part, own in pairs])
            finally:
                if left:
                    # These engines still hold it. It can be ended again, and lapses by itself.
                    self._fleet.pins.add(replace(found, engine_pins=left))
            operation.result = {"pin_id": pin_id, "unpinned": not left}

        return self._operations.start("unpin", found.label, (part for part, _ in pairs), work)

    def active(self) -> list[PinAnswer]:
        """The pins that hold now."""
        self._forget_lost()
        now = self._clock()
        return [
            PinAnswer(pin.pin_id, pin.label, list(pin.engine_pins), pin.blocks, max(pin.expires - now, 0.0))
            for pin in self._fleet.pins.active(now)
        ]

    def _note(
        self, operation: Operation, held: dict[str, str], blocks: int, ttl_s: float, prefix: Prefix | None
    ) -> None:
        """Keeps a pin that engines hold now, as engine id → the engine's own pin id."""
        name, expires = f"pin-{uuid.uuid4().hex[:16]}", self._clock() + ttl_s
        instances = {engine: self._instance(engine) for engine in held}
        hashes = prefix.chain.hashes if prefix is not None else ()
        first, last = (hashes[0], hashes[-1]) if hashes else (None, None)
        salt = prefix.prompt.kv.cache_salt if prefix is not None else None
        target = operation.target
        self._fleet.pins.add(AdminPin(name, held, blocks, expires, target, first, instances, last, salt))
        operation.result = {"pin_id": name, "blocks": blocks, "ttl_s": ttl_s}

    def _forget_lost(self) -> None:
        """Drops pins on engines that are gone or were restarted: a process that ends loses its pins, and so
        does an adapter that keeps them."""
        for held in self._fleet.pins.active(self._clock()):
            for name, own in held.engine_pins.items():
                engine = self._fleet.engines.get(name)
                is_gone = engine is None or not engine.adapter.holds_pin(own)
                if is_gone or self._instance(name) not in ("", held.instances[name]):
                    self._fleet.pins.forget_engine(name, partial(_is, held.pin_id))

    def _instance(self, engine_id: str) -> str:
        engine = self._fleet.engines.get(engine_id)
        return engine.info.instance if engine is not None and engine.info is not None else ""

    async def _unpin_on(self, own: str, part: OperationPart, left: dict[str, str]) -> None:
        if part.engine in self._fleet.engines:
            await self._fleet.engine(part.engine).adapter.unpin(own)
        del left[part.engine]


async def _pin_on(share: Share, ttl_s: float, part: OperationPart, held: dict[str, str]) -> None:
    for target in share.targets:
        pinned = await share.engine.adapter.pin(target, ttl_s)
        part.done, part.total = pinned.blocks, pinned.blocks
        if pinned.blocks:
            held[share.engine.id] = pinned.pin_id
        else:
            await share.engine.adapter.unpin(pinned.pin_id)


def _is(pin_id: str, other: AdminPin) -> bool:
    return other.pin_id == pin_id


def _request(prefix: Prefix) -> Ready:
    """The one-token completion that leaves the prefix in an engine's cache."""
    pool, prompt = prefix.pool, prefix.prompt
    fields = {
        "model": prompt.lora or pool.model,
        "prompt": prompt.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if prompt.extra_ids is not None:
        fields["extra_ids"] = prompt.extra_ids.tolist()
    body = JsonBody(msgspec.json.encode(fields))
    headers = Headers([(b"content-type", b"application/json"), (PRIORITY_HEADER.encode(), _LAST)])
    call = Call(f"warm-{uuid.uuid4().hex}", "POST", _PATH, headers, body)
    return Ready(call, pool, prompt.salt, prompt.lora, prompt, prefix.chain, rendering=prefix.rendering)
