from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.core.index.blocks import Chain
from proxy.core.index.prefix_index import PrefixIndex

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
