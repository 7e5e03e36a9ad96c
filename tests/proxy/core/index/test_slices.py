"""Long events in parts. That parts and whole give the same index: test_view.py."""

from array import array

import pytest

from engine_adapter.types import BlocksRemoved, BlocksStored, CacheCleared, Tier, ViewLost
from proxy.core.index.slices import SLICE_NAMES, SLICE_TOKENS, slices


def stored(blocks, size, **changes):
    fields = {"parent": 7, "hashes": tuple(range(100, 100 + blocks)), "salt": "s"} | changes
    return BlocksStored(Tier.GPU, token_ids=array("i", range(blocks * size)), tokens_per_block=size, **fields)


def test_a_long_run_becomes_runs_that_follow_each_other():
    step = SLICE_TOKENS // 32
    extra_ids = array("Q", range(32 * (step + 2)))
    parts = list(slices(stored(step + 2, 32, extra_ids=extra_ids)))
    assert [part.parent for part in parts] == [7, 100 + step - 1]
    assert [len(part.hashes) for part in parts] == [step, 2]
    assert sum((part.token_ids for part in parts), array("i")) == array("i", range(32 * (step + 2)))
    assert sum((part.extra_ids for part in parts), array("Q")) == extra_ids


def test_a_block_is_never_cut():
    parts = list(slices(stored(3, SLICE_TOKENS * 2)))
    assert [len(part.hashes) for part in parts] == [1, 1, 1]


def test_names_alone_and_removals_are_cut_by_number():
    named = BlocksStored(Tier.HOST, None, tuple(range(SLICE_NAMES + 1)), array("i"), 0)
    gone = BlocksRemoved(Tier.GPU, tuple(range(2 * SLICE_NAMES)))
    assert [len(part.hashes) for part in slices(named)] == [SLICE_NAMES, 1]
    assert [len(part.hashes) for part in slices(gone)] == [SLICE_NAMES, SLICE_NAMES]


@pytest.mark.parametrize(
    "event",
    [
        stored(2, 16),
        stored(SLICE_TOKENS, 2, hashes=(1, 2)),
        BlocksStored(Tier.GPU, None, (1,), array("i", [5]), 0),
        BlocksRemoved(Tier.GPU, (1,)),
        CacheCleared(),
        ViewLost("x"),
    ],
    ids=["short", "tokens that do not fit", "no size", "removal", "clearing", "loss"],
)
def test_others_stay_whole(event):
    assert list(slices(event)) == [event]
