"""What is to be kept: the wishes of clients, and the pins of operators.

A request says how long it wants its KV kept, in the fields of OpenAI's and Anthropic's clients:

    OpenAI      prompt_cache_options.ttl "30m" | "12h" · prompt_cache_retention "24h", not "in_memory"
                prompt_cache_breakpoint {"mode": "explicit", "ttl": …} on any part of messages or input
    Anthropic   cache_control {"type": "ephemeral", "ttl": "5m" | "1h"}, on the request or any part of it

The longest time counts, for the whole prompt. The fields go to the engine unchanged. A wish that cannot be
read is refused: its client would wait for KV that nobody keeps.

A pin protects a prefix from eviction until a given time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from engine_adapter.body import JsonBody
from engine_adapter.types import Retention
from proxy.errors import BadRequest

PRIORITY = 1  # above the priority of requests that ask for nothing, and the same for all clients
MAX_TTL_S = 86_400.0  # no API offers more than a day
EPHEMERAL_S = 300.0  # Anthropic's default, if a client names no time
BREAKPOINT_S = 1800.0  # OpenAI's default for a breakpoint

_DURATION = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NOT_KEPT = ("in_memory", "in-memory")
_SHOWN = 40  # characters of a wrong value that its error repeats
_OPTIONS, _RETENTION, _MARK = "prompt_cache_options", "prompt_cache_retention", "prompt_cache_breakpoint"
_CACHE_CONTROL, _PROMPT_CACHE, _BREAKPOINT = b"cache_control", b"prompt_cache_", _MARK.encode()
# Fields that have parts with such marks. Clients that translate put `cache_control` in chats, too.
_PARTS = ("system", "messages", "tools", "input")
_WITHIN = ("content", "output")  # fields of a part that have parts

_Path: TypeAlias = "tuple[_Path | None, str | int]"
"""The place of a field: the path before it, and its name, or its index in a list."""


def may_ask(body: JsonBody) -> bool:
    """False if a request has no field that `retention_of` would read."""
    return not body.is_plain and (_CACHE_CONTROL in body.raw or _PROMPT_CACHE in body.raw)


def retention_of(body: JsonBody, owner: str | None = None) -> Retention:
    """The retention that a request asks for, on behalf of `owner`; priority 0 if it asks for nothing. Looks
    at all values of messages and tools. Raises BadRequest that names the field of a wish that cannot be
    read."""
    asked = [seconds for seconds in _asked(body) if seconds is not None] if may_ask(body) else []
    if not asked:
        return Retention(owner=owner)
    return Retention(PRIORITY, min(max(asked), MAX_TTL_S), owner)


def _asked(body: JsonBody) -> Iterator[float | None]:
    options, at = body.hint(_OPTIONS), (None, _OPTIONS)
    ttl = _seconds(_field(options, "ttl", at), (at, "ttl"))
    yield ttl
    kept = body.hint(_RETENTION)
    yield None if kept in _NOT_KEPT else _seconds(kept, (None, _RETENTION))
    # Reading the messages takes as long as the rest of the parsing, and most requests have no such field.
    if _CACHE_CONTROL in body.raw or _BREAKPOINT in body.raw:
        yield _ephemeral(body.hint("cache_control"), (None, "cache_control"))
        for name in _PARTS:
            yield from _of_parts(body.hint(name), (None, name), ttl or BREAKPOINT_S)


def _of_parts(parts: Any, at: _Path, breakpoint_s: float) -> Iterator[float | None]:  # noqa: ANN401 - JSON
    """The times of messages, of their blocks, and of the blocks of tool results. `breakpoint_s` is that of a
    breakpoint without its own."""
    stack = [(parts, at)]
    while stack:
        part, at = stack.pop()
        if isinstance(part, list):
            stack.extend((each, (at, index)) for index, each in enumerate(part))
        elif isinstance(part, dict):
            yield _ephemeral(part.get("cache_control"), (at, "cache_control"))
            yield _explicit(part.get(_MARK), (at, _MARK), breakpoint_s)
            stack.extend((part[name], (at, name)) for name in _WITHIN if name in part)


def _explicit(mark: Any, at: _Path, default_s: float) -> float | None:  # noqa: ANN401 - JSON
    if _field(mark, "mode", at) != "explicit":
        return None
    return _seconds(mark["ttl"], (at, "ttl")) if "ttl" in mark else default_s


def _ephemeral(control: Any, at: _Path) -> float | None:  # noqa: ANN401 - JSON
    kind = _field(control, "type", at)
    if control is None:
        return None
    if kind != "ephemeral":
        raise _refusal((at, "type"), kind, "the only type is 'ephemeral'")
    return _seconds(control["ttl"], (at, "ttl")) if "ttl" in control else EPHEMERAL_S


def _field(value: Any, name: str, at: _Path) -> Any:  # noqa: ANN401 - JSON
    """A field of an object; None if there is no object, or it has no such field."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _refusal(at, value, "it must be an object")
    return value.get(name)


