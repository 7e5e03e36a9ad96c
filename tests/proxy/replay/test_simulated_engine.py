from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.blocks import Chain
from proxy.replay.cache import TieredCache
from tests.proxy.replay.making import ask, model_of, play


class TestFifo:
    """10 blocks of room and a second for each 1000 tokens."""

    def test_events(self):
        engine, diary = play(model_of(4), ask((1, 2, 3), tail=0, name=1), ask((7, 8), tail=0, name=2))
        assert diary.lines == [
            ("started", 0.0, 1, 0, 0),
            ("stored", "gpu", [1, 2, 3]),
            ("first", 0.3, 1),
            ("finished", 0.3, 1),
            ("removed", "gpu", [3]),
            ("started", 0.3, 2, 0, 0),
            ("stored", "gpu", [7, 8]),
            ("first", 0.5, 2),
            ("finished", 0.5, 2),
        ]
        assert engine.evicted == 1

    def test_answers_take_neither_time_nor_room(self):
        model = model_of(2)
        assert model.fits(ask((1, 2), tail=0, output=1000))
        _, diary = play(model, ask((1,), tail=0, output=1000))
        assert diary.of("finished") == [("finished", 0.1, 0)]

    def test_a_host_tier_is_restored_before_the_prefill(self):
        _, diary = play(
            model_of(3, host=10), ask((1, 2), name=1), ask((7, 8), name=2), ask((1, 2), at=2.0, name=3)
        )
        assert ("stored", "host", [1, 2]) in diary.lines
        # One block of the three was the tail's, so 1 and 2 had to go: 200 tokens at 10,000 a second.
        assert diary.of("started")[2] == ("started", 2.0, 3, 0, 200)
        assert diary.of("first")[2] == ("first", 2.07, 3)

    def test_longer_contexts_take_longer(self):
        model = model_of(context_tokens=1000)
        assert model.prefill_s(0, 1000) == pytest.approx(1.5)
        assert model.prefill_s(0, 500) + model.prefill_s(500, 1000) == pytest.approx(1.5)
        _, diary = play(model, ask(range(9), tail=0), ask(range(9), tail=100, name=1))
        assert diary.of("first")[1] == ("first", pytest.approx(0.9 + 0.405 + 0.195), 1)


class TestChunked:
    """Steps take 0.1 s, with 100 tokens of prefill or without, and 0.1 s more for each stream."""

    def model(self, blocks=100, **options):
        given = {"chunk_tokens": 100, "step_s": 0.1, "stream_s": 0.1, **options}
        return model_of(blocks, chunked=True, **given)

    def test_a_stream_and_a_prefill_slow_each_other(self):
        _, diary = play(self.model(), ask((1,), tail=0, output=6, name=1), ask((7,), tail=0, at=0.1, name=2))
        # A step of both takes 0.2 s, of which one token is the stream's and 99 the prompt's.
        prompt_s = 100 / (99 / 0.2)
        left = 5 - prompt_s / 0.2
        assert diary.of("first", "finished") == [
            ("first", 0.1, 1),
            ("first", pytest.approx(0.1 + prompt_s, abs=1e-6), 2),
            ("finished", pytest.approx(0.1 + prompt_s, abs=1e-6), 2),
            ("finished", pytest.approx(0.1 + prompt_s + left * 0.2, abs=1e-6), 1),
        ]

    def test_a_prompt_waits_for_room(self):
        _, diary = play(
            self.model(3), ask((1,), tail=0, output=6, name=1), ask((7, 8), tail=0, output=1, name=2)
        )
        assert diary.of("started", "finished") == [
            ("started", 0.0, 1, 0, 0),
            ("finished", 1.1, 1),
            ("started", 1.1, 2, 0, 0),
            ("finished", 1.3, 2),
        ]

    def test_a_restore_leaves_streams_their_pace(self):
        _, diary = play(
            self.model(5, host=10, restore_tok_s=100.0),
            ask((1, 2), name=1),
            ask((7, 8), name=2),
            ask((9,), output=21, name=3),
            ask((1, 2), at=1.0, name=4),
        )
        # While block 2 is on its way, the stream of 3 makes a token each 0.2 s as if it were alone.
        assert diary.of("started")[-2:] == [("started", 0.5, 3, 0, 0), ("started", 1.0, 4, 100, 100)]
        prompt_s = 50 / (99 / 0.2)
        assert diary.of("first")[-1] == ("first", pytest.approx(2.0 + prompt_s, abs=1e-6), 4)
        left = 20 - (2.0 - 0.65) / 0.2 - prompt_s / 0.2
        assert diary.of("finished")[-1] == (
            "finished",
            pytest.approx(2.0 + prompt_s + left * 0.2, abs=1e-6),
            3,
        )

    def test_answers_need_room(self):
        assert self.model(3).fits(ask((1, 2), tail=0, output=100))
        assert not self.model(3).fits(ask((1, 2), tail=0, output=101))


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 3),
        st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4).map(
            lambda bits: tuple(int("".join(map(str, bits[: n + 1]))) for n in range(len(bits)))
        ),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=15,
).map(
    lambda drawn: [
        ask(blocks, at=at, tail=tail, name=name, output=1 + name % 4)
        for name, (at, blocks, tail) in enumerate(sorted(drawn))
    ]
)


@given(REQUESTS, st.integers(6, 12), st.integers(0, 10), st.booleans(), st.sampled_from([0, 500]))
def test_work_done_is_what_was_not_cached(requests, blocks, host, chunked, context_tokens):
    model = model_of(blocks, host, chunked=chunked, context_tokens=context_tokens)
    engine, diary = play(model, *requests)
    started = {name: (gpu, below) for _, _, name, gpu, below in diary.of("started")}
    assert sorted(started) == sorted(request.id for request in requests)
    assert engine.computed == sum(request.n_tokens - sum(started[request.id]) for request in requests)
    assert [line[2] for line in diary.of("started")] == [line[2] for line in diary.of("first")]
    assert sorted(line[2] for line in diary.of("finished")) == sorted(started)
    assert engine.cache.occupied == engine.cache.held
    held = {"gpu": set(), "host": set()}
    for kind, tier, hashes in diary.of("stored", "removed"):
        held[tier] = held[tier] | set(hashes) if kind == "stored" else held[tier] - set(hashes)
    assert held["gpu"] == {*engine.cache._idle}
    assert held["host"] == {*engine.cache._host}


@given(REQUESTS, st.integers(6, 12), st.integers(0, 10))
def test_without_answers_both_models_agree(requests, blocks, host):
    silent = [replace(request, output_tokens=1) for request in requests]
    fifo, chunked = (play(model_of(blocks, host, chunked=kind), *silent)[1].lines for kind in (False, True))
    assert fifo == chunked


def test_late_in_a_long_trace_rounding_stops_nothing():
    # A month in, a step is shorter than what can be told apart.
    late = 3e6
    model = model_of(chunked=True, chunk_tokens=100, step_s=1e-10, stream_s=0.0)
    _, diary = play(model, *(ask((n,), at=late, tail=1 + n, output=2 + n, name=n) for n in range(5)))
    assert sorted(line[2] for line in diary.of("finished")) == list(range(5))


# --- its cache -----------------------------------------------------------------------------------

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
