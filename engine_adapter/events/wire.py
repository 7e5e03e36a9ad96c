"""KV events on the wire ⇄ typed events. vLLM, SGLang and the embedded engine send the same batches.

fields.py decodes a batch. Each engine has its own reader there for the keys beside a block's tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_adapter.events.fields import (
    Fields,
    KeyReader,
    MalformedEvents,
    RemovedFields,
    StoredFields,
    decode_fields,
    named_keys,
    read_named_keys,
)
from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvGroup,
    Tier,
    TokenIds,
    token_array,
)

_MEDIUM_OF = {Tier.GPU: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
_TIER_OF: dict[str | None, Tier] = {
    None: Tier.GPU,  # engines that leave it out mean the GPU
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}
# Joined events have about as many blocks at most.
_JOINED_BLOCKS = 64
_NO_TOKENS: TokenIds[int] = array("i")
_pack = msgspec.msgpack.Encoder().encode
_unpack_snapshot = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All that an engine holds, parents first, as of event batch `sequence` (-1: before the first)."""

    sequence: int
    events: tuple[KvEvent, ...]


class EventReader:
    """Reads the batches of one engine, in order. `groups`: the KV cache groups of its model; `skipped`:
    events so far that could not be read."""

    def __init__(self, read_keys: KeyReader | None = None) -> None:
        """`read_keys` reads the keys beside the tokens; None reads the embedded engine's named keys."""
        self._read_keys = read_keys or read_named_keys
        self.groups = ReportedGroups()
        self.skipped = 0

    def read(self, payload: bytes) -> Iterator[KvEvent]:
        """The events of the batch whose last frame is `payload`. An unreadable event is skipped and counted.
        Events of blocks that belong together are joined. Raises MalformedEvents on the first event if the
        payload is not a batch."""
        before: KvEvent | None = None
        for event in self._events(payload):
            joined = None
            if before is not None:
                joined = _join(before, event)
                if joined is None:
                    yield before
            before = joined or event
        if before is not None:
            yield before

    def _events(self, payload: bytes) -> Iterator[KvEvent]:
        for fields in decode_fields(payload):
            try:
                event = self._event(fields)
            except MalformedEvents:
                self.skipped += 1
            else:
                yield event

    def _event(self, fields: Fields | None) -> KvEvent:
        if isinstance(fields, StoredFields):
            group = self.groups.group_of(fields)
            if group is None:
                return _stored(fields, self._read_keys)
            # Their names say which: the event has the tokens of the whole range, but no names of blocks that
            # the group left out, such as those before its window.
            tier, parent = _tier(fields.medium), fields.parent_block_hash
            return BlocksStored(tier, parent, fields.block_hashes, _NO_TOKENS, fields.size, group=group)
        if isinstance(fields, RemovedFields):
            return BlocksRemoved(_tier(fields.medium), fields.block_hashes, self.groups.group_of(fields))
        if fields is None:
            raise MalformedEvents("an event of an unknown type or form")
        return CacheCleared()


def _join(first: KvEvent, second: KvEvent) -> KvEvent | None:
    """One event that means the same as two; None if there is none.

    vLLM sends an event for each block that it evicts, SGLang one for each page that it stores or evicts."""
    if isinstance(first, BlocksRemoved) and isinstance(second, BlocksRemoved):
        if (first.tier, first.group) == (second.tier, second.group) and len(first.hashes) < _JOINED_BLOCKS:
            return BlocksRemoved(first.tier, first.hashes + second.hashes, first.group)
    elif isinstance(first, BlocksStored) and isinstance(second, BlocksStored) and _continues(first, second):
        names, token_ids = first.hashes + second.hashes, first.token_ids + second.token_ids
        tier, size = first.tier, first.tokens_per_block
        return BlocksStored(
            tier, first.parent, names, token_ids, size, None, first.salt, first.lora, first.group
        )
    return None


def _continues(first: BlocksStored, second: BlocksStored) -> bool:
    """True if the second run of blocks follows the first, with the same keys. A run that begins a prompt
    stays alone: vLLM may report reuse with it."""
    return (
        first.parent is not None
        and 0 < len(first.hashes) < _JOINED_BLOCKS
        and second.parent == first.hashes[-1]
        and second.tokens_per_block == first.tokens_per_block
        and second.tier is first.tier
        and first.per_chunk == second.per_chunk == 1
        and first.extra_ids is second.extra_ids is None
        and (second.salt, second.lora) == (first.salt, first.lora)
        and bool(first.token_ids and second.token_ids)
    )


def encode_batch(events: Sequence[KvEvent], *, timestamp: float) -> bytes:
    """One batch as the embedded engine publishes it. `timestamp` is in seconds since the epoch."""
    return _pack([timestamp, [event_fields(event) for event in events], 0])


def encode_snapshot(sequence: int, events: Sequence[KvEvent]) -> bytes:
    """`[seq, [event…]]`: what an engine holds as of batch `sequence` (-1: before the first)."""
    return _pack([sequence, [event_fields(event) for event in events]])


