from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace

from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvGroup,
    Tier,
    ViewCurrent,
    ViewLost,
)
from engine_adapter.vllm import copies as module
from engine_adapter.vllm.copies import Copies

LOST, CURRENT, INCOMPLETE = ViewLost("connected"), ViewCurrent(), ViewCurrent(complete=False)
WINDOW = KvGroup(1, Attention.WINDOW, 33)


def copied(*names, parent=None, tier=Tier.GPU):
    return BlocksStored(tier, parent, names, array("i", range(len(names))), 1)


def reported(group, *names, parent=None):
    """By a further group, in blocks of 16 tokens."""
    return BlocksStored(Tier.GPU, parent, names, array("i"), 16, group=group)


def removed(*names, tier=Tier.GPU, group=None):
    return BlocksRemoved(tier, names, group)


def passed(copies, *events):
    return [out for event in events for out in copies.count(event)]


@pytest.fixture
def copies():
    """Of an engine whose cache was empty when the view began."""
    copies = Copies()
    assert passed(copies, LOST, CURRENT) == [LOST, CURRENT]
    return copies


def test_of_two_copies_the_second_removal_counts(copies):
    twice = [copied("a", "b"), copied("a", "b", "c"), copied("d", parent="b"), copied("d", parent="b")]
    assert passed(copies, *twice) == twice
    assert passed(copies, removed("c", "b", "d", "a")) == [removed("c")]
    assert passed(copies, removed("b"), removed("d", "a")) == [removed("b"), removed("d", "a")]


def test_reuse_that_is_told_is_no_copy(copies):
    passed(copies, copied("a", "b"), copied("a", "b"), copied("a"))
    assert passed(copies, removed("b"), removed("a")) == [removed("b"), removed("a")]


def test_what_was_doubted_is_no_copy_later(copies):
    """Two prompts alike, computed at once: what looks gone may be held, and be told of when it is reused."""
    passed(copies, copied("a", "b"), copied("a", "b"), removed("b"), copied("a", "b"))
    assert passed(copies, removed("b"), removed("a")) == [removed("b"), removed("a")]


def test_doubt_is_bounded(copies, monkeypatch):
    monkeypatch.setattr(module, "_MAX_DOUBTED", 1)
    passed(copies, copied("a", "b"), copied("a", "b"), removed("b"), copied("a", "b"), copied("a", "c"))
    assert passed(copies, removed("a")) == [removed("a")]


def test_a_view_without_its_beginning_counts_no_run_from_the_start_of_a_prompt():
    copies = Copies()
    passed(copies, LOST, copied("c", parent="b"), INCOMPLETE)
    passed(copies, copied("a", "b", "c"), copied("d", parent="c"), copied("d", parent="c"))
    assert passed(copies, removed("c"), removed("d"), removed("d")) == [removed("c"), removed("d")]


def test_copies_taken_on_trust_are_gone_when_it_was_misplaced():
    copies, twice = Copies(), [copied("c", parent="b")] * 2
    replay = [LOST, copied("b", parent="a"), copied("a", "b"), *twice]
    assert passed(copies, *replay, removed("b", "c")) == replay
    after = passed(copies, INCOMPLETE)
    assert after[1:] == [INCOMPLETE]
    assert sorted(after[0].hashes) == ["b", "c"]
    assert passed(copies, copied("b", parent="a"), removed("b")) == [copied("b", parent="a"), removed("b")]


@pytest.mark.parametrize("end", [CacheCleared(), LOST], ids=["cleared", "lost"])
def test_nothing_is_remembered_of_before(copies, end):
    passed(copies, copied("a"), copied("a", "b"), end)
    assert passed(copies, copied("a"), removed("a"))[-1:] == [removed("a")]


def test_other_tiers_and_unknown_names_pass(copies):
    events = [copied("a", tier=Tier.HOST), removed("a", tier=Tier.HOST), removed("x")]
    assert passed(copies, *events) == events


class TestChunks:
    """Of vLLM's offloading connector."""

    def test_blocks_that_chunks_share_stay_until_the_last_of_them_is_gone(self, copies):
        chunks = [replace(copied("a", last, tier=Tier.HOST), per_chunk=2) for last in "bc"]
        assert passed(copies, *chunks) == chunks
        gone = removed("a", "b", tier=Tier.HOST), removed("a", "c", tier=Tier.HOST)
        assert passed(copies, *gone) == [removed("b", tier=Tier.HOST), removed("a", "c", tier=Tier.HOST)]
        assert passed(copies, *chunks, chunks[0], removed("a", tier=Tier.HOST)) == [*chunks, chunks[0]]
        assert passed(copies, LOST, gone[0]) == [LOST, gone[0]]

    def test_where_events_name_the_last_block_alone_they_say_of_how_many(self):
        copies, named = Copies(4), BlocksStored(Tier.HOST, None, ("d",), array("i"), 0)
        assert passed(copies, named) == [replace(named, per_chunk=4)]
        assert passed(Copies(), named) == [named]


class TestFurtherGroups:
    """Each KV cache group has its own copies, under the same names. vLLM reports a reused run of a further
    group whole, also the blocks that the group no longer holds."""

    def test_copies_are_counted_apart(self, copies):
        passed(copies, copied(2, parent=1), copied(2, parent=1), reported(WINDOW, 2, parent=1))
        assert passed(copies, removed(2, group=WINDOW)) == [removed(2, group=WINDOW)]
        assert passed(copies, removed(2)) == []
        assert passed(copies, removed(2)) == [removed(2)]

    def test_removals_that_were_kept_back_are_told_by_group(self):
        copies, main, further = Copies(), copied(2, parent=1), reported(WINDOW, 2, parent=1)
        passed(copies, LOST, main, main, further, further, removed(2), removed(2, group=WINDOW))
        *gone, last = passed(copies, INCOMPLETE)
        assert last == INCOMPLETE
        assert sorted(gone, key=lambda event: event.group is not None) == [
            removed(2),
            removed(2, group=WINDOW),
        ]

    @pytest.mark.parametrize(
        ("group", "held"),
        [
            (KvGroup(1, Attention.WINDOW, 33), (3, 4)),
            (KvGroup(1, Attention.WINDOW, 1000), (0, 1, 2, 3, 4)),
            (KvGroup(1, Attention.CHUNK, 64), (4,)),
            (KvGroup(1, Attention.STATE), (4,)),
            (KvGroup(1, Attention.PREFIX), (0, 1, 2, 3, 4)),
            (KvGroup(1, Attention.UNKNOWN), ()),
        ],
    )
    def test_while_the_view_is_incomplete_what_reuse_needs_counts(self, group, held):
        copies = Copies()
        passed(copies, LOST, INCOMPLETE)
        assert passed(copies, reported(group, *range(5))) == [reported(group, *held)]
        later = reported(group, *range(5), parent=9)
        assert passed(copies, later) == [later]

    def test_before_it_is_known_to_be_incomplete_the_others_are_taken_back(self):
        copies, events = Copies(), [reported(WINDOW, *range(5)), reported(WINDOW, *range(3))]
        assert passed(copies, LOST, *events) == [LOST, *events]
        assert passed(copies, INCOMPLETE) == [removed(0, group=WINDOW), INCOMPLETE]

    def test_a_complete_view_counts_them_all(self):
        events = [reported(WINDOW, *range(5)), CURRENT, reported(WINDOW, *range(9))]
        assert passed(Copies(), LOST, *events) == [LOST, *events]
