"""Pins: a prefix protected from eviction on every engine that holds it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from engine_adapter import Capability
from proxy.control.operations import Operation, Operations, OperationState, Part, new_operation, run_parts
from proxy.control.target import PREFIXES, Target, kind_of
from proxy.control.target_engines import Share, Targets, parts_of, require_able
from proxy.core.index.blocks import BlockHash
from proxy.core.retention import Pin, PinBook
from proxy.errors import BadRequest, NotFound
from proxy.fleet.fleet import Fleet

MAX_TTL_S = 7 * 24 * 3600.0


class PinAnswer(msgspec.Struct, kw_only=True):
    """A pin that holds now: what it protects, on which engines, and for how long. `kvpin` is the kvpin that
    holds it; null for the one that answers."""

    pin_id: str
    target: str
    engines: list[str]
    blocks: int
    expires_in_s: float
    kvpin: str | None = None


@dataclass(frozen=True, slots=True)
class Pinning:
    """Starts and ends pins. `clock` gives monotonic seconds."""

    _fleet: Fleet
    _targets: Targets
    _pins: PinBook
    _operations: Operations
    _clock: Callable[[], float] = time.monotonic

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
        require_able(selection, Capability.PIN)
        pairs, unable = parts_of(selection, Capability.PIN)
        blocks = selection.prefix.chain.hashes if selection.prefix is not None else ()

        async def work(operation: Operation) -> None:
            held: dict[str, str] = {}
            try:
                await run_parts([(part, partial(_pin_on, share, ttl_s, part, held)) for part, share in pairs])
            finally:
                if held:
                    done = sum(part.done for part, _ in pairs)
                    self._note(operation, held, done, ttl_s, blocks)
            if not held and all(part.state is OperationState.DONE for part in operation.parts):
                raise NotFound("no engine holds any of it: warm it first")

        parts = [*(part for part, _ in pairs), *unable]
        operation = new_operation("pin", selection.label, parts, selection.note)
        return self._operations.start(operation, work)

    def unpin(self, pin_id: str) -> Operation:
        """Starts ending a pin on all its engines. Raises NotFound for one that has ended."""
        self._forget_lost()
        found = self._pins.take(pin_id, self._clock())
        if found is None:
            raise NotFound(f"there is no pin {pin_id!r}", param="pin_id")
        engines = {name: own for name, own in found.engine_pins.items() if name in self._fleet.engines}
        pairs = [(Part(name, "unpin"), own) for name, own in engines.items()]

        async def work(operation: Operation) -> None:
            left = dict(engines)
            try:
                await run_parts([(part, partial(self._unpin_on, own, part, left)) for part, own in pairs])
            finally:
                if left:
                    # These engines still hold it. It can be ended again, and lapses by itself.
                    self._pins.add(replace(found, engine_pins=left))
            operation.result = {"pin_id": pin_id, "unpinned": not left}

        operation = new_operation("unpin", found.label, (part for part, _ in pairs))
        return self._operations.start(operation, work)

    def active(self) -> list[PinAnswer]:
        """The pins that hold now."""
        self._forget_lost()
        now = self._clock()
        return [
            PinAnswer(
                pin_id=held.pin_id,
                target=held.label,
                engines=list(held.engine_pins),
                blocks=held.blocks,
                expires_in_s=max(held.expires - now, 0.0),
            )
            for held in self._pins.active(now)
        ]

    def _note(
        self,
        operation: Operation,
        held: dict[str, str],
        blocks: int,
        ttl_s: float,
        prefix: Sequence[BlockHash],
    ) -> None:
        """Keeps a pin that engines hold now, as engine id → the engine's own pin id."""
        name, expires = f"pin-{uuid.uuid4().hex[:16]}", self._clock() + ttl_s
        instances = {engine: self._instance(engine) for engine in held}
        first, last = (prefix[0], prefix[-1]) if prefix else (None, None)
        self._pins.add(Pin(name, held, blocks, expires, operation.target, first, instances, last))
        operation.result = {"pin_id": name, "blocks": blocks, "ttl_s": ttl_s}

    def _forget_lost(self) -> None:
        """Drops pins on engines that are gone or were restarted: a process that ends loses its pins."""
        for held in self._pins.active(self._clock()):
            for name in held.engine_pins:
                is_gone = name not in self._fleet.engines
                if is_gone or self._instance(name) not in ("", held.instances[name]):
                    self._pins.forget_engine(name, partial(_is, held.pin_id))

    def _instance(self, engine_id: str) -> str:
        engine = self._fleet.engines.get(engine_id)
        return engine.info.instance if engine is not None and engine.info is not None else ""

    async def _unpin_on(self, own: str, part: Part, left: dict[str, str]) -> None:
        if part.engine in self._fleet.engines:
            await self._fleet.engine(part.engine).adapter.unpin(own)
        del left[part.engine]


async def _pin_on(share: Share, ttl_s: float, part: Part, held: dict[str, str]) -> None:
    for target in share.targets:
        pinned = await share.engine.adapter.pin(target, ttl_s)
        part.done, part.total = pinned.blocks, pinned.blocks
        if pinned.blocks:
            held[share.engine.id] = pinned.pin_id
        else:
            await share.engine.adapter.unpin(pinned.pin_id)


def _is(pin_id: str, other: Pin) -> bool:
    return other.pin_id == pin_id
