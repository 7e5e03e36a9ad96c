from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.types import BlocksRemoved, BlocksStored, CacheCleared, Tier, ViewLost, ViewResumed
from proxy.core.index import view as module
from proxy.core.index.blocks import extend, namespace_root
from proxy.core.index.match import Match
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.runs import KeptRun
from proxy.core.index.view import SLICE_TOKENS, EngineView, slices

SIZE = 4  # tokens per block of the pool


def root_of(salt, lora=None):
    return namespace_root("m", lora=lora, salt=salt)


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


def test_chunks_of_lower_tiers_count_in_blocks_of_the_pool(view, index):
    """Two engine blocks of six tokens are three pool blocks of four."""
    event = stored([1, 2], range(12), tier=Tier.HOST, size=6)
    view.apply(msgspec.structs.replace(event, per_chunk=2))
    assert index.match(hashes_of(range(12))) == {"e": Match(host=3)}
    assert index.match(hashes_of([*range(8), *range(4)])) == {}


def test_a_chunk_of_which_one_block_is_named_is_not_known_whole(view, index):
    view.apply(stored([1, 2], range(8)))
    view.apply(BlocksStored(Tier.HOST, None, (2,), array("i"), 0, per_chunk=2))
    view.apply(BlocksRemoved(Tier.GPU, (2,)))
    assert index.match(hashes_of(range(8))) == {"e": Match(gpu=1)}


class TestStore:
    def test_salts_and_extra_ids_are_part_of_it(self, view, index):
        extra = array("Q", [9, 0, 0, 0])
        view.apply(stored([1], range(4), salt="s"))
        view.apply(stored([2], range(4), extra=extra))
        assert index.match(hashes_of(range(4))) == {}
        assert index.match(hashes_of(range(4), salt="s")) == {"e": Match(gpu=1)}
        assert index.match(hashes_of(range(4), extra)) == {"e": Match(gpu=1)}

    @pytest.mark.parametrize(
        ("names", "tokens", "size"),
        [([1, 2], range(4), 4), ([1], range(8), 4), ([1], [], 4), ([1], range(4), 0)],
        ids=["too few tokens", "too many tokens", "no tokens", "no size"],
    )
    def test_blocks_whose_content_cannot_be_told_are_orphans(self, view, index, names, tokens, size):
        view.apply(stored(names, tokens, size=size))
        view.apply(BlocksRemoved(Tier.GPU, tuple(names)))
        assert (len(index), view.counts.orphaned, view.counts.removed) == (0, 1, 0)


@pytest.mark.parametrize("event", [CacheCleared(), ViewLost("restart"), ViewResumed()])
def test_a_cleared_cache_forgets_this_engine_only(view, index, event):
    other = EngineView("other", index, root_of, SIZE)
    for each in (view, other):
        each.apply(stored([1], range(4)))
    view.apply(event)
    assert index.match(hashes_of(range(4))) == {"other": Match(gpu=1)}
    view.apply(stored([2], range(4, 8), parent=1))
    assert view.counts.orphaned == 1


def test_what_was_learned_otherwise_is_no_holder(view, index):
    index.store("e", Tier.GPU, hashes_of(range(8)))
    view.apply(stored([1], range(8), size=8))
    view.apply(BlocksRemoved(Tier.GPU, (1,)))
    assert len(index) == 0


def test_markers_of_images_are_gathered_from_blocks_smaller_than_the_pools(view, index):
    extra = array("Q", [0, 0, 5, 0])
    view.apply(stored([1, 2], range(2), size=1))
    view.apply(stored([3], [2], size=1, parent=2, extra=array("Q", [5])))
    view.apply(stored([4], [3], size=1, parent=3))
    assert index.match(hashes_of(range(4), extra)) == {"e": Match(gpu=1)}
    assert index.match(hashes_of(range(4))) == {}


def test_what_is_recalled_is_bounded(view, index, monkeypatch):
    def named(*names):
        """A store without tokens: an offload of blocks that were stored before."""
        return BlocksStored(Tier.HOST, None, names, array("i"), 0)

    monkeypatch.setattr(module, "MAX_RECALLED", 3)
    view.apply(named(0))
    view.apply(stored(range(1, 6), range(20)))
    view.apply(BlocksRemoved(Tier.GPU, (1, 2, 3, 4, 5)))
    view.apply(named(1, 2, 3, 4, 5))
    assert index.held("e", Tier.HOST) == 3


