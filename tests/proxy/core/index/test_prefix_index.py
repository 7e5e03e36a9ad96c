from array import array
from collections import Counter
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_adapter.types import Tier
from proxy.core.index import locations
from proxy.core.index.blocks import extend, namespace_root
from proxy.core.index.match import Match, in_chunks
from proxy.core.index.prefix_index import PrefixIndex
from tests.proxy.core.index.test_locations import check

ROOT = namespace_root("m")
DEPTH = 5
# Every chain of five blocks, of two kinds of token.
CHAINS = [extend(ROOT, array("i", tokens), None, 1) for tokens in product((0, 1), repeat=DEPTH)]
BLOCKS = sorted({block for chain in CHAINS for block in chain})


@pytest.fixture
def index():
    index = PrefixIndex()
    index.add_engine("a")
    index.add_engine("b")
    return index


def test_lower_tiers_may_give_back_whole_chunks_alone(index):
    for engine in "ab":
        index.store(engine, Tier.HOST, [1, 2, 3])
    index.set_chunk("a", 2)
    assert index.match([1, 2, 3]) == {"a": Match(host=2), "b": Match(host=3)}
    index.set_chunk("b", 4)
    assert index.match([1, 2, 3]) == {"a": Match(host=2)}
    index.wipe("a")
    index.store("a", Tier.HOST, [1])
    assert index.match([1, 2, 3]) == {"a": Match(host=1)}


def test_pending_blocks_begin_where_lower_tiers_give_nothing_back(index):
    index.store("a", Tier.HOST, [1, 2, 3])
    index.set_chunk("a", 2)
    index.add_pending("a", [1, 2, 3, 4])
    assert index.match([1, 2, 3, 4])["a"].blocks == 4
    index.end_pending("a", [1, 2, 3, 4])
    assert index.match([1, 2, 3, 4])["a"].blocks == 2
    index.set_chunk("a", 4)
    index.add_pending("a", [1, 2, 3, 4])
    assert index.match([1, 2, 3, 4])["a"].lead == 4


def test_no_tier_holds_a_dropped_block_and_none_is_expected(index):
    for tier in Tier:
        index.store("a", tier, [1, 2])
    index.store("b", Tier.GPU, [1])
    for _ in range(2):
        index.add_pending("a", [1, 2, 3])
    index.drop("a", iter([1, 2, 3]))
    assert index.match([1, 2, 3]) == {"b": Match(gpu=1)}
    assert index.counts("a") == (0, 0, 0, 0)
    for _ in range(2):
        index.end_pending("a", [1, 2, 3])
    assert len(index) == 1


class TestEngines:
    def test_wiping_or_removing_an_unknown_one_is_fine(self, index):
        index.wipe("x")
        index.remove_engine("x")

    def test_many_have_bits_of_their_own(self):
        index = PrefixIndex()
        names = [f"e{n}" for n in range(100)]
        for n, name in enumerate(names):
            index.add_engine(name)
            index.store(name, Tier.GPU, range(n + 1))
        assert {name: m.gpu for name, m in index.match(range(100)).items()} == {
            name: n + 1 for n, name in enumerate(names)
        }


