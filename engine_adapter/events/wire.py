"""KV events on the wire: vLLM's batches, which SGLang and the embedded engine send too.

A batch is msgpack `[ts, [event…], rank]`; an event is a map `{"type": …}` (vLLM from 0.24 on, SGLang from
0.5.21 on, and the embedded engine) or an array `[type, …]` in field order (those before). Fields at their
default may be left out. Each engine has its own reader for the keys beside a block's tokens: see keys.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_adapter.events.groups import KvGroups
from engine_adapter.events.keys import Fields, KeyReader, MalformedEvents, named_keys, read_named_keys
from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Tier,
    TokenIds,
)

_MEDIUM_OF = {Tier.GPU: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
_TIER_OF: dict[object, Tier] = {
    None: Tier.GPU,  # engines that leave it out mean the GPU
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}
_FIELDS = {  # order of the array form
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_NO_TOKENS: TokenIds[int] = array("i")
_HASHES = frozenset({int, bytes})
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_unpack_list = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The readable events of one batch, and the number of unreadable ones."""

    events: tuple[KvEvent, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that an engine holds, parents first, as of event batch `sequence` (-1: before the first)."""

    sequence: int
    events: tuple[KvEvent, ...]


class EventReader:
    """Reads the batches of one engine, in order.

    Attributes:
        groups: the KV cache groups of its model; events of other groups than the followed one are left out.
        skipped: events so far that could not be read.
    """

    def __init__(self, read_keys: KeyReader | None = None) -> None:
        """`read_keys` reads the keys beside the tokens; None reads the embedded engine's named keys."""
        self._read_keys = read_keys or read_named_keys
        self.groups = KvGroups()
        self.skipped = 0

    def read(self, payload: bytes) -> Iterator[KvEvent]:
        """The events of the batch whose last frame is `payload`, decoded one at a time. An unreadable event
        is skipped and counted.

        Raises:
            MalformedEvents: on the first event, if the payload is not a batch.
        """
        try:
            _, events, *_ = _unpack_list(payload)
            raw_events = _unpack_list(events)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MalformedEvents(f"a batch is [ts, [event…], rank]: {error}") from error
        for raw in raw_events:
            try:
                event = self._event(_unpack(raw))
            except (MalformedEvents, msgspec.MsgspecError, ValueError, RecursionError):
                self.skipped += 1
            else:
                if event is not None:
                    yield event

    def _event(self, raw: object) -> KvEvent | None:
        """The event, None if its group is not followed."""
        kind, fields = _kind_and_fields(raw)
        if kind == "BlockStored":
            return _stored(fields, self._read_keys) if self.groups.follows(fields) else None
        if kind == "BlockRemoved":
            if not self.groups.follows(fields):
                return None
            return BlocksRemoved(_tier(fields), _hashes(fields))
        if kind == "AllBlocksCleared":
            return CacheCleared()
        raise MalformedEvents(f"unknown event type {kind!r}")


def decode_batch(payload: bytes, read_keys: KeyReader | None = None) -> EventBatch:
    """One batch alone, read as `EventReader` reads it.

    Raises:
        MalformedEvents: the payload is not a batch.
    """
    reader = EventReader(read_keys)
    events = tuple(reader.read(payload))
    return EventBatch(events, reader.skipped)


def encode_batch(events: Sequence[KvEvent], *, timestamp: float) -> bytes:
    """One batch as the embedded engine publishes it. `timestamp` is in seconds since the epoch."""
    return _pack([timestamp, [event_fields(event) for event in events], 0])


def encode_snapshot(sequence: int, events: Sequence[KvEvent]) -> bytes:
    """`[seq, [event…]]`: what an engine holds as of batch `sequence` (-1: before the first)."""
    return _pack([sequence, [event_fields(event) for event in events]])


def decode_snapshot(payload: bytes) -> Snapshot:
    """Reads `encode_snapshot`'s bytes.

    Raises:
        MalformedEvents: the bytes are not a snapshot, or one of its events is unreadable.
    """
    batch = decode_batch(payload)
    sequence = _unpack(_unpack_list(payload)[0])
    if type(sequence) is not int:
        raise MalformedEvents("a snapshot is [seq, [event…]]")
    if batch.skipped:
        raise MalformedEvents(f"{batch.skipped} events of the snapshot cannot be read")
    return Snapshot(sequence, batch.events)


def event_fields(event: KvEvent) -> dict[str, Any]:
    """The map that stands for `event` on the wire.

    Raises:
        TypeError: for ViewLost and ViewCurrent, which readers make and engines never send.
    """
    if isinstance(event, BlocksStored):
        return _stored_fields(event)
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": _MEDIUM_OF[event.tier]}
    if isinstance(event, CacheCleared):
        return {"type": "AllBlocksCleared"}
    raise TypeError(f"{type(event).__name__} is not an event of an engine")


def _stored_fields(event: BlocksStored) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids.tolist(),
        "block_size": event.tokens_per_block,
        "medium": _MEDIUM_OF[event.tier],
    }
    keys = named_keys(event.extra_ids, event.salt, len(event.hashes), event.tokens_per_block)
    if keys is not None:
        fields["extra_keys"] = keys
    return fields


