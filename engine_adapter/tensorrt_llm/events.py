"""Turns KV events of TensorRT-LLM into kvpin's. Pure: it reads answers of `POST /kv_cache_events`, in order.

    event_id    last + 1: next · higher: events were lost · lower, or `created` again: another process
    stored      full blocks with tokens, extra ids, salt, images; a partial last block is not followed
    removed     from the block's level, which earlier events have shown
    updated     the level changed: stored there by name, removed here

The largest attention window tells what is stored. Each smaller one has a radix tree of its own, in which the
same blocks have the same names; a prompt is reused as far as all of them hold it (BlockManager in
kvCacheManager.cpp). So each is a further KV cache group, with all blocks that it has on any level. The V2
cache manager names blocks differently in each layer group: the first one is followed, and no prediction is
firm if others have other windows. Nor is one for a recurrent state, whose window is not positive.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby, takewhile

import msgspec
from msgspec import UNSET, UnsetType

from engine_adapter.body import UNREADABLE
from engine_adapter.errors import EngineUnavailable
from engine_adapter.events.fields import MalformedEvents
from engine_adapter.prompt.extra_ids import UINT64_MAX, mark_media
from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    ExtraIds,
    KvEvent,
    KvGroup,
    MediaSpan,
    Tier,
    TokenIds,
    ViewCurrent,
    ViewLost,
)

# --- wire -----------------------------------------------------------------------------------------------
# The JSON of `POST /kv_cache_events`, typed. A field of the wrong type is an error, an unknown field is not.
#
# `{"event_id": 7, "window_size": 4096, "attention_dp_rank": 0, "data": {"type": "stored", …}}`: an event's
# frame is read before its data, so that an unreadable event still counts as seen.

BlockName = int | str


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


class EventToken(msgspec.Struct, frozen=True):
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

    Fields that older servers leave out are UNSET."""

    block_hash: BlockName
    tokens: list[EventToken]
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


class Updated(Data, frozen=True, tag="updated", kw_only=True):
    """A block that moved to another level, or changed in a way that does not matter here."""

    block_hash: BlockName
    cache_level: LevelDiff | None = None


Event = Created | Stored | Removed | Updated


_decode_answer = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_frame = msgspec.json.Decoder(Frame).decode
_decode_data: Callable[[bytes | msgspec.Raw], Event] = msgspec.json.Decoder(Event).decode
_REMOVED = b'"removed"'


def _events_in(answer: bytes) -> list[msgspec.Raw]:
    """The raw events of an answer. Raises EngineUnavailable if it is not a list."""
    try:
        return _decode_answer(answer)
    except UNREADABLE as error:
        raise EngineUnavailable(f"/kv_cache_events is not TensorRT-LLM's: {error}") from error


# --- events ---------------------------------------------------------------------------------------------

_MIN_BLOCK = 2
_TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)  # by cache level


