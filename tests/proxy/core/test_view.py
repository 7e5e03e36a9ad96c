from array import array
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.types import BlocksRemoved, BlocksStored, CacheCleared, Tier, ViewCurrent, ViewLost
from proxy.core.blocks import extend, namespace_root
from proxy.core.index import Match, PrefixIndex
from proxy.core.view import EngineView

SIZE = 4  # tokens per block of the pool


def root_of(salt, adapter=None):
    return namespace_root("m", adapter=adapter, salt=salt)


def hashes_of(tokens, extra=None, salt=None):
    return extend(root_of(salt), array("i", tokens), extra, SIZE)


def stored(names, tokens, *, parent=None, tier=Tier.GPU, size=SIZE, extra=None, salt=None):
    return BlocksStored(tier, parent, tuple(names), array("i", tokens), size, extra, salt)


@pytest.fixture
def index():
    index = PrefixIndex()
    index.add_engine("other")
    index.add_engine("e")
    return index


@pytest.fixture
def view(index):
    return EngineView("e", index, root_of, SIZE)


class TestStore:
    def test_blocks_are_found_by_their_tokens(self, view, index):
        view.apply(stored([71, b"72"], range(8)))
        assert index.match(hashes_of(range(8))) == {"e": Match(gpu=2)}
        assert view.counts.stored == 2

    def test_a_run_follows_its_parent(self, view, index):
        view.apply(stored([71], range(4)))
        view.apply(stored([b"x", 73], range(4, 12), parent=71))
        assert index.match(hashes_of(range(12))) == {"e": Match(gpu=3)}

    def test_an_unknown_parent_makes_an_orphan_and_so_are_its_children(self, view, index):
        view.apply(stored([72], range(4), parent=71))
        view.apply(stored([73], range(4), parent=72))
        assert (len(index), view.counts.orphaned, view.counts.stored) == (0, 2, 0)

    def test_salts_and_extra_ids_are_part_of_it(self, view, index):
        extra = array("Q", [9, 0, 0, 0])
        view.apply(stored([1], range(4), salt="s"))
        view.apply(stored([2], range(4), extra=extra))
        assert index.match(hashes_of(range(4))) == {}
        assert index.match(hashes_of(range(4), salt="s")) == {"e": Match(gpu=1)}
        assert index.match(hashes_of(range(4), extra)) == {"e": Match(gpu=1)}

    def test_the_same_engine_hash_means_nothing_beyond_the_engine(self, view, index):
        other = EngineView("other", index, root_of, SIZE)
        view.apply(stored([1], range(4)))
        other.apply(stored([1], range(50, 54)))
        assert index.match(hashes_of(range(4))) == {"e": Match(gpu=1)}

    @pytest.mark.parametrize(
        ("names", "tokens", "size"),
        [([1], range(6), 6), ([1], range(2), 2), ([1, 2], range(4), 4), ([1], range(8), 4), ([1], [], 4)],
        ids=["no multiple", "smaller", "too few tokens", "too many tokens", "no tokens"],
    )
    def test_blocks_whose_content_cannot_be_told_are_orphans(self, view, index, names, tokens, size):
        view.apply(stored(names, tokens, size=size))
        view.apply(BlocksRemoved(Tier.GPU, tuple(names)))
        assert (len(index), view.counts.orphaned, view.counts.removed) == (0, 1, 0)


class TestLargerBlocks:
    def test_one_becomes_several(self, view, index):
        view.apply(stored([1, 2], range(24), size=12))
        assert index.match(hashes_of(range(24))) == {"e": Match(gpu=6)}
        view.apply(BlocksRemoved(Tier.GPU, (2,)))
        assert index.match(hashes_of(range(24))) == {"e": Match(gpu=3)}
        assert len(index) == 3

    def test_a_child_follows_the_last_of_them(self, view, index):
        view.apply(stored([1], range(8), size=8))
        view.apply(stored([2], range(8, 16), size=8, parent=1))
        assert index.match(hashes_of(range(16))) == {"e": Match(gpu=4)}