def _kind_and_fields(raw: object) -> tuple[object, Fields]:
    """Type and named fields of an event in either form."""
    if isinstance(raw, dict):
        return raw.get("type"), raw
    if isinstance(raw, list) and raw:
        kind = raw[0]
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        return kind, dict(zip(names, raw[1:], strict=False))
    raise MalformedEvents("an event is a map or an array that starts with its type")


def _stored(fields: Fields, read_keys: KeyReader) -> BlocksStored:
    tier, hashes, size = _tier(fields), _hashes(fields), fields.get("block_size")
    parent, raw_tokens = fields.get("parent_block_hash"), fields.get("token_ids")
    if parent is not None and type(parent) not in _HASHES:
        raise MalformedEvents("parent_block_hash is a block hash or nil")
    if not isinstance(raw_tokens, list):
        raise MalformedEvents("token_ids is a list of token ids")
    if not raw_tokens:
        # Offloaded blocks: the hashes name blocks stored earlier, and the other fields are empty.
        return BlocksStored(tier, parent, hashes, _NO_TOKENS, size if type(size) is int else 0)
    if type(size) is not int or size < 1:
        raise MalformedEvents("block_size is a positive integer")
    if len(raw_tokens) != size * len(hashes):
        raise MalformedEvents(f"{len(raw_tokens)} token ids for {len(hashes)} blocks of {size}")
    keys = read_keys(fields)
    if not keys.complete:
        return BlocksStored(tier, parent, hashes, _NO_TOKENS, size)
    token_ids = _tokens(raw_tokens) if keys.token_ids is None else keys.token_ids
    return BlocksStored(tier, parent, hashes, token_ids, size, keys.extra_ids, keys.salt, keys.lora)


def _tokens(raw: list[int]) -> TokenIds[int]:
    try:
        return array("i", raw)
    except (TypeError, OverflowError) as error:
        raise MalformedEvents(f"token_ids: {error}") from error


def _hashes(fields: Fields) -> tuple[int | bytes, ...]:
    raw = fields.get("block_hashes")
    if not isinstance(raw, list) or not set(map(type, raw)) <= _HASHES:
        raise MalformedEvents("block_hashes is a list of integers or bytes")
    return tuple(raw)


def _tier(fields: Fields) -> Tier:
    """Where the blocks lie."""
    medium = fields.get("medium")
    try:
        return _TIER_OF[medium] if medium is None else _TIER_OF[medium.upper()]
    except (AttributeError, KeyError) as error:
        raise MalformedEvents(f"unknown medium {medium!r}") from error
