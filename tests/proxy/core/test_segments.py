import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import segments
from proxy.core.segments import SEGMENT_BLOCKS

MASKS = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=SEGMENT_BLOCKS)


def spelled(segment):
    """The location bits of each block."""
    masks = [
        mask for mask, start, end in segments.runs(segment, 0, len(segment.hashes)) for _ in range(start, end)
    ]
    assert len(masks) == len(segment.hashes) == segment.ends[-1]
    assert all(a != b for a, b in zip(segment.masks, segment.masks[1:], strict=False))
    return masks


def of(masks):
    segment = segments.new(tuple(range(100, 100 + len(masks))), 0)
    for at, mask in enumerate(masks):
        segments.change(segment, at, at + 1, on=mask)
    return segment


@given(MASKS, st.data())
def test_runs_and_changes_are_those_of_single_blocks(masks, data):
    segment = of(masks)
    assert spelled(segment) == masks
    start = data.draw(st.integers(0, len(masks) - 1))
    end = data.draw(st.integers(start + 1, len(masks)))
    parts = segments.runs(segment, start, end)
    assert [mask for mask, a, b in parts for _ in range(a, b)] == masks[start:end]
    on, off = data.draw(st.sampled_from([(8, 0), (0, 2), (4, 1), (0, 7)]))
    segments.change(segment, start, end, on, off)
    assert spelled(segment) == [
        (mask | on) & ~off if start <= at < end else mask for at, mask in enumerate(masks)
    ]


@given(MASKS, st.data())
def test_a_part_is_a_segment_of_its_own(masks, data):
    segment = of(masks)
    start = data.draw(st.integers(0, len(masks) - 1))
    end = data.draw(st.integers(start + 1, len(masks)))
    part = segments.cut(segment, start, end)
    assert (part.hashes, spelled(part)) == (segment.hashes[start:end], masks[start:end])
    assert spelled(segment) == masks
    segments.keep(segment, start, end)
    assert (segment.hashes, spelled(segment)) == (part.hashes, masks[start:end])


@given(st.integers(1, 20), st.integers(0, 19), st.integers(1, 25), st.data())
def test_a_chain_agrees_up_to_where_it_differs(length, start, ahead, data):
    segment = segments.new(tuple(range(length)), 1)
    start = min(start, length - 1)
    same = data.draw(st.integers(1, ahead))
    chain = [77, *range(start, start + same), *range(200, 200 + ahead - same)]
    expected = min(same, length - start)
    assert segments.agreed(segment, start, chain, 1) == expected
    assert segments.equal(segment, start, tuple(chain), 1) == expected


def test_blocks_that_are_no_chain_are_compared_one_by_one():
    segment = segments.new((1, 2, 3, 4), 1)
    assert segments.equal(segment, 0, (1, 9, 3, 4), 0) == 1
    assert segments.equal(segment, 1, (2, 3, 9, 4), 0) == 2


@pytest.mark.parametrize("at", range(5))
def test_a_block_has_its_position(at):
    assert segments.position(segments.new((5, 6, 7, 8, 9), 1), 5 + at) == at


def test_more_blocks_lie_where_the_last_one_does():
    segment = of([1, 2])
    segments.extend(segment, (7, 8))
    assert (segment.hashes, spelled(segment)) == ((100, 101, 7, 8), [1, 2, 2, 2])