class PolledEventReader:
    """Reads the events of one server.

    Attributes:
        tokens_per_block: the block size: the reported one until blocks show it.
        is_measured: blocks have shown it.
        heard: an event came.
        follows_all: what each attention window holds is known.
        ranks: data-parallel ranks whose events came.
        blocks_per_level: capacity of each cache level, () where unknown.
        lacks_salt: blocks came without saying whether they have a salt.
        lacks_lora: blocks came without saying whether they have a LoRA adapter.
    """

    def __init__(self, tokens_per_block: int, *, exact: bool) -> None:
        """`exact`: the server reuses only whole blocks, so its events show everything it will report."""
        self.tokens_per_block = tokens_per_block
        self._exact = exact
        self._last: int | None = None
        self._from_start = False
        self._current = False
        self._in_use = False  # an event other than `created` came since the process started
        self._window: int | None = None
        self._group: int | None = None
        self._tiers: dict[BlockName, Tier] = {}  # of the blocks of this view
        self.heard = self.is_measured = False
        self.skipped = self.gaps = self.restarts = 0
        self.follows_all = True
        self.ranks: set[int] = set()
        self.blocks_per_level: tuple[int, ...] = ()
        self.lacks_salt = self.lacks_lora = False

    def read(self, content: bytes) -> list[KvEvent]:
        """The events of one answer; raises EngineUnavailable if it is none. The first answer ends with
        ViewCurrent. So does any answer with a ViewLost, which voids everything before it."""
        events: list[KvEvent] = []
        for raw in _events_in(content):
            events += self._event(raw)
        if not self._current:
            self._current = True
            events.append(self.current())
        return events

    def pass_over(self, content: bytes) -> None:
        """Skips an answer, like `read`: the cache was reset after its events."""
        for raw in _events_in(content):
            with suppress(*UNREADABLE):
                frame = _decode_frame(raw)
                self.heard = True
                if (frame.attention_dp_rank or 0) == min(self.ranks, default=0):
                    self._last = frame.event_id
        self._tiers.clear()

    def forget(self) -> None:
        """Gives up the view: the next events begin a new one."""
        self._current = self._from_start = False
        self._tiers.clear()

    def blocks(self) -> Counter[Tier]:
        """Blocks of this view, by tier."""
        return Counter(self._tiers.values())

    def current(self, *, complete: bool | None = None) -> ViewCurrent:
        """The event that ends a view's start; `complete` if the caller knows it."""
        return ViewCurrent((self._from_start if complete is None else complete) and self._exact)

    def _event(self, raw: msgspec.Raw) -> list[KvEvent]:
        try:
            frame = _decode_frame(raw)
        except UNREADABLE:
            self.skipped += 1
            return []
        self.heard = True
        rank = frame.attention_dp_rank or 0
        self.ranks.add(rank)
        if rank != min(self.ranks):
            return []
        try:
            data = _decode_data(frame.data)
        except UNREADABLE:
            self.skipped += 1
            lost = self._follow(frame.event_id, is_created=False)
            # It may leave removed blocks in the view.
            return lost + (self._lose("a removal could not be read") if _REMOVED in bytes(frame.data) else [])
        lost = self._follow(frame.event_id, is_created=isinstance(data, Created))
        lost += self._choose(frame, data)
        return lost + self._apply(frame, data)

    def _follow(self, event_id: int, *, is_created: bool) -> list[KvEvent]:
        """Moves on to this event. Its number may show that events before it are lost or void."""
        last, self._last = self._last, event_id
        if last is None:
            self._from_start = event_id == 0
            return []
        if event_id <= last or (is_created and self._in_use):
            self.restarts += 1
            self._window = self._group = None
            self._in_use = False
            self.follows_all = True
            self.blocks_per_level = ()
            lost = self._lose(f"the engine was restarted: after event {last} came {event_id}")
            self._from_start = event_id == 0
            return lost
        if event_id > last + 1:
            self.gaps += 1
            return self._lose(f"events {last + 1} to {event_id - 1} were lost")
        return []

    def _lose(self, reason: str) -> list[KvEvent]:
        self.forget()
        return [ViewLost(reason)]

    def _choose(self, frame: Frame, data: Event) -> list[KvEvent]:
        """Follows the window of this event if it is the largest so far."""
        window = frame.window_size or 0
        in_use, self._in_use = self._in_use, self._in_use or not isinstance(data, Created)
        if self._window is not None and window <= self._window:
            return []
        widened = self._window is not None and in_use
        self._window, self._group = window, None
        return self._lose(f"a larger attention window of {window} tokens is followed") if widened else []

    def _apply(self, frame: Frame, data: Event) -> list[KvEvent]:
        group = frame.layer_group_id if frame.layer_group_id is not None else data.layer_group_id
        window = frame.window_size or 0
        if window != self._window:
            is_known = group is None and window > 0
            self.follows_all &= is_known
            return self._further(KvGroup(window, Attention.PREFIX if is_known else Attention.UNKNOWN), data)
        if isinstance(data, Created):
            self.blocks_per_level = tuple(data.num_blocks_per_cache_level)
            return []
        if self._group is None:
            self._group = group
        if group != self._group:
            return []
        if isinstance(data, Stored):
            return self._stored(data)
        return self._removed(data) if isinstance(data, Removed) else self._updated(data)

    def _further(self, group: KvGroup, data: Event) -> list[KvEvent]:
        """What changed in a smaller window. Its blocks can be reused from any level."""
        size = self.tokens_per_block
        if isinstance(data, Stored):
            whole = takewhile(lambda block: len(block.tokens) == size, data.blocks)
            names = tuple([name_of(block.block_hash) for block in whole])
            return [BlocksStored(Tier.GPU, None, names, array("i"), size, group=group)] if names else []
        if isinstance(data, Removed):
            return [BlocksRemoved(Tier.GPU, tuple(map(name_of, data.block_hashes)), group)]
        return []

    def _stored(self, data: Stored) -> list[KvEvent]:
        for block in data.blocks:
            self.lacks_salt |= block.cache_salt is UNSET
            self.lacks_lora |= block.lora_id is UNSET
        lost = self._measure(data.blocks)
        whole = list(takewhile(lambda block: len(block.tokens) == self.tokens_per_block, data.blocks))
        try:
            runs = list(runs_of(data, whole, self.tokens_per_block))
        except MalformedEvents:
            self.skipped += 1
            return lost
        self._tiers.update((block.block_hash, _TIERS[block.cache_level]) for block in whole)
        return [*lost, *runs]

    def _measure(self, blocks: Sequence[Block]) -> list[KvEvent]:
        """Reads the block size, a power of two, from the blocks. Only the last of a run may hold fewer
        tokens."""
        taken = self.tokens_per_block
        size = len(blocks[0].tokens) if blocks else taken
        if (len(blocks) < 2 and size <= taken) or size < _MIN_BLOCK or size & (size - 1):  # noqa: PLR2004
            return []
        self.tokens_per_block, self.is_measured = size, True
        if size == taken:
            return []
        return self._lose(f"its blocks hold {size} tokens, not {taken}") if self._tiers else []

    def _removed(self, data: Removed) -> list[KvEvent]:
        known = [name for name in data.block_hashes if name in self._tiers]
        tiers = [(self._tiers.pop(name), name_of(name)) for name in dict.fromkeys(known)]
        return [
            BlocksRemoved(tier, tuple(name for _, name in run))
            for tier, run in groupby(tiers, lambda pair: pair[0])
        ]

    def _updated(self, data: Updated) -> list[KvEvent]:
        diff = data.cache_level
        old = self._tiers.get(data.block_hash)
        new = tier_of(diff.new_value) if diff is not None else old
        if old is None or new is old:
            return []
        names = (name_of(data.block_hash),)
        if new is None:
            del self._tiers[data.block_hash]
            return [BlocksRemoved(old, names)]
        self._tiers[data.block_hash] = new
        # Stored before removed, or the block would be unknown in between.
        stored = BlocksStored(new, None, names, array("i"), self.tokens_per_block)
        return [stored, BlocksRemoved(old, names)]


