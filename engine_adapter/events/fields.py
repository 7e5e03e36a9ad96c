"""The fields of KV events on the wire, and what the keys beside a block's tokens mean in each engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.prompt.extra_ids import extra_id, mark_media
from engine_adapter.types import ExtraIds, MediaSpan, TokenIds, token_array

# --- the fields of events on the wire, decoded in one pass ----------------------------------------------
# A batch is msgpack `[ts, [event…], rank]`. An event is a map `{"type": …}` (vLLM from 0.24 on, SGLang from
# 0.5.21 on, and the embedded engine) or an array `[type, …]` (those before). Fields at their default may be
# left out, and unknown fields are ignored.

# Larger batches are decoded event by event: one pass over them would block the event loop too long.
# Decoding this much takes about half a millisecond.
_ONE_PASS_BYTES = 16_384
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class MalformedEvents(ValueError):
    """The bytes are not a batch of KV events, or an event breaks the format. The text says how."""


class StoredFields(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Fields of stored blocks, in the order of the array form. Readers and wire.py check those of type
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


# --- reads the keys beside a stored block's tokens, which each engine writes in its own way -------------
# A reader turns an event's fields into extra ids, cache salt and LoRA name. An unknown key makes the event
# unreadable: indexed as plain text, its blocks would match prompts that they do not belong to. Where the
# format is ambiguous, readers choose so that at worst a prediction is missing.

_EXTRA_IDS, _CACHE_SALT = "extra_ids", "cache_salt"


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The keys of a run of blocks.

    Attributes:
        extra_ids: one per token, None when all are 0.
        salt: cache salt of the chain.
        lora: name of its LoRA adapter.
        token_ids: the tokens, where they had to be rewritten.
        complete: False if the event leaves its keys out. Its hashes then name blocks that were stored
            earlier, and its tokens must not be indexed.
    """

    extra_ids: ExtraIds[int] | None = None
    salt: str | None = None
    lora: str | None = None
    token_ids: TokenIds[int] | None = None
    complete: bool = True


# Reads the keys of `len(block_hashes)` blocks of `block_size` tokens.
KeyReader = Callable[[StoredFields], BlockKeys]

_TEXT = BlockKeys()
_INCOMPLETE = BlockKeys(complete=False)


# --- the embedded engine ---------------------------------------------------------------------------


def read_named_keys(fields: StoredFields) -> BlockKeys:
    """Reads the embedded engine's `extra_keys`: per block nil or `[[name, value]…]`. Raises MalformedEvents
    for an unknown key."""
    per_block = _per_block(fields)
    if not any(per_block):
        return _TEXT
    pieces = [bytes(8 * fields.size)] * len(per_block)
    salt: str | None = None
    for index, keys in enumerate(per_block):
        for key in keys:
            match key:
                case [str(name), bytes(value)] if name == _EXTRA_IDS and len(value) == len(pieces[index]):
                    pieces[index] = value
                case [str(name), str(value)] if name == _CACHE_SALT:
                    if index:
                        raise MalformedEvents("cache_salt stands on the first block only")
                    salt = value
                case _:
                    raise MalformedEvents("an extra key of an unknown kind")
    joined = b"".join(pieces)
    return BlockKeys(array("Q", joined) if any(joined) else None, salt)


def named_keys(
    extra_ids: ExtraIds[int] | None, salt: str | None, blocks: int, tokens_per_block: int
) -> list[list[list[str | bytes]] | None] | None:
    """`extra_keys` of a run, in the form that `read_named_keys` reads; None when it has none."""
    if extra_ids is None and salt is None:
        return None
    per_block: list[list[list[str | bytes]] | None] = [None] * blocks
    if extra_ids is not None:
        data, step = extra_ids.tobytes(), 8 * tokens_per_block
        for index in range(blocks):
            piece = data[index * step : (index + 1) * step]
            if any(piece):
                per_block[index] = [[_EXTRA_IDS, piece]]
    if salt is not None and per_block:
        per_block[0] = [*(per_block[0] or []), [_CACHE_SALT, salt]]
    return per_block


# --- vLLM ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    """The keys found so far in the blocks of a run; positions count tokens of the run."""

    media: list[MediaSpan] = field(default_factory=list)
    embeds: list[tuple[int, bytes]] = field(default_factory=list)
    salt: str | None = None


