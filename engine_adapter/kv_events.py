"""KV events on the wire: vLLM's batches, and the embedded engine's, which are the same with typed keys.

A batch is msgpack `[ts, [event…], rank]`; an event is a map `{"type": …}` (vLLM from 0.24 on, and the
embedded engine) or an array `[type, …]` in field order (vLLM before). Fields at their default may be
left out. What an engine adds to a block's identity beyond tokens stands in `extra_keys`, one entry per
block. The embedded engine names each key; vLLM does not, so its adapter brings a reader of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    ExtraIds,
    KvEvent,
    Tier,
    TokenIds,
)

_MEDIUM_OF = {Tier.GPU: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
_TIER_OF = {medium: tier for tier, medium in _MEDIUM_OF.items()}
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
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_EXTRA_IDS, _CACHE_SALT = "extra_ids", "cache_salt"
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode

Fields = Mapping[str, Any]


class MalformedEvents(ValueError):
    """Bytes that are not a batch of KV events, or an event that breaks the format; says what is wrong."""


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """What a reader of `extra_keys` found: extra ids of the run (None when all are 0) and its salt."""

    extra_ids: ExtraIds[int] | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one batch that could be read, and the number of those that could not."""

    events: tuple[KvEvent, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that an engine holds, parents first, as of event batch `sequence` (-1: before the first)."""

    sequence: int
    events: tuple[KvEvent, ...]


KeyReader = Callable[[Fields], BlockKeys]


def encode_batch(events: Sequence[KvEvent], *, timestamp: float) -> bytes:
    """One batch as the embedded engine publishes it. `timestamp` is in seconds since the epoch."""
    return _pack([timestamp, [event_fields(event) for event in events], 0])


def event_fields(event: KvEvent) -> dict[str, Any]:
    """The map that stands for `event` on the wire.

    Raises:
        TypeError: for ViewLost and ViewCurrent, which are a reader's own and never travel.
    """
    if isinstance(event, BlocksStored):
        return _stored_fields(event)
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": _MEDIUM_OF[event.tier]}
    if isinstance(event, CacheCleared):
        return {"type": "AllBlocksCleared"}
    raise TypeError(f"{type(event).__name__} is not an event of an engine")


def decode_batch(payload: bytes, read_keys: KeyReader | None = None) -> EventBatch:
    """The events of a batch, in order; an event that cannot be read is skipped and counted.

    Args:
        payload: the last frame of the message.
        read_keys: how `extra_keys` are to be understood; the embedded engine's named keys if None.

    Raises:
        MalformedEvents: when the payload as a whole is no batch.
    """
    try:
        batch = _unpack(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedEvents(f"not msgpack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):  # noqa: PLR2004
        raise MalformedEvents("a batch is [ts, [event…], rank]")
    return decode_events(batch[1], read_keys)


def encode_snapshot(sequence: int, events: Sequence[KvEvent]) -> bytes:
    """`[seq, [event…]]`: what an engine holds as of batch `sequence` (-1: before the first)."""
    return _pack([sequence, [event_fields(event) for event in events]])


def decode_snapshot(payload: bytes) -> Snapshot:
    """Reads `encode_snapshot`'s bytes.

    Raises:
        MalformedEvents: when they are none, or hold an event that cannot be read.
    """
    try:
        parts = _unpack(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedEvents(f"not msgpack: {error}") from error
    match parts:
        case [int(sequence), list(raw_events)]:
            batch = decode_events(raw_events)
        case _:
            raise MalformedEvents("a snapshot is [seq, [event…]]")
    if batch.skipped:
        raise MalformedEvents(f"{batch.skipped} events of the snapshot cannot be read")
    return Snapshot(sequence, batch.events)


def decode_events(raw_events: Sequence[object], read_keys: KeyReader | None = None) -> EventBatch:
    """As `decode_batch`, from events already unpacked."""
    events: list[KvEvent] = []
    skipped = 0
    for raw in raw_events:
        try:
            events.append(_decode_event(raw, read_keys or read_named_keys))
        except MalformedEvents:
            skipped += 1
    return EventBatch(tuple(events), skipped)


def read_named_keys(fields: Fields) -> BlockKeys:
    """Reads the embedded engine's `extra_keys`: per block nil or `[[name, value]…]`.

    Raises:
        MalformedEvents: for a key it does not know. A block under an unknown key must not pass for
            plain text: another prompt would be routed to KV that is not its own.
    """
    per_block = fields.get("extra_keys")
    if per_block is None:
        return BlockKeys()
    block_bytes = 8 * fields["block_size"]
    if not isinstance(per_block, list) or len(per_block) != len(fields["block_hashes"]):
        raise MalformedEvents("extra_keys needs one entry per block")
    if not any(per_block):
        return BlockKeys()
    pieces: list[bytes] = []
    salt: str | None = None
    for index, keys in enumerate(per_block):
        piece, block_salt = _block_keys(keys, block_bytes)
        pieces.append(piece or bytes(block_bytes))
        if block_salt is not None:
            if index:
                raise MalformedEvents("cache_salt stands on the first block only")
            salt = block_salt
    joined = b"".join(pieces)
    return BlockKeys(array("Q", joined) if any(joined) else None, salt)


def _block_keys(keys: object, block_bytes: int) -> tuple[bytes | None, str | None]:
    """Extra-id bytes and salt of one block."""
    if keys is None:
        return None, None
    if not isinstance(keys, list):
        raise MalformedEvents("the keys of a block are a list")
    extra_ids: bytes | None = None
    salt: str | None = None
    for key in keys:
        match key:
            case [str(name), bytes(value)] if name == _EXTRA_IDS and len(value) == block_bytes:
                extra_ids = value
            case [str(name), str(value)] if name == _CACHE_SALT:
                salt = value
            case _:
                raise MalformedEvents("an extra key of an unknown kind")
    return extra_ids, salt


def _decode_event(raw: object, read_keys: KeyReader) -> KvEvent:
    kind, fields = _kind_and_fields(raw)
    if kind == "BlockStored":
        return _stored(fields, read_keys)
    if kind == "BlockRemoved":
        return BlocksRemoved(_tier(fields), _hashes(fields))
    if kind == "AllBlocksCleared":
        return CacheCleared()
    raise MalformedEvents(f"unknown event type {kind!r}")


def _kind_and_fields(raw: object) -> tuple[object, dict[str, Any]]:
    """Type and named fields of an event in either form."""
    if isinstance(raw, dict):
        return raw.get("type"), raw
    if isinstance(raw, list) and raw:
        kind = raw[0]
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        return kind, dict(zip(names, raw[1:], strict=False))
    raise MalformedEvents("an event is a map or an array that starts with its type")


def _stored(fields: dict[str, Any], read_keys: KeyReader) -> BlocksStored:
    hashes = _hashes(fields)
    size = fields.get("block_size")
    if type(size) is not int or size < 1:
        raise MalformedEvents("block_size is a positive integer")
    token_ids = _tokens(fields.get("token_ids"))
    # vLLM's native offload may leave the tokens out: the hashes then name blocks stored before.
    if token_ids and len(token_ids) != size * len(hashes):
        raise MalformedEvents(f"{len(token_ids)} token ids for {len(hashes)} blocks of {size}")
    parent = fields.get("parent_block_hash")
    if parent is not None and not _is_hash(parent):
        raise MalformedEvents("parent_block_hash is a block hash or nil")
    keys = read_keys(fields)
    return BlocksStored(_tier(fields), parent, hashes, token_ids, size, keys.extra_ids, keys.salt)


def _tokens(raw: object) -> TokenIds[int]:
    if not isinstance(raw, list):
        raise MalformedEvents("token_ids is a list of token ids")
    try:
        return array("i", raw)
    except (TypeError, OverflowError) as error:
        raise MalformedEvents(f"token_ids: {error}") from error


def _hashes(fields: Fields) -> tuple[int | bytes, ...]:
    raw = fields.get("block_hashes")
    if not isinstance(raw, list) or not all(map(_is_hash, raw)):
        raise MalformedEvents("block_hashes is a list of integers or bytes")
    return tuple(raw)


def _is_hash(value: object) -> bool:
    return type(value) in (int, bytes)


def _tier(fields: Fields) -> Tier:
    """Where the blocks lie; an engine that leaves `medium` out means its GPU."""
    medium = fields.get("medium")
    if medium is None:
        return Tier.GPU
    tier = _TIER_OF.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise MalformedEvents(f"unknown medium {medium!r}")
    return tier


def _stored_fields(event: BlocksStored) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids.tolist(),
        "block_size": event.tokens_per_block,
        "medium": _MEDIUM_OF[event.tier],
    }
    keys = _named_keys(event)
    if keys is not None:
        fields["extra_keys"] = keys
    return fields


def _named_keys(event: BlocksStored) -> list[list[list[str | bytes]] | None] | None:
    """`extra_keys` of a run, None when it has none."""
    if event.extra_ids is None and event.salt is None:
        return None
    per_block: list[list[list[str | bytes]] | None] = [None] * len(event.hashes)
    if event.extra_ids is not None:
        data, step = event.extra_ids.tobytes(), 8 * event.tokens_per_block
        for index in range(len(event.hashes)):
            piece = data[index * step : (index + 1) * step]
            if any(piece):
                per_block[index] = [[_EXTRA_IDS, piece]]
    if event.salt is not None and per_block:
        per_block[0] = [*(per_block[0] or []), [_CACHE_SALT, event.salt]]
    return per_block