def _seconds(value: Any, at: _Path) -> float | None:  # noqa: ANN401 - JSON
    """A duration as these APIs write it, or a number of seconds; None if there is none."""
    given = value
    if isinstance(value, str):
        written = _DURATION.fullmatch(value)
        value = int(written[1]) * _UNITS[written[2]] if written else 0
    if given is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise _refusal(at, given, "write a time as '30m' or '12h', or as seconds")
    return float(min(value, MAX_TTL_S))


def _refusal(at: _Path, value: Any, rule: str) -> BadRequest:  # noqa: ANN401 - JSON
    """The error about a wish that cannot be read."""
    field = _written(at)
    return BadRequest(f"{field} is {repr(value)[:_SHOWN]}: {rule}", param=field)


def _written(at: _Path) -> str:
    """A path as clients write it: `messages[0].content[1]`."""
    steps: list[str | int] = []
    before: _Path | None = at
    while before is not None:
        before, step = before
        steps.append(step)
    written = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in reversed(steps))
    return "".join(written).removeprefix(".")


# --- pins ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdminPin:
    """One admin pin."""

    pin_id: str  # its name at the proxy
    engine_pins: Mapping[str, str]  # engine id → that engine's own pin id
    blocks: int  # blocks protected, over all engines
    expires: float  # when it ends, in seconds of the caller's clock
    label: str  # the operator's description; never prompt text
    # Hash of the first protected block; a flush that starts with it ends the pin.
    first_block: int | None = None
    # Engine id → the process that holds it; a restart ends the pin on that engine.
    instances: Mapping[str, str] = field(default_factory=dict)
    last_block: int | None = None  # hash of the last block of the prefix
    salt: str | None = None  # the cache salt of its KV; a flush of that salt ends the pin


class PinBook:
    """The active pins. When a pin expires, the book drops it, and each engine does so by itself."""

    def __init__(self) -> None:
        self._pins: dict[str, AdminPin] = {}
        self.listeners: list[Callable[[], None]] = []  # called when pins come, or go before they expire

    def add(self, pin: AdminPin) -> None:
        """Notes a pin."""
        self._pins[pin.pin_id] = pin
        self._tell()

    def take(self, pin_id: str, now: float) -> AdminPin | None:
        """Removes and returns a pin; None if there is none or it has expired."""
        self._expire(now)
        pin = self._pins.pop(pin_id, None)
        self._tell()
        return pin

    def active(self, now: float) -> tuple[AdminPin, ...]:
        """The pins that are active now."""
        self._expire(now)
        return tuple(self._pins.values())

    def forget_engine(self, engine: str, which: Callable[[AdminPin], bool] = lambda _pin: True) -> None:
        """The engine lost its KV, and with it those of its pins that `which` selects; all by default."""
        for pin in list(self._pins.values()):
            if engine in pin.engine_pins and which(pin):
                rest = {e: p for e, p in pin.engine_pins.items() if e != engine}
                if rest:
                    self._pins[pin.pin_id] = replace(pin, engine_pins=rest)
                else:
                    del self._pins[pin.pin_id]
                self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()

    def _expire(self, now: float) -> None:
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.expires <= now]:
            del self._pins[pin_id]
