"""KV events of TensorRT-LLM → kvpin's. Pure: fed with answers of `POST /kv_cache_events`, in order.

    event_id    one more than the last · more: events were lost · less, or `created` again: another process
    stored      full blocks, by tokens, extra ids, salt, images; the last may be partial, and is not followed
    removed     from the level the block lay on, which only what was read before tells
    updated     the level changed: stored there by its name alone, removed here

Events of other attention windows than the largest, and of other layer groups than the first of that window,
tell of the same tokens again: they are passed over.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby, takewhile

import msgspec
from msgspec import UNSET

from engine_adapter.tensorrt_llm.stored import TIERS, name_of, runs_of, tier_of
from engine_adapter.tensorrt_llm.wire import (
    Block,
    BlockName,
    Created,
    Event,
    Frame,
    MalformedEvents,
    Removed,
    Stored,
    Updated,
    decode_answer,
    decode_data,
    decode_frame,
    kind_of,
)
from engine_adapter.types import BlocksRemoved, BlocksStored, KvEvent, Tier, ViewCurrent, ViewLost

_MIN_BLOCK = 2


class EventReader:
    """Reads the events of one server, from whenever it is attached on.

    Attributes:
        tokens_per_block: the block size, as it was told until blocks came that are of another.
        is_measured: blocks came that tell it.
        heard: any event came so far.
        skipped: events that could not be read.
        gaps: times events were lost.
        restarts: times another process answered.
        windows: attention windows whose events came.
        ranks: data-parallel ranks whose events came.
        blocks_per_level: capacity of each cache level, () where that was not told.
        salt_untold: blocks came of which it is not told whether they have a salt.
        lora_untold: likewise, a LoRA adapter.
    """

    def __init__(self, tokens_per_block: int, *, exact: bool) -> None:
        """`exact`: the server reuses nothing but whole blocks, so that its events tell all it will report."""
        self.tokens_per_block = tokens_per_block
        self._exact = exact
        self._last: int | None = None
        self._from_start = False
        self._current = False
        self._in_use = False  # something other than `created` came since the process began
        self._window: int | None = None
        self._group: int | None = None
        self._tiers: dict[BlockName, Tier] = {}  # of the blocks of this view
        self.heard = self.is_measured = False
        self.skipped = self.gaps = self.restarts = 0
        self.windows: set[int] = set()
        self.ranks: set[int] = set()
        self.blocks_per_level: tuple[int, ...] = ()
        self.salt_untold = self.lora_untold = False

    def read(self, content: bytes) -> list[KvEvent]:
        """The events of one answer. The first answer ends with ViewCurrent, and so does any with a ViewLost,
        which voids all before it.

        Raises:
            MalformedEvents: the answer is no list of events.
        """
        events: list[KvEvent] = []
        for raw in decode_answer(content):
            events += self._event(raw)
        if not self._current:
            self._current = True
            events.append(self.current())
        return events

    def pass_over(self, content: bytes) -> None:
        """Takes note of an answer whose events are void: the cache was reset after them.

        Raises:
            MalformedEvents: the answer is no list of events.
        """
        for raw in decode_answer(content):
            with suppress(MalformedEvents):
                frame = decode_frame(raw)
                self.heard = True
                if (frame.attention_dp_rank or 0) == min(self.ranks, default=0):
                    self._last = frame.event_id
        self._tiers.clear()

    def forget(self) -> None:
        """The view was given up: the next events begin another."""
        self._current = self._from_start = False
        self._tiers.clear()

    def blocks(self) -> Counter[Tier]:
        """Blocks of this view, by tier."""
        return Counter(self._tiers.values())

    def current(self, *, complete: bool | None = None) -> ViewCurrent:
        """The end of what brings a view up to date; `complete` where the caller knows."""
        return ViewCurrent((self._from_start if complete is None else complete) and self._exact)

    def _event(self, raw: msgspec.Raw) -> list[KvEvent]:
        try:
            frame = decode_frame(raw)
        except MalformedEvents:
            self.skipped += 1
            return []
        self.heard = True
        rank = frame.attention_dp_rank or 0
        self.ranks.add(rank)
        if rank != min(self.ranks):
            return []
        try:
            data = decode_data(frame.data)
        except MalformedEvents:
            return [*self._follow(frame.event_id, is_created=False), *self._unreadable(frame.data)]
        lost = self._follow(frame.event_id, is_created=isinstance(data, Created))
        lost += self._choose(frame, data)
        return lost + self._apply(frame, data)

    def _unreadable(self, data: msgspec.Raw) -> list[KvEvent]:
        """A removal that cannot be read would leave blocks in the view that are gone."""
        self.skipped += 1
        return self._lose("a removal could not be read") if kind_of(data) == "removed" else []

    def _follow(self, event_id: int, *, is_created: bool) -> list[KvEvent]:
        """Moves on to this event; what its number means for all before it."""
        last, self._last = self._last, event_id
        if last is None:
            self._from_start = event_id == 0
            return []
        if event_id <= last or (is_created and self._in_use):
            self.restarts += 1
            self._window = self._group = None
            self._in_use = False
            self.windows.clear()
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
        """Takes up the window of this event where it is the largest so far."""
        window = frame.window_size or 0
        self.windows.add(window)
        in_use, self._in_use = self._in_use, self._in_use or not isinstance(data, Created)
        if self._window is not None and window <= self._window:
            return []
        widened = self._window is not None and in_use
        self._window, self._group = window, None
        return self._lose(f"a larger attention window of {window} tokens is followed") if widened else []

    def _apply(self, frame: Frame, data: Event) -> list[KvEvent]:
        if (frame.window_size or 0) != self._window:
            return []
        if isinstance(data, Created):
            self.blocks_per_level = tuple(data.num_blocks_per_cache_level)
            return []
        group = frame.layer_group_id if frame.layer_group_id is not None else data.layer_group_id
        if self._group is None:
            self._group = group
        if group != self._group:
            return []
        if isinstance(data, Stored):
            return self._stored(data)
        return self._removed(data) if isinstance(data, Removed) else self._updated(data)

    def _stored(self, data: Stored) -> list[KvEvent]:
        for block in data.blocks:
            self.salt_untold |= block.cache_salt is UNSET
            self.lora_untold |= block.lora_id is UNSET
        lost = self._measure(data.blocks)
        whole = list(takewhile(lambda block: len(block.tokens) == self.tokens_per_block, data.blocks))
        try:
            runs = list(runs_of(data, whole, self.tokens_per_block))
        except MalformedEvents:
            self.skipped += 1
            return lost
        self._tiers.update((block.block_hash, TIERS[block.cache_level]) for block in whole)
        return [*lost, *runs]

    def _measure(self, blocks: Sequence[Block]) -> list[KvEvent]:
        """Takes the block size from the blocks: a power of two. Only the last of a run may hold less."""
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
        # Stored before removed: in between, the block would not be known any more.
        stored = BlocksStored(new, None, names, array("i"), self.tokens_per_block)
        return [stored, BlocksRemoved(old, names)]