def runs_of(data: Stored, blocks: Sequence[Block], size: int) -> Iterator[BlocksStored]:
    """The blocks of a stored event as runs on one tier each. Raises MalformedEvents for unknown content."""
    parent = data.parent_hash
    if len({(block.cache_salt, block.lora_id) for block in blocks}) > 1:
        raise MalformedEvents("the blocks of a run have several salts or adapters")
    for level, group in groupby(blocks, lambda block: block.cache_level):
        run, tier = list(group), tier_of(level)
        if tier is None:
            raise MalformedEvents(f"cache level {level} is not known")
        salt, lora = run[0].cache_salt, run[0].lora_id
        is_root = parent is None
        yield BlocksStored(
            tier=tier,
            parent=None if parent is None else name_of(parent),
            hashes=tuple(name_of(block.block_hash) for block in run),
            token_ids=_token_ids(run),
            tokens_per_block=size,
            extra_ids=_extra_ids(run, size),
            salt=salt if is_root and isinstance(salt, str) else None,
            # Events carry only the LoRA adapter's number; no request names an adapter like this.
            lora=f"lora_id {lora}" if is_root and isinstance(lora, int) else None,
        )
        parent = run[-1].block_hash


def _token_ids(run: Sequence[Block]) -> TokenIds[int]:
    try:
        return array("i", [token.token_id for block in run for token in block.tokens])
    except OverflowError as error:
        raise MalformedEvents(f"a token id is beyond int32: {error}") from error


def _extra_ids(run: Sequence[Block], size: int) -> ExtraIds[int] | None:
    """Extra ids, with a marker for each image, audio or video that begins in the run. Events do not say where
    in its block an item begins, so the marker stands on the block's first token."""
    try:
        ids = array("Q", [token.token_extra_id for block in run for token in block.tokens])
    except OverflowError as error:
        raise MalformedEvents(f"an extra id is beyond uint64: {error}") from error
    begins = [
        MediaSpan(key.hash, at * size, 0)
        for at, block in enumerate(run)
        for key in block.mm_keys or ()
        if key.start_offset == 0
    ]
    markers = mark_media(len(ids), begins)
    if not any(ids):
        return markers
    if markers is not None:
        for at in {span.offset for span in begins}:
            ids[at] = (ids[at] + markers[at]) & UINT64_MAX or 1
    return ids


def tier_of(level: int) -> Tier | None:
    """The tier of a cache level, None for an unknown level."""
    return _TIERS[level] if 0 <= level < len(_TIERS) else None


def name_of(name: BlockName) -> int | bytes:
    """A block's name in kvpin."""
    return name.encode() if isinstance(name, str) else name