class TestRemove:
    def test_a_block_on_two_tiers_leaves_one(self, view, index):
        view.apply(stored([1], range(4)))
        view.apply(stored([1], range(4), tier=Tier.HOST))
        view.apply(BlocksRemoved(Tier.GPU, (1,)))
        assert index.match(hashes_of(range(4))) == {"e": Match(host=1)}
        view.apply(stored([2], range(4, 8), parent=1))
        assert index.match(hashes_of(range(8))) == {"e": Match(gpu=1, host=1)}

    def test_one_that_left_every_tier_is_no_parent_any_more(self, view, index):
        view.apply(stored([1], range(4)))
        view.apply(BlocksRemoved(Tier.GPU, (1,)))
        view.apply(stored([2], range(4, 8), parent=1))
        assert (len(index), view.counts.orphaned, view.counts.removed) == (0, 1, 1)

    def test_an_unknown_one_is_fine(self, view):
        view.apply(BlocksRemoved(Tier.GPU, (1, b"2")))
        assert view.counts.removed == 0


@pytest.mark.parametrize("event", [CacheCleared(), ViewLost("restart")])
def test_a_cleared_cache_forgets_this_engine_only(view, index, event):
    other = EngineView("other", index, root_of, SIZE)
    for each in (view, other):
        each.apply(stored([1], range(4)))
    view.apply(event)
    assert index.match(hashes_of(range(4))) == {"other": Match(gpu=1)}
    view.apply(stored([2], range(4, 8), parent=1))
    assert view.counts.orphaned == 1


def test_being_current_changes_nothing(view, index):
    view.apply(stored([1], range(4)))
    view.apply(ViewCurrent())
    assert len(index) == 1


# --- against a naive model ------------------------------------------------------------------------

CHILDREN = 2
NODES = [path for depth in range(4) for path in product(range(CHILDREN), repeat=depth)]


class NaiveEngine:
    """A tree of blocks, told apart by their path; a path's name is itself. Blocks have 8 tokens."""

    def __init__(self):
        self.tiers = {tier: set() for tier in Tier}

    @staticmethod
    def tokens(path):
        return [10 * depth + step for depth, step in enumerate(path) for _ in range(8)]

    def known(self, path):
        return any(path in held for held in self.tiers.values())


operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(NODES[1:]), st.sampled_from(list(Tier))),
        st.tuples(st.just("remove"), st.sampled_from(NODES[1:]), st.sampled_from(list(Tier))),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_events_in_any_order_give_the_index_of_a_naive_model(steps):
    index = PrefixIndex()
    index.add_engine("e")
    view, naive = EngineView("e", index, root_of, SIZE), NaiveEngine()
    for kind, path, tier in steps:
        if kind == "clear":
            view.apply(CacheCleared())
            naive = NaiveEngine()
        elif kind == "remove":
            view.apply(BlocksRemoved(tier, (repr(path).encode(),)))
            naive.tiers[tier].discard(path)
        else:
            parent = repr(path[:-1]).encode() if path[:-1] else None
            tokens = naive.tokens(path)[-8:]
            view.apply(stored([repr(path).encode()], tokens, parent=parent, tier=tier, size=8))
            if not path[:-1] or naive.known(path[:-1]):
                naive.tiers[tier].add(path)
    for path in NODES[1:]:
        expected = {"gpu": 0, "host": 0, "disk": 0}
        for depth in range(1, len(path) + 1):
            tier = next((t for t in Tier if path[:depth] in naive.tiers[t]), None)
            if tier is None:
                break
            expected[tier.value] += 2
        match = index.match(hashes_of(naive.tokens(path))).get("e", Match())
        assert match == Match(**expected)
    for tier in Tier:
        assert index.held("e", tier) == 2 * len(naive.tiers[tier])