def decode_snapshot(payload: bytes) -> CacheSnapshot:
    """Reads `encode_snapshot`'s bytes. Raises MalformedEvents if the bytes are not a snapshot, or one of its
    events is unreadable."""
    reader = EventReader()
    events = tuple(reader.read(payload))
    try:
        sequence, _ = _unpack_snapshot(payload)
    except msgspec.MsgspecError as error:
        raise MalformedEvents(f"a snapshot is [seq, [event…]]: {error}") from error
    if reader.skipped:
        raise MalformedEvents(f"{reader.skipped} events of the snapshot cannot be read")
    return CacheSnapshot(sequence, events)


def event_fields(event: KvEvent) -> dict[str, Any]:
    """The map that stands for `event` on the wire. Raises TypeError for ViewLost and ViewCurrent, which
    readers make and engines never send."""
    if isinstance(event, BlocksStored):
        keys = named_keys(event.extra_ids, event.salt, len(event.hashes), event.tokens_per_block)
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.token_ids.tolist(),
            "block_size": event.tokens_per_block,
            "medium": _MEDIUM_OF[event.tier],
            **({} if keys is None else {"extra_keys": keys}),
        }
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": _MEDIUM_OF[event.tier]}
    if isinstance(event, CacheCleared):
        return {"type": "AllBlocksCleared"}
    raise TypeError(f"{type(event).__name__} is not an event of an engine")


def _stored(fields: StoredFields, read_keys: KeyReader) -> BlocksStored:
    tier, parent, hashes = _tier(fields.medium), fields.parent_block_hash, fields.block_hashes
    size, tokens = fields.size, fields.token_ids
    if not tokens:
        # Offloaded blocks: the hashes name blocks stored earlier, and the other fields are empty.
        return BlocksStored(tier, parent, hashes, _NO_TOKENS, size)
    if size < 1:
        raise MalformedEvents("block_size is a positive integer")
    if len(tokens) != size * len(hashes):
        raise MalformedEvents(f"{len(tokens)} token ids for {len(hashes)} blocks of {size}")
    keys = read_keys(fields)
    # Below the GPU, only vLLM's offloading connector names a kind: each of its events is a chunk.
    per_chunk = len(hashes) if tier is not Tier.GPU and fields.kv_cache_spec_kind is not None else 1
    if not keys.complete:
        return BlocksStored(tier, parent, hashes, _NO_TOKENS, size, per_chunk=per_chunk)
    try:
        token_ids = token_array(tokens) if keys.token_ids is None else keys.token_ids
    except OverflowError as error:
        raise MalformedEvents(f"token_ids: {error}") from error
    return BlocksStored(
        tier, parent, hashes, token_ids, size, keys.extra_ids, keys.salt, keys.lora, per_chunk=per_chunk
    )


def _tier(medium: str | None) -> Tier:
    tier = _TIER_OF.get(medium) or _TIER_OF.get(medium and medium.upper())
    if tier is None:
        raise MalformedEvents(f"unknown medium {medium!r}")
    return tier


# Names that vLLM gives the groups' kinds (vllm/v1/kv_cache_interface.py).
_ATTENTION = {
    "full_attention": Attention.PREFIX,
    "mla_attention": Attention.PREFIX,
    "sink_full_attention": Attention.PREFIX,
    "sliding_window": Attention.WINDOW,
    "sliding_window_mla": Attention.WINDOW,
    "chunked_local_attention": Attention.CHUNK,
    "mamba": Attention.STATE,
}
_WITH_WINDOW = (Attention.WINDOW, Attention.CHUNK)
NOT_FOLLOWED = KvGroup(-1, Attention.UNKNOWN)
"""The group of an event that belongs to no known group."""


class ReportedGroups:
    """The KV cache groups that one engine's events have shown.

    The first group with full attention is the main one: its events are those of a model with one group.

    Attributes:
        main: number of the main group; None before its first event.
        others: the further groups, by number.
    """

    def __init__(self) -> None:
        self.main: int | None = None
        self.others: dict[int, KvGroup] = {}

    @property
    def are_known(self) -> bool:
        """True if it is known of each group what it must hold, and one of them has full attention."""
        if self.others and self.main is None:
            return False
        return all(group.attention is not Attention.UNKNOWN for group in self.others.values())

    def group_of(self, fields: StoredFields | RemovedFields) -> KvGroup | None:
        """The event's group; None for the main one, and for engines that name no groups.

        A store says what kind its group is; a removal has only the group's number."""
        number = fields.group_idx
        if number is None or number == self.main:
            return None
        if not isinstance(number, int):
            return NOT_FOLLOWED
        known = self.others.get(number)
        if known is not None or not isinstance(fields, StoredFields):
            return known or NOT_FOLLOWED
        attention = _attention(fields)
        if attention is Attention.PREFIX and self.main is None:
            self.main = number
            return None
        window = fields.kv_cache_spec_sliding_window
        if attention in _WITH_WINDOW and not (isinstance(window, int) and window > 0):
            attention = Attention.UNKNOWN
        group = KvGroup(number, attention, window if attention in _WITH_WINDOW else 0)
        self.others[number] = group
        return group


def _attention(fields: StoredFields) -> Attention:
    kind = fields.kv_cache_spec_kind
    if kind is None and fields.token_ids:
        return Attention.PREFIX
    return _ATTENTION.get(kind, Attention.UNKNOWN) if isinstance(kind, str) else Attention.UNKNOWN
