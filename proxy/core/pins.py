"""Pins: prefixes that operators protect from eviction until a given time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Pin:
    """One admin pin.

    Attributes:
        pin_id: its name at the proxy.
        engine_pins: engine id → that engine's own pin id.
        blocks: blocks protected, over all engines.
        expires: when it ends, in seconds of the caller's clock.
        label: the operator's description; never prompt text.
        first_block: hash of the first protected block; a flush that starts with it ends the pin.
        instances: engine id → the process that holds it; a restart ends the pin on that engine.
        last_block: hash of the last block of the prefix.
    """

    pin_id: str
    engine_pins: Mapping[str, str]
    blocks: int
    expires: float
    label: str
    first_block: int | None = None
    instances: Mapping[str, str] = field(default_factory=dict)
    last_block: int | None = None


class PinBook:
    """The active pins. When a pin expires, the book drops it, and each engine does so by itself.

    Attributes:
        listeners: called when pins come, or go before they expire.
    """

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self.listeners: list[Callable[[], None]] = []

    def add(self, pin: Pin) -> None:
        """Notes a pin."""
        self._pins[pin.pin_id] = pin
        self._tell()

    def take(self, pin_id: str, now: float) -> Pin | None:
        """Removes and returns a pin; None if there is none or it has expired."""
        self._expire(now)
        pin = self._pins.pop(pin_id, None)
        self._tell()
        return pin

    def active(self, now: float) -> tuple[Pin, ...]:
        """The pins that are active now."""
        self._expire(now)
        return tuple(self._pins.values())

    def forget_engine(self, engine: str, which: Callable[[Pin], bool] = lambda _pin: True) -> None:
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