def read_vllm_keys(fields: StoredFields) -> BlockKeys:
    """Reads vLLM's `extra_keys`: per block nil or, without names and in this order, the LoRA adapter's
    name, an `[identifier, offset]` for each multimodal item in it, the cache salt, and a digest of prompt
    embeddings.

    The position says what a key is. A string is the LoRA adapter only if it comes first and equals the
    event's `lora_name`. It is the salt only in the first block of a prompt. Older versions of vLLM, without
    offsets, sent items as bare strings: these are unreadable, except that a single one in the first block
    reads as a salt that no request has. Raises MalformedEvents for a key in an unexpected place, and for a
    LoRA adapter without its name."""
    lora = fields.lora_name
    if fields.extra_keys is None and (fields.medium or "GPU").upper() != "GPU":
        # Events of offloaded blocks leave the keys out, also of salted blocks.
        return _INCOMPLETE
    if lora is None and fields.lora_id is not None:
        raise MalformedEvents("a LoRA adapter without its name")
    if lora is not None and not isinstance(lora, str):
        raise MalformedEvents("lora_name is a string")
    per_block = _per_block(fields)
    if not any(per_block):
        return BlockKeys(lora=lora) if lora is not None else _TEXT
    size = fields.size
    begins = fields.parent_block_hash is None
    found = _Found()
    for index, keys in enumerate(per_block):
        _read_block(keys, found, index * size, size, lora=lora, first=begins and index == 0)
    return BlockKeys(mark_media(size * len(per_block), found.media, found.embeds), found.salt, lora)


def _read_block(
    keys: Sequence[object], found: _Found, start: int, size: int, *, lora: str | None, first: bool
) -> None:
    """One block that begins at token `start`; `first` of a prompt."""
    salted = False
    for at, key in enumerate(keys):
        match key:
            case str() if at == 0 and lora is not None:
                if key != lora:
                    raise MalformedEvents("the first key of a LoRA adapter's block is its name")
            case str() if first and key and not salted:
                found.salt, salted = key, True
            case [str(identity), int(offset)] if offset < size and not salted:
                # Below 0 the item began in an earlier block, which has its marker.
                if offset >= 0:
                    found.media.append(MediaSpan(identity, start + offset, 1))
            case bytes() if at == len(keys) - 1:
                found.embeds.append((start, key))
            case _:
                raise MalformedEvents("an extra key that is in no place it could be in")


# --- SGLang ----------------------------------------------------------------------------------------


def read_sglang_keys(fields: StoredFields) -> BlockKeys:
    """Reads SGLang's fields: `lora_name`, `cache_salt` (in `metadata` before 0.5.21) and the tokens. Tokens
    of images, audio and video are numbers up to 2**62, made from the item's hash. Raises MalformedEvents for
    keys of another engine, and for a token beyond 64 bits."""
    lora, salt, metadata = fields.lora_name, fields.cache_salt, fields.metadata
    if isinstance(lora, dict):  # the array form of 0.5.18 to 0.5.20 has metadata in this place
        lora, metadata = None, lora
    if isinstance(metadata, dict):
        salt = metadata.get("cache_salt", salt)
    if fields.extra_keys is not None:
        raise MalformedEvents("SGLang's events have no extra_keys")
    if lora is None and fields.lora_id is not None:
        raise MalformedEvents("a LoRA adapter without its name")
    if not isinstance(lora, str | None) or not isinstance(salt, str | None):
        raise MalformedEvents("lora_name and cache_salt are strings")
    token_ids, extra_ids = narrow_tokens(fields.token_ids)
    return BlockKeys(extra_ids, salt or None, lora or None, token_ids)


def narrow_tokens(raw: Sequence[int]) -> tuple[TokenIds[int], ExtraIds[int] | None]:
    """Token ids as int32, and extra ids or None. A number beyond int32, such as SGLang's pad values for
    multimodal items, becomes token 0 with that number's extra id. Raises MalformedEvents if a value is not a
    64-bit integer."""
    try:
        return token_array(raw), None
    except OverflowError:
        pass
    try:
        wide = array("q", raw)
    except OverflowError as error:
        raise MalformedEvents(f"token_ids: {error}") from error
    known: dict[int, int] = {}
    token_ids, extra_ids = array("i", bytes(4 * len(wide))), array("Q", bytes(8 * len(wide)))
    for at, value in enumerate(wide):
        if -(2**31) <= value < 2**31:
            token_ids[at] = value
        else:
            marker = known.get(value)
            if marker is None:
                marker = known[value] = extra_id("media", value.to_bytes(8, "little", signed=True))
            extra_ids[at] = marker
    return token_ids, extra_ids


def _per_block(fields: StoredFields) -> list[list[object]]:
    """The keys of each block; [] when no block has any."""
    raw = fields.extra_keys
    if raw is None:
        return []
    if not isinstance(raw, list) or len(raw) != len(fields.block_hashes):
        raise MalformedEvents("extra_keys needs one entry per block")
    if not any(raw):
        return []
    per_block = [[] if keys is None else keys for keys in raw]
    if not all(isinstance(keys, list) for keys in per_block):
        raise MalformedEvents("the keys of a block are a list")
    return per_block
