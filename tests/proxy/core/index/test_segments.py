from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index import segments
from proxy.core.index.segments import SEGMENT_BLOCKS

MASKS = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=SEGMENT_BLOCKS)


def spelled(segment):
    """Each block with its location bits."""
    assert len(segment.masks) == len(segment.ends)
    assert all(a != b for a, b in zip(segment.masks, segment.masks[1:], strict=False))
    whole = segments.runs(segment, segment.first, segment.ends[-1])
    return [(block, mask) for mask, start, end in whole for block in segment.hashes[start:end]]


def of(masks):
    segment = segments.new(tuple(range(100, 100 + len(masks))), 0)
    for at, mask in enumerate(masks):
        segments.change(segment, at, at + 1, on=mask)
    return segment


@given(MASKS, st.data())
def test_runs_changes_and_parts_are_those_of_single_blocks(masks, data):
    segment = of(masks)
    blocks = list(zip(segment.hashes, masks, strict=True))
    first, last = 0, len(masks)
    for _ in range(3):
        start = data.draw(st.integers(first, last - 1))
        end = data.draw(st.integers(start + 1, last))
        assert spelled(segment) == blocks[first:last]
        parts = segments.runs(segment, start, end)
        assert [mask for mask, a, b in parts for _ in range(a, b)] == [mask for _, mask in blocks[start:end]]
        assert spelled(segments.split(segment, start)) == blocks[start:last]
        on, off = data.draw(st.sampled_from([(8, 0), (0, 2), (4, 1), (0, 7)]))
        segments.change(segment, start, end, on, off)
        blocks[start:end] = [(block, (mask | on) & ~off) for block, mask in blocks[start:end]]
        assert spelled(segment) == blocks[first:last]
        first = data.draw(st.integers(first, start))
        last = data.draw(st.integers(end, last))
        segments.keep(segment, first, last)
    assert spelled(segment) == blocks[first:last]


def test_what_has_gone_from_the_end_makes_room_for_others():
    segment = segments.new(tuple(range(10)), 1)
    segments.keep(segment, 2, 6)
    segments.extend(segment, (20, 21))
    assert spelled(segment) == [(block, 1) for block in (2, 3, 4, 5, 20, 21)]
    assert [segments.position(segment, block) for block in (2, 3, 5, 20, 21)] == [2, 3, 5, 6, 7]
    assert segments.agreed(segment, 4, [4, 5, 20, 21, 8], 0) == 4


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
