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


def serve(cache, hashes, blocks=None):
    blocks = len(hashes) if blocks is None else blocks
    taken = cache.take(prompt(*hashes), blocks)
    cache.fill(hashes, taken.gpu)
    cache.release(hashes, blocks)
    return taken


def test_the_end_of_the_prompt_used_longest_ago_goes_first():
    cache = TieredCache(5)
    serve(cache, (1, 2, 3))
    serve(cache, (7, 8))
    assert serve(cache, (9,)).evicted == [3]
    serve(cache, (1,))
    assert serve(cache, (10, 11)).evicted == [2, 8]


def test_what_is_in_use_stays_and_others_wait():
    cache = TieredCache(5)
    cache.take(prompt(1, 2, 3), 4)
    cache.fill((1, 2, 3), 0)
    assert cache.take(prompt(7, 8), 2) is None
    taken = cache.take(prompt(1, 2, 9), 3)
    assert (taken.gpu, taken.evicted, cache.occupied) == (2, [], 5)
    cache.fill((1, 2, 9), 2)
    cache.release((1, 2, 3), 4)
    assert (cache.match(prompt(1, 2, 3)), cache.occupied) == ((3, 0), 4)
    assert cache.take(prompt(7, 8), 2).evicted == [3]


def test_what_leaves_the_gpu_goes_down_and_comes_back():
    cache = TieredCache(3, 2)
    serve(cache, (1, 2, 3))
    taken = serve(cache, (7, 8))
    assert (taken.evicted, taken.gone) == ([3, 2], [])
    assert cache.match(prompt(1, 2, 3)) == (1, 2)
    taken = serve(cache, (1, 2, 3))
    assert (taken.gpu, taken.host, taken.evicted, taken.gone) == (1, 2, [8, 7], [8, 7])
    assert cache.match(prompt(1, 2, 3)) == (3, 0)


def test_the_host_tier_forgets_what_went_down_first():
    cache = TieredCache(1, 2)
    for block in (1, 2, 3):
        serve(cache, (block,))
    assert serve(cache, (4,)).gone == [1]
    assert [cache.match(prompt(block)) for block in (1, 2, 3, 4)] == [(0, 0), (0, 1), (0, 1), (1, 0)]


def test_a_host_tier_smaller_than_what_goes_down_at_once():
    cache = TieredCache(3, 1)
    serve(cache, (1, 2, 3))
    taken = serve(cache, (7, 8, 9))
    assert (taken.evicted, taken.gone) == ([3, 2, 1], [3, 2])


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
