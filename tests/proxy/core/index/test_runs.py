"""Runs of blocks. What events make of them, and a naive model beside it: test_view.py."""

from array import array

import pytest

from proxy.core.index.blocks import extend
from proxy.core.index.runs import BlockRun, Point

POOL = 4
ROOT = 77


def chain(tokens, extra_ids=None):
    return list(extend(ROOT, array("i", tokens), extra_ids, POOL))


def names(n, first=0):
    return list(range(first, first + n))


def run_of(tokens, size, *, extra_ids=None):
    run = BlockRun(Point(ROOT), size, POOL)
    run.append(names(len(tokens) // size), array("i", tokens), extra_ids, 1)
    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_blocks_of_any_size_give_the_same_chain(size):
    run = run_of(range(24), size)
    blocks = 24 // size
    assert [h for at in range(blocks) for h in run.hashes_of(at)] == chain(range(24))
    for at in range(blocks):
        end = (at + 1) * size
        done = sum(len(run.hashes_of(i)) for i in range(at + 1))
        assert done == end // POOL


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("marked", [None, 0, 5, 12, 13])
def test_a_chain_goes_on_from_the_end_of_any_block(size, marked):
    """In one run or in several, whatever of it has extra ids."""
    extra_ids = None
    if marked is not None:
        extra_ids = array("Q", [0] * 24)
        extra_ids[marked] = 9
    whole = chain(range(24), extra_ids)
    first = run_of(range(12), size, extra_ids=extra_ids and extra_ids[:12])
    for at in range(12 // size):
        end = (at + 1) * size
        later = BlockRun(first.after(at), 1, POOL)
        rest = extra_ids[end:] if extra_ids is not None and any(extra_ids[end:]) else None
        hashes = later.append(names(24 - end), array("i", range(end, 24)), rest, 1)
        assert list(hashes) == whole[end // POOL :]


def test_a_run_of_one_block_that_is_known_by_its_hashes():
    hashes = chain(range(8))
    run = BlockRun.of_block("x", hashes, POOL)
    assert (run.names, run.size, run.held, run.is_whole) == (["x"], 8, 0, True)
    assert list(run.hashes_of(0)) == hashes
    assert run.after(0) == Point(hashes[-1])


@pytest.mark.parametrize(
    ("size", "inner"),
    [(1, []), (2, []), (4, []), (3, [0, 1, 3, 4]), (6, [0, 1, 3, 4]), (8, [0, 2, 4]), (12, [0, 1, 3, 4])],
)
def test_pool_blocks_that_end_inside_a_block_may_be_shared(size, inner):
    """Of 24 tokens; 12, 24 of 3 and 6 end together with theirs."""
    assert run_of(range(24), size).inner(0) == [chain(range(24))[at] for at in inner]
