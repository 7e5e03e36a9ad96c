"""The boundary up to which an engine with several KV cache groups reuses a prompt."""

from array import array
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvGroup,
    Tier,
    ViewCurrent,
)
from proxy.core.index.blocks import chain as chain_of
from proxy.core.index.blocks import namespace_root
from proxy.core.index.match import KvGroups, Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView

ROOT = namespace_root("m")
POOL = 4
N = 24  # blocks of the pool in a chain
WINDOW, OTHER_WINDOW = (KvGroup(number, Attention.WINDOW, 12) for number in (1, 2))


def reference(held, groups, sizes, n_tokens):
    """The same rule as vLLM's, block by block: `held[number]` are the blocks that a group holds."""
    alignment = lcm(*sizes.values())
    length = min(len(held[0]), (n_tokens - 1) // POOL) * POOL
    length = next(at for at, block in enumerate([*held[0], False]) if not block) * POOL
    length = min(length, (n_tokens - 1) // POOL * POOL) // (alignment * POOL) * alignment * POOL
    while True:
        before = length
        kinds = {}
        for group in groups:
            kinds.setdefault((group.attention, group.window, sizes[group]), []).append(group)
        for (attention, window, size), same in kinds.items():
            tokens = size * POOL
            blocks = [all(held[g.number][at] for g in same) for at in range(length // tokens)]
            length = hit(attention, window, tokens, blocks, alignment * POOL)
        if length == before:
            return length // POOL


def hit(attention, window, tokens, blocks, alignment):
    most = len(blocks)
    if attention is Attention.PREFIX:
        found = next((at for at, block in enumerate(blocks) if not block), most)
        return found * tokens // alignment * alignment
    if attention is Attention.STATE:
        ends = [at + 1 for at, block in enumerate(blocks) if block and (at + 1) * tokens % alignment == 0]
        return max(ends, default=0) * tokens
    if attention is Attention.CHUNK:
        found = most * tokens // window * window // tokens
        while found < most and blocks[found]:
            found += 1
        return found * tokens // alignment * alignment
    need, run = -(-(window - 1) // tokens), 0
    for at in range(most - 1, -1, -1):
        if not blocks[at]:
            run = 0
        elif run or (at + 1) * tokens % alignment == 0:
            run += 1
            if run >= need:
                return (at + run) * tokens
    return run * tokens


KINDS = st.sampled_from([*(set(Attention) - {Attention.UNKNOWN})])


@given(st.data(), st.integers(1, 3), st.integers(1, N * POOL + 2))
def test_it_is_where_vllm_finds_it(data, count, n_tokens):
    kinds = [data.draw(KINDS) for _ in range(count)]
    windowed = (Attention.WINDOW, Attention.CHUNK)
    groups = [
        KvGroup(at + 1, kind, data.draw(st.integers(1, 40)) if kind in windowed else 0)
        for at, kind in enumerate(kinds)
    ]
    sizes = {group: data.draw(st.sampled_from([1, 2, 3])) for group in groups}
    mostly = st.integers(0, 9).map(lambda dice: dice > 0)
    held = {0: [data.draw(mostly) for _ in range(N)]}
    known = KvGroups(POOL)
    for group in groups:
        blocks = N // sizes[group]
        held[group.number] = [data.draw(mostly) for _ in range(blocks)]
        known.add(group, sizes[group] * POOL, 1 << group.number)
    masks, ends = [], []
    for at in range(N):
        mask = 0
        for group in groups:
            own, size = held[group.number], sizes[group]
            if (at + 1) % size == 0 and own[(at + 1) // size - 1]:
                mask |= 1 << group.number
        masks.append(mask)
        ends.append(at + 1)
    leading = next((at for at, block in enumerate(held[0]) if not block), N)
    most = min(leading, (n_tokens - 1) // POOL)
    length, lacks = known.reach(masks, ends, most)
    assert length == reference(held, groups, sizes, n_tokens)
    assert (lacks is None) == (length == most // known.alignment * known.alignment)


class World:
    """An engine whose events arrive, one block an event."""

    def __init__(self, pool=POOL):
        self.index = PrefixIndex()
        self.index.add_engine("a")
        self.view = EngineView("a", self.index, lambda _salt, _lora: ROOT, pool)
        self.view.apply(CacheCleared())
        self.chain = chain_of(ROOT, array("i", range(N * POOL)), None, POOL)

    def store(self, group, blocks, size=POOL):
        for at in blocks:
            tokens = array("i", range(at * size, (at + 1) * size) if group is None else ())
            parent = None if at == 0 else at - 1
            self.view.apply(BlocksStored(Tier.GPU, parent, (at,), tokens, size, group=group))

    def remove(self, group, blocks):
        self.view.apply(BlocksRemoved(Tier.GPU, tuple(blocks), group))

    def match(self):
        return self.index.match(self.chain.hashes, self.chain.reusable).get("a", Match())


@pytest.fixture
def world():
    return World()


@pytest.fixture
def both(world):
    """Full attention and windows hold eight blocks."""
    world.store(None, range(8))
    world.store(WINDOW, range(8))
    return world


class TestEvents:
    @pytest.mark.parametrize(
        ("gone", "blocks"),
        [(range(7), 0), ([6], 6)],
        ids=["no window is left", "a window is whole before it"],
    )
    def test_a_prefix_is_reused_up_to_where_a_window_is_whole(self, both, gone, blocks):
        both.remove(WINDOW, gone)
        match = both.match()
        assert (match.blocks, match.gpu, match.lead) == (blocks, blocks, blocks)
        assert (match.cut, match.lacks) == (8 - blocks, Attention.WINDOW)

    def test_a_group_keeps_a_block_that_the_main_one_drops(self, both):
        both.remove(None, range(4, 8))
        both.store(None, range(4, 8))
        assert both.match().blocks == 8

    def test_what_a_group_drops_before_its_content_is_known_is_not_held(self, world):
        world.store(WINDOW, range(8))
        world.store(OTHER_WINDOW, range(8))
        world.remove(OTHER_WINDOW, [6, 7])
        assert world.view._waiting[7] == {WINDOW}
        world.remove(WINDOW, [7])
        assert 7 not in world.view._waiting
        world.store(None, range(8))
        assert world.match().blocks == 6

    def test_what_a_request_computes_again_is_pending(self, both):
        both.remove(WINDOW, [*range(5), 7])
        both.index.add_pending("a", both.chain.hashes[:8])
        match = both.match()
        assert (match.gpu, match.pending, match.lead, match.cut) == (0, 8, 8, 0)
        both.index.end_pending("a", both.chain.hashes[:8])
        assert (both.match().blocks, both.match().cut) == (0, 8)
        assert both.index.counts("a") == (8, 0, 0, 0)

    def test_a_request_in_flight_leaves_a_window_whole_at_its_end_alone(self, world):
        """vLLM keeps no other window, so that a prompt which shares less with it reuses nothing."""
        world.store(None, range(1))
        world.store(WINDOW, range(1))
        chain = world.chain.hashes
        world.index.add_pending("a", (*chain[:9], -10, -11, -12), 11)
        match = world.match()
        assert (match.blocks, match.pending, match.cut, match.lacks) == (1, 0, 8, Attention.WINDOW)
        # The next one finds that full attention goes further than the window, and leaves a window there.
        world.index.add_pending("a", chain[:20], 20)
        other = (*chain[:9], -20, -21)
        assert world.index.match(other, 11)["a"].blocks == 9
        match = world.match()
        assert (match.blocks, match.pending) == (20, 19)
        world.index.end_pending("a", chain[:20])
        assert world.index.match(other, 11)["a"].blocks == 1
        world.index.end_pending("a", (*chain[:9], -10, -11, -12))
        assert (world.match().blocks, world.match().cut) == (1, 0)
        assert not world.index._flights["a"].boundaries

    def test_a_group_that_keeps_all_blocks_will_have_them_too(self, world):
        chunk = KvGroup(1, Attention.CHUNK, 12)
        world.store(None, range(1))
        world.store(chunk, range(1))
        world.index.add_pending("a", (*world.chain.hashes[:9], -10, -11), 11)
        assert (world.match().blocks, world.match().pending) == (9, 8)

    def test_large_blocks_with_states(self, world):
        state = KvGroup(2, Attention.STATE)
        world.store(None, range(3), 4 * POOL)
        world.store(state, range(3), 4 * POOL)
        assert world.match().blocks == 12
        world.remove(state, [2])
        assert world.match().blocks == 8
        world.remove(state, [1, 0])
        assert (world.match().blocks, world.match().cut, world.match().lacks) == (0, 12, Attention.STATE)

    def test_nothing_is_left_of_an_engine_that_leaves(self, both):
        both.index.remove_engine("a")
        for _ in range(100):
            both.index.add_engine("b")
            both.index.store("b", Tier.GPU, [1])
            both.index.remove_engine("b")
        assert len(both.index) == 0

    def test_after_a_flush_groups_are_learned_again(self, both):
        both.view.apply(CacheCleared())
        assert both.match().blocks == 0
        both.store(None, range(8))
        assert both.match().blocks == 8  # it has only full attention so far
        both.store(WINDOW, range(8))
        both.remove(WINDOW, range(8))
        assert both.match().blocks == 0
        assert both.view.complete

    def test_blocks_that_wait_during_a_flush_are_held_by_groups_told_of_since(self, world):
        """kvpin's order to flush wipes the index before the engine's event says so."""
        world.store(WINDOW, range(8))
        world.store(OTHER_WINDOW, range(8))
        world.index.wipe("a")
        world.store(None, range(4))
        assert world.match() == Match(gpu=4)
        world.store(WINDOW, [8])
        world.store(None, range(4, 9))
        assert (world.match().blocks, world.match().lacks) == (9, None)
        assert world.view._waiting == {}

    def test_blocks_that_a_group_drops_during_a_flush_wait_no_longer(self, world):
        world.store(WINDOW, range(8))
        world.index.wipe("a")
        world.remove(WINDOW, range(8))
        world.store(WINDOW, [8])
        world.store(None, range(8))
        assert world.match().blocks == 0
        assert world.view._waiting == {8: {WINDOW}}

    def test_a_group_of_an_unknown_kind_changes_nothing_and_is_never_firm(self, world):
        unknown = KvGroup(1, Attention.UNKNOWN)
        world.store(None, range(8))
        world.store(unknown, range(3))
        assert world.match() == Match(gpu=8)
        assert not world.view.complete
        world.view.apply(ViewCurrent())
        assert not world.view.complete

    def test_blocks_that_end_inside_the_pools_are_marked_nowhere(self):
        world = World(pool=4 * POOL)
        world.store(None, range(8))
        names = tuple(range(8))
        world.view.apply(BlocksStored(Tier.GPU, None, names, array("i"), POOL, group=WINDOW))
        world.view.apply(ViewCurrent())
        assert (len(world.index), world.view.complete) == (2, False)
        world.remove(WINDOW, names)
        assert world.index.counts("a") == (2, 0, 0, 0)
        world.view.apply(CacheCleared())
        world.index.store("a", Tier.GPU, [1])
        assert len(world.index) == 1

    def test_what_a_group_holds_on_other_tiers_does_not_count(self, world):
        world.store(None, range(8))
        world.view.apply(BlocksStored(Tier.HOST, None, tuple(range(8)), array("i"), POOL, group=WINDOW))
        assert (world.match(), world.index.groups_of("a")) == (Match(gpu=8), None)
        world.store(WINDOW, range(8))
        world.view.apply(BlocksRemoved(Tier.HOST, tuple(range(8)), WINDOW))
        assert world.match() == Match(gpu=8)

    def test_a_block_of_two_groups_stays_known_until_both_drop_it(self, both):
        both.store(OTHER_WINDOW, range(8))
        both.remove(None, range(8))
        both.remove(WINDOW, range(8))
        assert len(both.view._ends) == 8
        both.remove(OTHER_WINDOW, range(8))
        assert (both.view._waiting, both.view._ends, len(both.index)) == ({}, {}, 0)

    def test_the_blocks_that_wait_are_bounded(self, world, monkeypatch):
        monkeypatch.setattr("proxy.core.index.view.MAX_WAITING", 2)
        world.store(WINDOW, range(8))
        assert len(world.view._waiting) == 2
        world.store(None, range(8))
        assert world.match().blocks < 8  # at worst, less is predicted


SEGMENTS = st.lists(st.sampled_from([(0, 4), (4, 8), (8, 12), (3, 9)]), max_size=3)
HELD = st.tuples(
    st.sampled_from([0, 8, 8, 12]),
    st.sampled_from([Tier.GPU, Tier.GPU, Tier.GPU, Tier.HOST]),
    st.sampled_from([(), (WINDOW,), (WINDOW,), (WINDOW, KvGroup(2, Attention.STATE))]),
    st.sampled_from([None, None, None, 10, 14]),
    SEGMENTS,
)


@given(st.lists(HELD, min_size=1, max_size=6), st.sampled_from([None, 7, 11]))
def test_each_engine_is_matched_as_if_it_were_alone(engines, most):
    chain = chain_of(ROOT, array("i", range(N * POOL)), None, POOL)

    def fill(index, name, held):
        blocks, tier, groups, asked, kept = held
        index.add_engine(name)
        index.store(name, tier, chain.hashes[:blocks])
        for group in groups:
            index.add_group(name, group, POOL, POOL)
            for first, end in kept:
                index.store_group(name, group, chain.hashes[first:end])
        if asked is not None:
            index.add_pending(name, chain.hashes[:asked])

    def seen(match):
        return match and (match.gpu, match.host, match.pending, match.lead, match.cut, match.lacks)

    together = PrefixIndex()
    for at, held in enumerate(engines):
        fill(together, str(at), held)
    found = together.match(chain.hashes, most)
    for at, held in enumerate(engines):
        alone = PrefixIndex()
        fill(alone, "e", held)
        assert seen(found.get(str(at))) == seen(alone.match(chain.hashes, most).get("e"))