def test_a_name_with_other_content_is_another_block(view, index):
    """A name proves nothing: the block it stood for before is gone."""
    view.apply(stored([1, 2], range(8)))
    view.apply(stored([1], range(4), tier=Tier.HOST))
    view.apply(stored([1], range(50, 54)))
    assert index.match(hashes_of(range(4))) == {}
    assert index.match(hashes_of(range(50, 54))) == {"e": Match(gpu=1)}
    view.apply(BlocksRemoved(Tier.GPU, (1, 2)))
    assert len(index) == 0


@pytest.mark.parametrize("blocks", [1, 60])
def test_memory_is_bounded_by_what_the_engine_holds(view, blocks):
    """Runs that keep only their first block keep little else."""
    for n in range(2_000):
        first = n * 64
        view.apply(stored(range(first, first + blocks), range(first, first + blocks), size=1))
        view.apply(BlocksRemoved(Tier.GPU, tuple(range(first + blocks - 1, first, -1))))
    runs = {run for here in view._runs for run in here.values()}
    assert (sum(map(len, view._runs)), len(runs)) == (2_000, 2_000)
    assert sum(len(run.names) for run in runs) == 2_000


# --- against a naive model ------------------------------------------------------------------------

LENGTH = 24


class NaiveEngine:
    """Blocks are the tokens from the start of the prompt to their end; so are entries."""

    def __init__(self, size):
        self.size = size
        self.tiers = {tier: set() for tier in Tier}
        self.recalled = None

    def holds(self, block):
        return any(block in held for held in self.tiers.values())

    def store(self, tier, blocks):
        self.tiers[tier].update(blocks)

    def store_named(self, tier, blocks):
        self.recalled = set() if self.recalled is None else self.recalled
        known = {block for block in blocks if self.holds(block) or block in self.recalled}
        self.recalled -= known
        self.tiers[tier] |= known

    def remove(self, tier, blocks):
        for block in set(blocks) & self.tiers[tier]:
            self.tiers[tier].discard(block)
            if self.recalled is not None and not self.holds(block) and not self.size % SIZE:
                self.recalled.add(block)

    def entries(self, tier):
        return {
            block[:end]
            for block in self.tiers[tier]
            for end in range(SIZE, LENGTH + 1, SIZE)
            if len(block) - self.size < end <= len(block)
        }


class Worlds:
    """A view and the naive model of its engine, told the same."""

    def __init__(self, size, prompts):
        self.size, self.prompts, self.told = size, prompts, []
        self.index = PrefixIndex()
        self.index.add_engine("e")
        self.view, self.naive = EngineView("e", self.index, root_of, SIZE), NaiveEngine(size)

    def restart(self, kept):
        """Another kvpin takes over what the view knew. It does not know what was removed lately."""
        self.index = PrefixIndex()
        self.index.add_engine("e")
        self.view = EngineView("e", self.index, root_of, SIZE)
        for run in kept:
            self.view.restore(run)
        self.naive.recalled = None

    def apply(self, event, *, sliced):
        self.told.append(event)
        for part in slices(event) if sliced else [event]:
            self.view.apply(part)

    def step(self, kind, which, tier, first, count, *, sliced):
        blocks = [self.prompts[which][:end] for end in range(self.size, LENGTH + 1, self.size)]
        blocks = blocks[first : first + count]
        names = tuple(repr(block).encode() for block in blocks)
        if kind == "clear":
            self.view.apply(CacheCleared())
            self.naive = NaiveEngine(self.size)
        elif kind == "restart":
            self.restart(kept_of(self.view))
        elif kind == "remove":
            self.apply(BlocksRemoved(tier, names), sliced=sliced)
            self.naive.remove(tier, blocks)
        elif kind == "named":
            self.apply(BlocksStored(tier, None, names, array("i"), 0), sliced=sliced)
            self.naive.store_named(tier, blocks)
        elif blocks:
            self.store(tier, blocks, names, sliced=sliced)

    def store(self, tier, blocks, names, *, sliced):
        start = len(blocks[0]) - self.size
        parent = repr(blocks[0][:start]).encode() if start else None
        event = stored(names, blocks[-1][start:], parent=parent, tier=tier, size=self.size)
        self.apply(event, sliced=sliced)
        # Where what the run follows is not known, a slice of it may follow what is.
        step = 2 if sliced else LENGTH
        for at in range(0, len(blocks), step):
            before = blocks[at][: -self.size]
            if not before or self.naive.holds(before):
                self.naive.store(tier, blocks[at : at + step])

    def check(self):
        entries = {tier: self.naive.entries(tier) for tier in Tier}
        for prompt in self.prompts:
            expected = dict.fromkeys(Tier, 0)
            for end in range(SIZE, LENGTH + 1, SIZE):
                tier = next((t for t in Tier if prompt[:end] in entries[t]), None)
                if tier is None:
                    break
                expected[tier] += 1
            match = self.index.match(hashes_of(prompt)).get("e", Match())
            assert (match.gpu, match.host, match.disk) == tuple(expected.values())
        assert [self.index.held("e", tier) for tier in Tier] == [len(entries[tier]) for tier in Tier]
        held = set().union(*self.naive.tiers.values())
        assert {name for here in self.view._runs for name in here} == {repr(block).encode() for block in held}