class IndexMachine(RuleBasedStateMachine):
    """The index against dicts of sets."""

    ENGINES = ("a", "b", "c")
    engines = st.sampled_from(ENGINES)
    tiers = st.sampled_from(list(Tier))
    chains = st.sampled_from(CHAINS)
    places = st.integers(0, DEPTH)

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(locations, "SEGMENT_BLOCKS", 3)
        self.patch.setattr(locations, "SLICE_STEPS", 1)
        self.index = PrefixIndex()
        self.held = {engine: {tier: set() for tier in Tier} for engine in self.ENGINES}
        self.in_flight = {engine: [] for engine in self.ENGINES}
        for engine in self.ENGINES:
            self.index.add_engine(engine)

    def teardown(self):
        self.patch.undo()

    @rule(engine=engines, tier=tiers, chain=chains, start=places, end=places)
    def store(self, engine, tier, chain, start, end):
        self.index.store(engine, tier, chain[start:end], chain[start - 1] if start else None)
        self.held[engine][tier] |= set(chain[start:end])

    @rule(engine=engines, tier=tiers, blocks=st.lists(st.sampled_from(BLOCKS), max_size=6))
    def remove(self, engine, tier, blocks):
        self.index.remove(engine, tier, blocks)
        self.held[engine][tier] -= set(blocks)

    @rule(engine=engines, tier=tiers, chain=chains, end=places)
    def evict(self, engine, tier, chain, end):
        self.remove(engine, tier, chain[end:][::-1])

    @rule(engine=engines, chain=chains, end=places)
    def add_pending(self, engine, chain, end):
        chain = chain[:end]
        self.index.add_pending(engine, iter(chain))
        start = next((at for at, block in enumerate(chain) if not self.is_stored(engine, block)), len(chain))
        self.in_flight[engine].append((chain, start))

    @rule(engine=engines, at=st.integers(0, 5))
    def end_pending(self, engine, at):
        if self.in_flight[engine]:
            chain, _ = self.in_flight[engine][at % len(self.in_flight[engine])]
            self.index.end_pending(engine, chain)
            starts = [start for other, start in self.in_flight[engine] if other == chain]
            self.in_flight[engine].remove((chain, max(starts)))

    @rule(engine=engines, at=st.integers(0, 5))
    def served(self, engine, at):
        if self.in_flight[engine]:
            chain, _ = self.in_flight[engine][at % len(self.in_flight[engine])]
            self.index.served(engine, chain)
            self.held[engine][Tier.GPU] |= set(chain)
            starts = [start for other, start in self.in_flight[engine] if other == chain]
            self.in_flight[engine].remove((chain, max(starts)))

    @rule(engine=engines, chain=chains)
    def end_what_never_began(self, engine, chain):
        if chain not in [known for known, _ in self.in_flight[engine]]:
            self.index.end_pending(engine, chain)

    @rule(engine=engines, chain=chains, end=places)
    def served_what_never_began(self, engine, chain, end):
        if chain[:end] not in [known for known, _ in self.in_flight[engine]]:
            self.index.served(engine, chain[:end])
            self.held[engine][Tier.GPU] |= set(chain[:end])

    @rule(engine=engines)
    def wipe(self, engine):
        self.index.wipe(engine)
        self._forget(engine)

    @rule(engine=engines)
    def leave_and_return(self, engine):
        self.index.remove_engine(engine)
        self.index.add_engine(engine)
        self._forget(engine)

    def _forget(self, engine):
        self.held[engine] = {tier: set() for tier in Tier}
        self.in_flight[engine] = []

    def is_stored(self, engine, block):
        return any(block in self.held[engine][tier] for tier in Tier)

    def pending(self, engine):
        return {block for chain, start in self.in_flight[engine] for block in chain[start:]}

    def where(self, engine, block):
        for tier in Tier:
            if block in self.held[engine][tier]:
                return tier.value
        return "pending" if block in self.pending(engine) else None

    @rule(chain=chains, end=places)
    def match(self, chain, end):
        found = self.index.match(chain[:end])
        expected, leads = {}, {}
        for engine in self.ENGINES:
            places = [self.where(engine, block) for block in chain[:end]]
            places = places[: places.index(None)] if None in places else places
            if places:
                expected[engine] = Match(**Counter(places))
                pending = self.pending(engine)
                is_fast = [
                    place == "gpu" or block in pending for place, block in zip(places, chain, strict=False)
                ]
                leads[engine] = is_fast.index(False) if False in is_fast else len(places)
        assert found == expected
        assert {engine: match.lead for engine, match in found.items()} == leads

    @invariant()
    def blocks_lie_where_they_should(self):
        check(self.index._locations)

    @invariant()
    def counts_agree(self):
        known = set()
        for engine in self.ENGINES:
            for tier in Tier:
                assert self.index.held(engine, tier) == len(self.held[engine][tier])
                known |= self.held[engine][tier]
            pending = self.pending(engine)
            expected = len(pending - self.held[engine][Tier.GPU])
            assert self.index.counts(engine)[3] == expected
            held = [len(self.held[engine][tier]) for tier in Tier]
            assert self.index.counts(engine) == (*held, expected)
            known |= pending
            assert all(self.index.holds(engine, block) is self.is_stored(engine, block) for block in BLOCKS)
        left = self.index._locations.retired
        assert len(self.index) >= len(known) if left else len(self.index) == len(known)
        assert {slot for slot, engine in enumerate(self.index._slots) if not engine} == {
            *self.index._free,
            *(slot for slot in range(len(self.index._slots)) if left >> 4 * slot & 1),
        }


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_what_is_served_becomes_stored_unless_others_await_it(index):
    index.add_pending("a", (1, 2, 3))
    index.add_pending("a", (1, 2, 4))
    index.served("a", (1, 2, 3))
    assert index.match((1, 2, 4)) == {"a": Match(gpu=2, pending=1)}
    index.remove("a", Tier.GPU, (1, 2, 3))
    assert index.match((1, 2, 4)) == {"a": Match(pending=3)}
    index.served("a", (1, 2, 4))
    index.remove("a", Tier.GPU, (1, 2, 4))
    assert len(index) == 0


def test_matches_are_equal_by_tiers():
    assert {Match(gpu=1, lead=1), Match(gpu=1), Match(host=1)} == {Match(gpu=1), Match(host=1)}


@pytest.mark.parametrize(
    ("column", "ends", "match"),
    [
        ("2", [3], Match()),  # less than a chunk
        ("2", [9], Match(host=8)),
        ("4", [4], Match(disk=4)),
        ("12", [1, 5], Match(gpu=1)),  # the chunk that begins on the GPU is not there whole
        ("32", [1, 4], Match(gpu=1)),  # it is, and three blocks are not worth the way
        ("32", [1, 8], Match(gpu=1, host=7)),
        ("312", [5, 8, 16], Match(gpu=8, host=8)),
        ("312", [3, 5, 12], Match(gpu=5)),  # block 4 lies on the GPU alone
        ("1", [6], Match(gpu=6)),
        ("9832", [2, 5, 6, 12], Match(gpu=3, pending=3)),  # what is pending will be on the GPU
        ("302", [4, 6, 8], Match(gpu=4)),
        ("2a8", [4, 6, 8], Match(host=6, pending=2)),
    ],
)
def test_lower_tiers_give_back_whole_chunks(column, ends, match):
    """As vLLM 0.32's offloading connector with `blocks_per_chunk: 4`."""
    assert in_chunks(column, ends, 4) == match
