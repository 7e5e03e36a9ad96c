"""The file of kvpin's state: its knowledge of caches, and pins.

first line   names the format; every change of it, or of how blocks are hashed, gets a new number
16 bytes     xxh3_128 of the rest
msgpack      SavedState
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import xxhash

from proxy.core.pins import Pin
from proxy.fleet.recall import EngineMemory

_HEAD = b"kvpin-state 1\n"
_DIGEST_BYTES = 16


class UnusableSnapshotError(Exception):
    """A snapshot cannot be used. The text says why."""


class SavedState(msgspec.Struct, frozen=True):
    """The state of one kvpin.

    Attributes:
        isolated: there are several tenants, each with a salt of its own.
        pins: the active pins. They expire in Unix time: the clock of a process does not outlive it.
    """

    isolated: bool
    pins: list[Pin]
    engines: list[EngineMemory]


def on_other_clock(pin: Pin, ahead_s: float) -> Pin:
    """The pin on a clock that is ahead of its own."""
    return replace(pin, expires=round(pin.expires + ahead_s, 1))


def encode(state: SavedState) -> bytes:
    """The file's bytes."""
    data = msgspec.msgpack.encode(state)
    return _HEAD + xxhash.xxh3_128_digest(data) + data


def decode(data: bytes, *, isolated: bool) -> SavedState:
    """Reads the file's bytes. Raises UnusableSnapshotError if it is damaged, of another version, or of other
    tenants."""
    if not data.startswith(_HEAD):
        is_other = data.startswith(_HEAD.partition(b" ")[0])
        raise UnusableSnapshotError("another version of kvpin wrote it" if is_other else "it is damaged")
    body = data[len(_HEAD) + _DIGEST_BYTES :]
    if xxhash.xxh3_128_digest(body) != data[len(_HEAD) : len(_HEAD) + _DIGEST_BYTES]:
        raise UnusableSnapshotError("it is damaged")
    try:
        state = msgspec.msgpack.decode(body, type=SavedState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableSnapshotError("another version of kvpin wrote it") from error
    if state.isolated != isolated:
        raise UnusableSnapshotError("there is one tenant now and were several, or the other way round")
    return state
