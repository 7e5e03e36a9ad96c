"""Where blocks lie, against a naive model beside others: test_prefix_index.py."""

from array import array
from collections import Counter

import pytest
from xxhash import xxh3_64_intdigest

from proxy.core.index import locations
from proxy.core.index.blocks import extend, namespace_root
from proxy.core.index.locations import Locations
from proxy.core.index.segments import SEGMENT_BLOCKS, place, spread

ROOT = namespace_root("m")
LONG = extend(ROOT, array("i", range(1000)), None, 4)


def segments_of(where):
    """All of them, each once."""
    parts = {id(part): part for part in where._parts}.values()
    return {id(segment): segment for part in parts for segment in part.values()}.values()


def blocks_of(segment):
    return segment.hashes[segment.first : segment.ends[-1]]


def check(where):
    """Every block is in the segment that the dicts say it is in, once, and lies somewhere."""
    kept = [segment for each in where._segments for segment in each]
    assert {id(segment) for segment in kept} == {id(segment) for segment in segments_of(where)}
    assert sum(len(blocks_of(segment)) for segment in kept) == len(where)
    for segment in kept:
        assert segment.first < segment.ends[0]
        assert segment.ends[-1] <= len(segment.hashes) <= locations.SEGMENT_BLOCKS
        assert list(segment.ends) == sorted(set(segment.ends))
        assert len(segment.masks) == len(segment.ends)
        assert 0 not in segment.masks
        assert all(where._parts[block % locations._PARTS][block] is segment for block in blocks_of(segment))


def test_blocks_that_go_one_by_one_from_the_end_leave_no_pieces():
    where = Locations()
    where.mark(1, LONG)
    assert len(list(where.stretches(LONG))) == -(-len(LONG) // SEGMENT_BLOCKS)
    for block in reversed(LONG):
        where.clear(1, (block,), 1)
        check(where)
        assert len(segments_of(where)) <= -(-len(where) // SEGMENT_BLOCKS)
    assert len(where) == 0


def test_what_is_parted_during_a_pass_takes_nothing_retired_along(monkeypatch):
    """Wherever the pass is, and whichever set the parted piece falls into."""
    monkeypatch.setattr(locations, "SLICE_STEPS", 1)
    chain = extend(ROOT, array("i", range(40 * SEGMENT_BLOCKS)), None, 1)
    middles = chain[10::SEGMENT_BLOCKS]
    for slices in (0, 10, 20, 30, 39):
        where = Locations()
        where.mark(2, chain)
        where.mark(1, chain)
        where.clear(1, middles, 1)
        where.retire(1)
        for _ in range(slices):
            assert not where.tidy()
        assert where.clear(2, middles, 2) == {2: len(middles)}
        while not where.tidy():
            check(where)
        assert {block: where.get(block) for block in chain} == {
            block: 0 if block in middles else 2 for block in chain
        }


DIGESTS = [xxh3_64_intdigest(n.to_bytes(4, "big")) for n in range(25_600)]
KEYS = {
    "uint64": DIGESTS,
    "int64": [digest - 2**63 for digest in DIGESTS],
    "bytes": [digest.to_bytes(32, "big") for digest in DIGESTS],
}


@pytest.mark.parametrize("kind", KEYS)
def test_each_gets_its_share(kind):
    places = Counter(map(place, KEYS[kind]))
    assert set(places) == set(range(len(spread())))
    assert max(places.values()) < 200
