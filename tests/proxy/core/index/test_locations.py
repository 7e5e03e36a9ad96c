from array import array
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.core.index import locations
from proxy.core.index.blocks import extend, namespace_root
from proxy.core.index.locations import Locations
from proxy.core.index.segments import SEGMENT_BLOCKS

ROOT = namespace_root("m")
LONG = extend(ROOT, array("i", range(1000)), None, 4)
DEPTH = 7
# Every chain of seven blocks, of two kinds of token.
CHAINS = [extend(ROOT, array("i", tokens), None, 1) for tokens in product((0, 1), repeat=DEPTH)]
BLOCKS = sorted({block for chain in CHAINS for block in chain})


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


class LocationsMachine(RuleBasedStateMachine):
    """Against a dict of blocks. Segments are of five blocks at most, so that chains have several."""

    bits = st.sampled_from([1, 2, 4])
    chains = st.sampled_from(CHAINS)
    places = st.integers(0, DEPTH)

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(locations, "SEGMENT_BLOCKS", 5)
        self.patch.setattr(locations, "SLICE_STEPS", 1)
        self.where, self.masks, self.retired = Locations(), Counter(), 0

    @rule(
        bit=bits,
        chain=chains,
        start=places,
        end=places,
        told=st.booleans(),
        beside=st.sampled_from([0, 1, 4]),
        off=st.sampled_from([0, 0, 1, 4, 6]),
    )
    def mark(self, bit, chain, start, end, told, beside, off):
        if bit & self.retired:
            return
        beside &= ~self.retired
        off &= ~self.retired & ~bit
        blocks = chain[start:end]
        again = Counter()
        after = chain[start - 1] if start and told else None
        added, both = self.where.mark(bit, blocks, after, again, beside, off)
        had = {block for block in blocks if self.masks[block] & bit}
        assert (added, again) == (len(blocks) - len(had), Counter(had))
        assert both == sum(self.masks[block] & beside > 0 for block in blocks if block not in had)
        for block in blocks:
            self.masks[block] = (self.masks[block] | bit) & ~off

    @rule(bits=st.sampled_from([1, 2, 4, 3, 7]), blocks=st.lists(st.sampled_from(BLOCKS), max_size=6))
    def clear_any(self, bits, blocks):
        self.clear(bits, blocks)

    @rule(bits=st.sampled_from([1, 2, 4, 3, 7]), chain=chains, start=places, end=places, back=st.booleans())
    def clear_part(self, bits, chain, start, end, back):
        self.clear(bits, chain[start:end][:: -1 if back else 1])

    def clear(self, bits, blocks):
        bits &= ~self.retired
        lost, of = Counter(), (bits | 4) & ~self.retired
        for block in blocks:
            if self.masks[block] & bits:
                lost[self.masks[block] & of] += 1
            self.masks[block] &= ~bits
        assert self.where.clear(bits, tuple(blocks), of) == lost

    @rule(bits=st.sampled_from([1, 2, 6]))
    def retire(self, bits):
        self.where.retire(bits)
        self.retired |= bits
        self.masks = Counter({block: mask & ~bits for block, mask in self.masks.items()})

    @rule()
    def tidy(self):
        gone = self.where.tidy()
        assert gone & self.retired == gone
        assert not any(self.where.get(block) & gone for block in BLOCKS)
        self.retired &= ~gone

    @invariant()
    def blocks_lie_where_they_should(self):
        check(self.where)
        assert all(self.where.get(block) & ~self.retired == self.masks[block] for block in BLOCKS)
        assert len(self.where) == sum(self.where.get(block) > 0 for block in BLOCKS)

    @rule(chain=chains, end=places)
    def read(self, chain, end):
        masks = [self.masks[block] for block in chain[:end]]
        known = masks.index(0) if 0 in masks else end
        read = [mask for mask, blocks in self.where.stretches(chain[:end]) for _ in range(blocks)]
        assert [mask & ~self.retired for mask in read[:known]] == masks[:known]
        assert self.retired or len(read) == known

    def teardown(self):
        while self.retired:
            self.tidy()
            self.blocks_lie_where_they_should()
        assert not self.where.tidy()
        self.patch.undo()


TestLocationsMachine = LocationsMachine.TestCase
TestLocationsMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.fixture
def where():
    return Locations()


def test_a_chain_is_read_in_few_steps(where):
    where.mark(1, LONG)
    assert len(segments_of(where)) == len(list(where.stretches(LONG))) == -(-len(LONG) // SEGMENT_BLOCKS)


def test_blocks_that_go_one_by_one_from_the_end_leave_no_pieces(where):
    where.mark(1, LONG)
    for block in reversed(LONG):
        where.clear(1, (block,), 1)
        check(where)
        assert len(segments_of(where)) <= -(-len(where) // SEGMENT_BLOCKS)
    assert len(where) == 0


def test_retired_bits_go_slice_by_slice(where, monkeypatch):
    monkeypatch.setattr(locations, "SLICE_STEPS", 1)
    where.mark(1, LONG)
    where.mark(2, LONG[:200])
    where.retire(1)
    sizes = [len(where)]
    while not where.tidy():
        sizes.append(len(where))
        check(where)
    assert len(sizes) > len(LONG) // SEGMENT_BLOCKS
    assert max(before - now for before, now in pairwise(sizes)) <= SEGMENT_BLOCKS
    assert list(where.stretches(LONG)) == [(2, 64), (2, 64), (2, 64), (2, 8)]
    assert len(where) == 200


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
