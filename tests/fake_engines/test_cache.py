from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engines.cache import CachePrompt, Media, Namespace, PageCache

PAGE = 4


class Listener:
    """The pages that events say are there, and everything that was told."""

    def __init__(self):
        self.held, self.log = {}, []

    def stored(self, run):
        assert len(run.tokens) == PAGE * len(run.hashes) == PAGE * len(run.media)
        assert run.parent is None or run.parent in self.held
        for at, name in enumerate(run.hashes):
            assert name not in self.held
            self.held[name] = run.tokens[at * PAGE : (at + 1) * PAGE]
        self.log.append(run)

    def removed(self, hashes):
        for name in hashes:
            del self.held[name]

    def cleared(self):
        self.held.clear()


def prompt(tokens, salt=None, lora=None, media=()):
    return CachePrompt(tuple(tokens), Namespace(salt, lora), media)


def cache_of(capacity=100):
    listener = Listener()
    return PageCache(PAGE, capacity, listener), listener


def run(cache, asked, output=()):
    running = cache.begin(asked)
    for token in output:
        running.append(token)
    running.close()
    return running.cached_tokens


def test_the_last_token_is_always_computed():
    cache, _ = cache_of()
    assert run(cache, prompt(range(9))) == 0
    assert [run(cache, prompt(range(length))) for length in (4, 5, 8, 9)] == [0, 4, 4, 8]


def test_decoding_fills_pages_and_its_last_token_has_no_kv():
    cache, _ = cache_of()
    run(cache, prompt(range(6)), output=[90, 91])
    assert cache.match(prompt([*range(6), 90, 91, 5])) == 4
    run(cache, prompt(range(6)), output=[90, 91, 92])
    assert cache.match(prompt([*range(6), 90, 91, 5])) == 8


def test_namespaces_and_media_share_nothing():
    cache, _ = cache_of()
    run(cache, prompt(range(20)))
    image = (Media("cat", 5, 6),)
    others = [prompt(range(20), salt="s"), prompt(range(20), lora="s"), prompt(range(20), media=image)]
    assert [cache.match(other) for other in others] == [0, 0, 4]
    run(cache, others[2])
    assert cache.match(prompt(range(20), media=(Media("dog", 5, 6),))) == 4
    assert others[2].media_of(8, 12) == (("cat", -3),)


def test_what_runs_stays_and_the_oldest_leaf_leaves():
    cache, listener = cache_of(capacity=4)
    held = cache.begin(prompt(range(9)))
    run(cache, prompt(range(50, 58)))
    run(cache, prompt(range(70, 74)))
    assert cache.match(prompt(range(9))) == 8
    assert [cache.match(prompt(range(50, 50 + n))) for n in (5, 9)] == [4, 4]
    run(cache, prompt(range(80, 100)))
    assert len(cache) == len(listener.held) == 4
    assert not cache.reset()
    held.close()
    assert cache.reset()
    assert not listener.held


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=20), st.sampled_from(["a", None])))
)
def test_events_tell_the_cache(requests):
    cache, listener = cache_of(capacity=6)
    for tokens, salt in requests:
        before = cache.match(prompt(tokens, salt))
        assert run(cache, prompt(tokens, salt), output=[7, 8, 9]) == before
        assert set(listener.held) == set(cache._pages)
        assert not cache.used
    children = Counter(page.parent for page in cache._pages.values())
    assert all(children[page] == page.children for page in cache._pages.values())
