"""The fields of events on the wire, decoded in one pass.

A batch is msgpack `[ts, [event…], rank]`. An event is a map `{"type": …}` (vLLM from 0.24 on, SGLang from
0.5.21 on, and the embedded engine) or an array `[type, …]` (those before). Fields at their default may be
left out, and unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

# Larger batches are decoded event by event: one pass over them would block the event loop too long.
# Decoding this much takes about half a millisecond.
_ONE_PASS_BYTES = 16_384
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class MalformedEvents(ValueError):
    """The bytes are not a batch of KV events, or an event breaks the format. The text says how."""


class StoredFields(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Fields of stored blocks, in the order of the array form. keys.py and wire.py check those of type
    Any."""

    block_hashes: tuple[int | bytes, ...]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = msgspec.field(default_factory=list)
    block_size: int | None = None
    lora_id: Any = None
    medium: str | None = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    # SGLang's maps have these two. No array is as long.
    cache_salt: Any = None
    metadata: Any = None

    @property
    def size(self) -> int:
        """Tokens of a block, 0 where not given."""
        return self.block_size or 0


class RemovedFields(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Fields of removed blocks, in the order of the array form."""

    block_hashes: tuple[int | bytes, ...]
    medium: str | None = None
    group_idx: Any = None


class ClearedFields(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The whole cache was cleared."""


class _StoredArray(StoredFields, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(ClearedFields, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


Fields = StoredFields | RemovedFields | ClearedFields


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: msgspec.Raw


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: list[StoredFields | RemovedFields | ClearedFields]


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode
_batch = msgspec.msgpack.Decoder(_Batch).decode
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_map: Callable[[msgspec.Raw], Fields] = msgspec.msgpack.Decoder(
    StoredFields | RemovedFields | ClearedFields
).decode
_array: Callable[[msgspec.Raw], Fields] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
).decode


def decode_fields(payload: bytes) -> Iterable[Fields | None]:
    """The events of a batch, None for each that cannot be read. Raises MalformedEvents, at the latest with
    the first event, if the payload is not a batch."""
    if len(payload) <= _ONE_PASS_BYTES:
        try:
            return _maps(payload).events
        except _UNREADABLE:
            pass
        try:
            return _arrays(payload).events
        except _UNREADABLE:
            pass
    return _one_by_one(payload)


def _one_by_one(payload: bytes) -> Iterator[Fields | None]:
    """The events of a batch of any size, also with unreadable events among the others."""
    try:
        raws = _raws(_batch(payload).events)
    except _UNREADABLE as error:
        raise MalformedEvents(f"a batch is [ts, [event…], rank]: {error}") from error
    for raw in raws:
        yield _event(raw)


def _event(raw: msgspec.Raw) -> Fields | None:
    try:
        return _map(raw)
    except _UNREADABLE:
        pass
    try:
        return _array(raw)
    except _UNREADABLE:
        return None
