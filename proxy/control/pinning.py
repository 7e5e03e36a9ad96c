"""Pins: a prefix protected from eviction on every engine that holds it."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial
from typing import Any

from engine_adapter import Capability
from proxy.control.context import Control
from proxy.control.operations import Operation, Part, new_operation, run_parts
from proxy.control.targets import PREFIXES, Share, Target, kind_of, require_able, select
from proxy.core.pins import Pin
from proxy.errors import BadRequest, NotFound

MAX_TTL_S = 7 * 24 * 3600.0


async def pin(control: Control, target: Target, ttl_s: float) -> Operation:
    """Starts pinning a prefix for `ttl_s` seconds; the operation's result holds the pin's id.

    Raises:
        BadRequest, NotFound, NoEngine: a target that is no prefix or cannot be resolved.
        NotSupported: the engines that hold it cannot pin.
    """
    kind = kind_of(target)
    if kind not in PREFIXES:
        raise BadRequest(f"a pin needs a prefix: one of {', '.join(PREFIXES)}", param=kind)
    selection = await select(control, target, Capability.PIN)
    require_able(selection, Capability.PIN)
    first_block = next(iter(selection.prefix.chain.hashes), None) if selection.prefix else None
    pairs = [(Part(share.engine.id, "pin"), share) for share in selection.shares]
    unable = [Part(share.engine.id, "pin") for share in selection.unable]
    for part, share in zip(unable, selection.unable, strict=True):
        part.fail(str(share.engine.adapter.not_supported(Capability.PIN)))

    async def work(operation: Operation) -> None:
        held: dict[str, str] = {}
        try:
            await run_parts([(part, partial(_pin_on, share, ttl_s, part, held)) for part, share in pairs])
        finally:
            if held:
                blocks = sum(part.done for part, _ in pairs)
                expires = control.clock() + ttl_s
                instances = {name: _instance(control, name) for name in held}
                name = f"pin-{uuid.uuid4().hex[:16]}"
                made = Pin(name, held, blocks, expires, selection.label, first_block, instances)
                control.pins.add(made)
                operation.result = {"pin_id": made.pin_id, "blocks": blocks, "ttl_s": ttl_s}
        if not held and operation.note is None:
            operation.note = "no engine holds any of it: warm it first"

    parts = [*(part for part, _ in pairs), *unable]
    operation = new_operation("pin", selection.label, parts, selection.note)
    return control.operations.start(control.tasks, operation, work)


def unpin(control: Control, pin_id: str) -> Operation:
    """Starts ending a pin on all its engines; raises NotFound for one that has ended."""
    forget_lost(control)
    found = control.pins.take(pin_id, control.clock())
    if found is None:
        raise NotFound(f"there is no pin {pin_id!r}", param="pin_id")
    engines = {name: own for name, own in found.engine_pins.items() if name in control.fleet.engines}
    pairs = [(Part(name, "unpin"), own) for name, own in engines.items()]

    async def work(operation: Operation) -> None:
        left = dict(engines)
        try:
            await run_parts([(part, partial(_unpin_on, control, own, part, left)) for part, own in pairs])
        finally:
            if left:
                # They still hold it: the pin can be ended again, and lapses by itself.
                control.pins.add(replace(found, engine_pins=left))
        operation.result = {"pin_id": pin_id, "unpinned": not left}

    operation = new_operation("unpin", found.label, (part for part, _ in pairs))
    return control.operations.start(control.tasks, operation, work)


def active_pins(control: Control) -> list[dict[str, Any]]:
    """The pins that hold now."""
    forget_lost(control)
    now = control.clock()
    return [
        {
            "pin_id": held.pin_id,
            "target": held.label,
            "engines": list(held.engine_pins),
            "blocks": held.blocks,
            "expires_in_s": max(held.expires - now, 0.0),
        }
        for held in control.pins.active(now)
    ]


def forget_lost(control: Control) -> None:
    """Drops pins of engines that are gone: a process that ended took its pins along."""
    for held in control.pins.active(control.clock()):
        for name in held.engine_pins:
            instance = held.instances[name]
            engine = control.fleet.engines.get(name)
            if engine is None or (engine.info is not None and engine.info.instance != instance):
                control.pins.forget_engine(name, partial(_is, held.pin_id))


def _is(pin_id: str, other: Pin) -> bool:
    return other.pin_id == pin_id


async def _pin_on(share: Share, ttl_s: float, part: Part, held: dict[str, str]) -> None:
    for target in share.targets:
        pinned = await share.engine.adapter.pin(target, ttl_s)
        part.done, part.total = pinned.blocks, pinned.blocks
        if pinned.blocks:
            held[share.engine.id] = pinned.pin_id
        else:
            await share.engine.adapter.unpin(pinned.pin_id)


def _instance(control: Control, engine_id: str) -> str:
    engine = control.fleet.engines.get(engine_id)
    return engine.info.instance if engine is not None and engine.info is not None else ""


async def _unpin_on(control: Control, own: str, part: Part, left: dict[str, str]) -> None:
    if part.engine in control.fleet.engines:
        await control.fleet.engine(part.engine).adapter.unpin(own)
    del left[part.engine]
