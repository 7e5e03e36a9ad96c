"""Equal blocks of vLLM: what is passed on of their removals."""

from __future__ import annotations

from array import array

import pytest

from engine_adapter.types import BlocksRemoved, BlocksStored, CacheCleared, Tier, ViewCurrent, ViewLost
from engine_adapter.vllm import copies as module
from engine_adapter.vllm.copies import Copies

LOST, CURRENT = ViewLost("connected"), ViewCurrent()


def stored(*names, parent=None, tier=Tier.GPU):
    return BlocksStored(tier, parent, names, array("i", range(len(names))), 1)


def removed(*names, tier=Tier.GPU):
    return BlocksRemoved(tier, names)


def passed(copies, *events):
    return [out for event in events for out in copies.count(event)]


@pytest.fixture
def copies():
    """Of an engine whose cache was empty when the view began."""
    copies = Copies()
    assert passed(copies, LOST, CURRENT) == [LOST, CURRENT]
    return copies


def test_a_block_stored_once_is_gone_once_removed(copies):
    events = [stored("a", "b"), removed("b"), removed("a"), stored("a"), removed("a")]
    assert passed(copies, *events) == events


def test_of_two_copies_the_second_removal_counts(copies):
    twice = [stored("a", "b"), stored("a", "b", "c"), stored("d", parent="b"), stored("d", parent="b")]
    assert passed(copies, *twice) == twice
    assert passed(copies, removed("c", "b", "d", "a")) == [removed("c")]
    assert passed(copies, removed("b"), removed("d", "a")) == [removed("b"), removed("d", "a")]


def test_reuse_that_is_told_is_no_copy(copies):
    passed(copies, stored("a", "b"), stored("a", "b"), stored("a"))
    assert passed(copies, removed("b"), removed("a")) == [removed("b"), removed("a")]


def test_what_was_doubted_is_no_copy_later(copies):
    """Two prompts alike, computed at once: what looks gone may be held, and be told of when it is reused."""
    passed(copies, stored("a", "b"), stored("a", "b"), removed("b"), stored("a", "b"))
    assert passed(copies, removed("b"), removed("a")) == [removed("b"), removed("a")]


def test_doubt_is_bounded(copies, monkeypatch):
    monkeypatch.setattr(module, "_MAX_DOUBTED", 1)
    passed(copies, stored("a", "b"), stored("a", "b"), removed("b"), stored("a", "b"), stored("a", "c"))
    assert passed(copies, removed("a")) == [removed("a")]


def test_a_view_without_its_beginning_counts_no_run_from_the_start_of_a_prompt():
    copies = Copies()
    passed(copies, LOST, stored("c", parent="b"), ViewCurrent(complete=False))
    passed(copies, stored("a", "b", "c"), stored("d", parent="c"), stored("d", parent="c"))
    assert passed(copies, removed("c"), removed("d"), removed("d")) == [removed("c"), removed("d")]


def test_copies_taken_on_trust_are_gone_when_it_was_misplaced():
    copies, incomplete = Copies(), ViewCurrent(complete=False)
    replay = [
        LOST,
        stored("b", parent="a"),
        stored("a", "b"),
        stored("c", parent="b"),
        stored("c", parent="b"),
    ]
    assert passed(copies, *replay, removed("b", "c")) == replay
    after = passed(copies, incomplete)
    assert after[1:] == [incomplete]
    assert sorted(after[0].hashes) == ["b", "c"]
    assert passed(copies, stored("b", parent="a"), removed("b")) == [stored("b", parent="a"), removed("b")]


def test_a_whole_history_tells_of_copies():
    copies = Copies()
    passed(copies, LOST, stored("a"), stored("a", "b"), removed("b"), removed("a"), CURRENT)
    assert passed(copies, removed("a")) == [removed("a")]


@pytest.mark.parametrize("end", [CacheCleared(), LOST], ids=["cleared", "lost"])
def test_nothing_is_remembered_of_before(copies, end):
    passed(copies, stored("a"), stored("a", "b"), end)
    assert passed(copies, stored("a"), removed("a"))[-1:] == [removed("a")]


def test_other_tiers_and_unknown_names_pass(copies):
    events = [stored("a", tier=Tier.HOST), removed("a", tier=Tier.HOST), removed("x")]
    assert passed(copies, *events) == events
