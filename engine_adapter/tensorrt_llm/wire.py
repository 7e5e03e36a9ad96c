"""The JSON of `POST /kv_cache_events`, typed. A field of the wrong type is an error, an unknown field is not.

`{"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", …}}`: an event's
frame is read before its data, so that an unreadable event still counts as seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from engine_adapter.body import UNREADABLE
from engine_adapter.events.fields import MalformedEvents

BlockName = int | str
_T = TypeVar("_T")


class Frame(msgspec.Struct, frozen=True):
    """The frame around an event's data."""

    event_id: int
    data: msgspec.Raw
    window_size: int | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


class Data(msgspec.Struct, frozen=True, tag_field="type"):
    """Fields that all events' data share."""

    layer_group_id: int | None = None


class Created(Data, frozen=True, tag="created"):
    """The cache of one attention window was created: `[gpu, host]` blocks; the host level may be missing."""

    num_blocks_per_cache_level: list[int] = msgspec.field(default_factory=list)


class Token(msgspec.Struct, frozen=True):
    """A token, and the uint64 beside it: 0 for text."""

    token_id: int
    token_extra_id: int = 0


class MmKey(msgspec.Struct, frozen=True):
    """An image, audio or video in a block: its identity (a hash or the client's uuid), and which of the
    item's tokens is the first one in the block."""

    hash: str
    start_offset: int


class Block(msgspec.Struct, frozen=True):
    """A block; the last of a prompt may hold fewer tokens than a block has room for.

    Fields that older servers leave out are UNSET.
    """

    block_hash: BlockName
    tokens: list[Token]
    cache_level: int = 0
    cache_salt: str | UnsetType | None = UNSET
    lora_id: int | UnsetType | None = UNSET
    mm_keys: list[MmKey] | None = None


class Stored(Data, frozen=True, tag="stored", kw_only=True):
    """Blocks that can be reused now. Each is the child of the one before it."""

    blocks: list[Block]
    parent_hash: BlockName | None = None


class Removed(Data, frozen=True, tag="removed", kw_only=True):
    """Blocks that were removed, from any level."""

    block_hashes: list[BlockName]


class LevelDiff(msgspec.Struct, frozen=True):
    """A block moved."""

    new_value: int
    old_value: int


class Updated(Data, frozen=True, tag="updated", kw_only=True):
    """A block that moved to another level, or changed in a way that does not matter here."""

    block_hash: BlockName
    cache_level: LevelDiff | None = None


Event = Created | Stored | Removed | Updated


class _Kind(msgspec.Struct, frozen=True):
    type: str


def _read(decode: Callable[[bytes | msgspec.Raw], _T], raw: bytes | msgspec.Raw) -> _T:
    try:
        return decode(raw)
    except UNREADABLE as error:
        raise MalformedEvents(str(error)) from error


_decode_data: Callable[[bytes | msgspec.Raw], Event] = msgspec.json.Decoder(Event).decode
_decode_kind = msgspec.json.Decoder(_Kind).decode
decode_answer = partial(_read, msgspec.json.Decoder(list[msgspec.Raw]).decode)
"""The raw events of an answer. Raises MalformedEvents if it is not a list."""
decode_frame = partial(_read, msgspec.json.Decoder(Frame).decode)
"""Raises MalformedEvents."""
decode_data = partial(_read, _decode_data)
"""Raises MalformedEvents, also for an event of an unknown type."""


def kind_of(raw: msgspec.Raw) -> str | None:
    """The type of unreadable data, None if it has none."""
    with suppress(MalformedEvents):
        return _read(_decode_kind, raw).type
    return None
