from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.core.index.blocks import Chain
from proxy.core.index.prefix_index import PrefixIndex
from tests.proxy.replay.making import SIZE as BLOCK
from tests.proxy.replay.making import Diary, ask

SIZE = 10
NAMES = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def made(*room, **of_groups):
    from hybrid_cache import HybridCache

    return HybridCache(*room, **of_groups)


def prompt(*hashes, tail=1):
    """The blocks, and a tail."""
    return Chain(hashes, SIZE * len(hashes) + tail, SIZE)


def chain_of(letters):
    """A path of a small tree: a block says all that goes before it."""
    return tuple(int("1" + "".join(map(str, letters[: n + 1]))) for n in range(len(letters)))


@given(st.lists(NAMES, max_size=30), st.integers(1, 3), st.integers(1, 3), st.integers(40, 70))
def test_its_events_say_what_it_reuses(prompts, groups, window_blocks, room):
    cache, index = made(room, groups, window_blocks), PrefixIndex()
    index.add_engine("e")
    numbered = [KvGroup(at, Attention.WINDOW, window_blocks * SIZE + 1) for at in range(groups)]
    for group in numbered:
        index.add_group("e", group, SIZE, SIZE)

    def hear(change):
        index.store("e", Tier.GPU, getattr(change, "new", ()))
        index.remove("e", Tier.GPU, change.evicted)
        for group in numbered:
            index.store_group("e", group, tuple(getattr(change, "new_in_window", ())))
            index.remove_group("e", group, tuple(change.out_of_window))

    running = []
    for letters in prompts:
        hashes = chain_of(letters)
        asked = prompt(*hashes, tail=len(letters) % 2)
        match = index.match(hashes, asked.reusable).get("e")
        while (taken := cache.take(asked, len(hashes) + 1)) is None:
            cache.release(*running.pop(0))
        assert taken.gpu == min(match.gpu if match else 0, asked.reusable)
        hear(taken)
        hear(cache.fill(hashes, taken.gpu, taken.boundaries))
        assert cache.match(prompt(*hashes)) == (len(hashes), 0)
        assert cache.held == index.held("e", Tier.GPU) + index.groups_of("e").held
        assert cache.occupied <= room or not cache._idle
        running.append((hashes, len(hashes) + 1))
    for each in running:
        cache.release(*each)
    assert cache.occupied == cache.held


def test_what_a_simulated_engine_tells():
    from hybrid_cache import HybridModel

    diary = Diary()
    model = HybridModel(4 * BLOCK, prefill_tok_s=1000.0, window_groups=1, window_tokens=101)
    engine = model.engine(0, BLOCK, diary)  # 8 blocks of the pool
    engine.submit(0.0, ask((1, 2, 3), tail=0, name=1))
    engine.submit(0.0, ask((7, 8), tail=0, name=2))
    while engine.due < float("inf"):
        engine.advance(engine.due)
    assert diary.of("stored", "removed") == [("stored", "gpu", [1, 2, 3]), ("stored", "gpu", [7, 8])]
    told = [(is_new, list(hashes)) for is_new, hashes in engine.cache.windows]
    assert told == [(True, [2, 3]), (False, [2]), (True, [7, 8]), (False, [3])]
    assert engine.evicted == 0