def kept_of(view):
    """What a view knows, as it is after it was written to a file and read."""
    return msgspec.msgpack.decode(
        msgspec.msgpack.encode([run.kept() for run in view.runs()]), type=list[KeptRun]
    )


def branching(forks):
    """Prompts, each of which goes its own way from some token on of the one before."""
    prompts = [(0,) * LENGTH]
    for number, fork in enumerate(forks, 1):
        prompts.append(prompts[-1][:fork] + (number,) * (LENGTH - fork))
    return prompts


prompts = st.lists(st.integers(1, LENGTH - 1), min_size=3, max_size=3).map(branching)
step = st.tuples(
    st.sampled_from([*["store"] * 12, *["remove"] * 6, *["named"] * 2, "clear", "restart"]),
    st.integers(0, 3),  # which prompt
    st.sampled_from([Tier.GPU, Tier.GPU, *Tier]),
    st.sampled_from([0, 0, 0, 1, 2, 5, 11]),  # first block, and how many, as far as there are so many
    st.sampled_from([LENGTH, LENGTH, 1, 2, 7]),
    st.booleans(),  # in slices
)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), prompts, st.lists(step, min_size=10, max_size=30))
def test_events_in_any_order_give_the_index_of_a_naive_model(size, chosen, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_TOKENS", 2 * size)
        patch.setattr(module, "SLICE_NAMES", 2)
        worlds = Worlds(size, chosen)
        for *step, sliced in steps:
            worlds.step(*step, sliced=sliced)
            worlds.check()


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 3, 4, 8]),
    prompts,
    st.lists(step, min_size=10, max_size=30),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_after_a_restart_nothing_is_claimed_that_is_not_held(size, chosen, steps, position, later):
    """The view is kept later than the events that are replayed begin: the reader knows some of them."""
    worlds, kept, read = Worlds(size, chosen), [], 0
    for at, (*step, sliced) in enumerate(step for step in steps if step[0] not in ("restart", "clear")):
        if at == position:
            read = len(worlds.told)
        worlds.step(*step, sliced=sliced)
        if at == position + later:
            kept = kept_of(worlds.view)
    told, exact = worlds.told[read:] if kept else worlds.told, worlds.view
    worlds.restart(kept)
    for event in told:
        worlds.view.apply(event)
    names = [{name for here in view._runs for name in here} for view in (worlds.view, exact)]
    assert names[0] <= names[1]
    for tier in Tier:
        assert worlds.index.held("e", tier) <= len(worlds.naive.entries(tier))


def long_run(blocks, size, **changes):
    fields = {"parent": 7, "hashes": tuple(range(100, 100 + blocks)), "salt": "s"} | changes
    return BlocksStored(Tier.GPU, token_ids=array("i", range(blocks * size)), tokens_per_block=size, **fields)


def test_a_long_run_becomes_runs_that_follow_each_other():
    step = SLICE_TOKENS // 32
    extra_ids = array("Q", range(32 * (step + 2)))
    parts = list(slices(long_run(step + 2, 32, extra_ids=extra_ids)))
    assert [part.parent for part in parts] == [7, 100 + step - 1]
    assert [len(part.hashes) for part in parts] == [step, 2]
    assert sum((part.token_ids for part in parts), array("i")) == array("i", range(32 * (step + 2)))
    assert sum((part.extra_ids for part in parts), array("Q")) == extra_ids
