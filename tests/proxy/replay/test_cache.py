from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.blocks import Chain
from proxy.replay.cache import TieredCache

# Chains of a small tree: a block says all that goes before it.
PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(
    lambda letters: tuple("".join(letters[: n + 1]) for n in range(len(letters)))
)


def prompt(*hashes):
    """The blocks, and a tail."""
    return Chain(hashes, 10 * len(hashes) + 1, 10)


def serve(cache, hashes):
    taken = cache.take(prompt(*hashes), len(hashes))
    cache.fill(hashes, taken.gpu)
    cache.release(hashes, len(hashes))
    return taken


def test_what_leaves_the_gpu_goes_down_and_comes_back():
    cache = TieredCache(3, 2)
    serve(cache, (1, 2, 3))
    taken = serve(cache, (7, 8))
    assert (taken.evicted, taken.gone) == ([3, 2], [])
    assert cache.match(prompt(1, 2, 3)) == (1, 2)
    taken = serve(cache, (1, 2, 3))
    assert (taken.gpu, taken.host, taken.evicted, taken.gone) == (1, 2, [8, 7], [8, 7])
    assert cache.match(prompt(1, 2, 3)) == (3, 0)


@given(st.lists(st.tuples(PATHS, st.integers(0, 2)), max_size=40), st.integers(6, 9), st.integers(0, 9))
def test_room_is_kept_and_parents_outlive_children(prompts, gpu, host):
    cache = TieredCache(gpu, host)
    running = []
    for hashes, extra in prompts:
        blocks = len(hashes) + extra
        while (taken := cache.take(prompt(*hashes), blocks)) is None:
            cache.release(*running.pop(0))
        assert set(cache.fill(hashes, taken.gpu)) == set(hashes[taken.gpu :])
        running.append((hashes, blocks))
        assert cache.match(prompt(*hashes)) == (len(hashes), 0)
        assert cache.occupied <= gpu
        assert len(cache._host) <= host
        on_gpu = {*cache._idle, *cache._used}
        assert all(block[:-1] in on_gpu for block in on_gpu if len(block) > 1)
        assert not set(taken.evicted) & on_gpu
    for each in running:
        cache.release(*each)
    assert cache.occupied == cache.held
