"""The file of kvpin's state: its knowledge of caches, and pins.

first line   names the format; every change of it, or of how blocks are hashed, gets a new number
16 bytes     xxh3_128 of the rest
msgpack      Snapshot
"""

from __future__ import annotations

from typing import Self

import msgspec
import xxhash

from proxy.core.pins import Pin
from proxy.fleet.recall import EngineMemory

_HEAD = b"kvpin-state 1\n"
_DIGEST_BYTES = 16


class UnusableSnapshotError(Exception):
    """A snapshot cannot be used. The text says why."""


class KeptPin(msgspec.Struct, frozen=True):
    """See Pin. `expires` is in Unix time, as the clock of a process does not outlive it."""

    pin_id: str
    engine_pins: dict[str, str]
    blocks: int
    expires: float
    label: str
    first_block: int | None
    instances: dict[str, str]
    last_block: int | None = None

    @classmethod
    def of(cls, pin: Pin, clock_is_ahead_s: float) -> Self:
        """`clock_is_ahead_s`: Unix time less the time of the pin's clock."""
        return cls(
            pin.pin_id,
            dict(pin.engine_pins),
            pin.blocks,
            round(pin.expires + clock_is_ahead_s, 1),
            pin.label,
            pin.first_block,
            dict(pin.instances),
            pin.last_block,
        )

    def pin(self, clock_is_ahead_s: float) -> Pin:
        """The pin on another clock."""
        return Pin(
            self.pin_id,
            self.engine_pins,
            self.blocks,
            self.expires - clock_is_ahead_s,
            self.label,
            self.first_block,
            self.instances,
            self.last_block,
        )


class Snapshot(msgspec.Struct, frozen=True):
    """The state of one kvpin.

    Attributes:
        isolated: there are several tenants, each with a salt of its own.
        pins: the active pins.
        engines: the memory of each engine.
    """

    isolated: bool
    pins: list[KeptPin]
    engines: list[EngineMemory]


def encode(snapshot: Snapshot) -> bytes:
    """The file's bytes."""
    data = msgspec.msgpack.encode(snapshot)
    return _HEAD + xxhash.xxh3_128_digest(data) + data


def decode(data: bytes, *, isolated: bool) -> Snapshot:
    """Reads the file's bytes.

    Raises:
        UnusableSnapshotError: it is damaged, of another version, or of other tenants.
    """
    if not data.startswith(_HEAD):
        is_other = data.startswith(_HEAD.partition(b" ")[0])
        raise UnusableSnapshotError("another version of kvpin wrote it" if is_other else "it is damaged")
    body = data[len(_HEAD) + _DIGEST_BYTES :]
    if xxhash.xxh3_128_digest(body) != data[len(_HEAD) : len(_HEAD) + _DIGEST_BYTES]:
        raise UnusableSnapshotError("it is damaged")
    try:
        snapshot = msgspec.msgpack.decode(body, type=Snapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableSnapshotError("another version of kvpin wrote it") from error
    if snapshot.isolated != isolated:
        raise UnusableSnapshotError("there is one tenant now and were several, or the other way round")
    return snapshot
