"""The JSON of `POST /kv_cache_events`, typed. A field of a wrong type is an error; one not named is not.

`{"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", …}}`: the frame of
an event is read apart from its data, so that an event that cannot be understood still counts as seen.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

BlockName = int | str


class Frame(msgspec.Struct, frozen=True):
    """What stands around the data of an event."""

    event_id: int
    data: msgspec.Raw
    window_size: int | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


class Data(msgspec.Struct, frozen=True, tag_field="type"):
    """What the data of all events share."""

    layer_group_id: int | None = None


class Created(Data, frozen=True, tag="created"):
    """The cache of one attention window was made. `[gpu, host]` blocks; the host level may be left out."""

    num_blocks_per_cache_level: list[int] = msgspec.field(default_factory=list)


class Token(msgspec.Struct, frozen=True):
    """A token, and the uint64 beside it: 0 for text."""

    token_id: int
    token_extra_id: int = 0


class MmKey(msgspec.Struct, frozen=True):
    """An image, audio or video in a block: what it is told by (its hash, or the client's uuid), and which
    of its own tokens the block's first one of it is."""

    hash: str
    start_offset: int


class Block(msgspec.Struct, frozen=True):
    """A block; the last of a prompt may hold fewer tokens than a block has room for.

    What older servers do not tell is UNSET. Its priority says when it may leave, not that it did.
    """

    block_hash: BlockName
    tokens: list[Token]
    cache_level: int = 0
    priority: float | None = None
    cache_salt: str | UnsetType | None = UNSET
    lora_id: int | UnsetType | None = UNSET
    mm_keys: list[MmKey] | None = None


class Stored(Data, frozen=True, tag="stored", kw_only=True):
    """Blocks that can be reused now, each the child of the one before it."""

    blocks: list[Block]
    parent_hash: BlockName | None = None


class Removed(Data, frozen=True, tag="removed", kw_only=True):
    """Blocks that are gone, from whichever level they lay on."""

    block_hashes: list[BlockName]


class LevelDiff(msgspec.Struct, frozen=True):
    """A block moved."""

    new_value: int
    old_value: int


class PriorityDiff(msgspec.Struct, frozen=True):
    """A block's priority changed."""

    new_value: float
    old_value: float


class Updated(Data, frozen=True, tag="updated", kw_only=True):
    """A block that moved to another level, or has another priority."""

    block_hash: BlockName
    cache_level: LevelDiff | None = None
    priority: PriorityDiff | None = None


Event = Created | Stored | Removed | Updated


class _Kind(msgspec.Struct, frozen=True):
    type: str


class MalformedEvents(ValueError):
    """JSON that is not what the server sends; says what is wrong."""


_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_frame = msgspec.json.Decoder(Frame).decode
_decode_data = msgspec.json.Decoder(Event).decode
_decode_kind = msgspec.json.Decoder(_Kind).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_answer(content: bytes) -> list[msgspec.Raw]:
    """The events of an answer, unread. Raises MalformedEvents when it is no list."""
    try:
        return _decode_list(content)
    except _UNREADABLE as error:
        raise MalformedEvents(f"the answer is no list of events: {error}") from error


def decode_frame(raw: msgspec.Raw) -> Frame:
    """Raises MalformedEvents."""
    try:
        return _decode_frame(raw)
    except _UNREADABLE as error:
        raise MalformedEvents(str(error)) from error


def decode_data(raw: msgspec.Raw) -> Event:
    """Raises MalformedEvents, also for an event of an unknown type."""
    try:
        event: Event = _decode_data(raw)
    except _UNREADABLE as error:
        raise MalformedEvents(str(error)) from error
    return event


def kind_of(raw: msgspec.Raw) -> str | None:
    """The type of data that could not be read, None where it has none."""
    try:
        return _decode_kind(raw).type
    except _UNREADABLE:
        return None
