from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.load import LoadSample, Work
from proxy.core.placement.rates import HOST_SPEEDUP, MAX_INTERFERENCE, WINDOW, EngineRates, PoolRates
from proxy.core.placement.whole_answers import REFIT, AnswerSample


@pytest.fixture
def pool():
    return PoolRates()


@pytest.fixture
def rates(pool):
    return EngineRates(pool)


def compute(rates, tokens, seconds, decoding=0.0, *, times=1):
    for _ in range(times):
        rates.learn(LoadSample(Work(tokens), seconds, decoding))


def restore(rates, seconds, computed, host, disk=0):
    rates.learn(LoadSample(Work(computed, host, disk), seconds, 0.0))


class TestCurve:
    def test_one_odd_request_teaches_little(self, rates):
        for seconds in (1.0, 1.1, 60.0):
            compute(rates, 1000, seconds)
        assert rates.prefill_s(1000) == pytest.approx(1.1)

    @pytest.mark.parametrize("lengths", [(300, 3000), (3000, 300), (100, 300, 1000, 3000)])
    def test_what_is_long_ago_is_forgotten_of_each_length_of_prompts_in_turn(self, rates, lengths):
        for pace in (9.0, 1.0):
            for _ in range(2 * WINDOW):
                for tokens in lengths:
                    compute(rates, tokens, pace * tokens / 1000)
        for tokens in lengths:
            assert rates.prefill_s(tokens) == pytest.approx(tokens / 1000)

    @pytest.mark.parametrize("times", [1, WINDOW])
    def test_slow_short_prompts_of_long_ago_say_nothing_of_longer_ones(self, rates, times):
        compute(rates, 100, 30.0, times=times)
        for _ in range(WINDOW):
            for tokens in (2000, 4000, 8000):
                compute(rates, tokens, tokens / 8000)
        assert [rates.prefill_s(tokens) for tokens in (2000, 4000, 8000)] == [0.25, 0.5, 1.0]
        assert rates.prefill_s(100) <= 0.25

    def test_prompts_that_are_slower_now_than_longer_ones_once_were_count_for_both(self, rates):
        compute(rates, 2000, 0.25, times=2 * WINDOW)
        compute(rates, 1000, 1.0, times=WINDOW)
        assert (rates.prefill_s(1000), rates.prefill_s(2000)) == (1.0, 1.0)

    def test_short_prompts_measure_round_trips_and_no_time_measures_nothing(self, rates):
        compute(rates, 63, 1.0), compute(rates, 1000, 0.0)
        assert rates.prefill_s(1000) == 0.25

    def test_its_memory_is_bounded(self, pool):
        for tokens in range(10_000):
            pool.prefill_s(tokens)
        assert len(pool._memo) <= 4096
        assert pool.prefill_s(4000) == 1.0

    @given(st.lists(st.tuples(st.integers(64, 200_000), st.floats(1e-3, 100.0)), max_size=60), st.data())
    def test_more_tokens_never_cost_less(self, samples, data):
        rates = EngineRates(PoolRates())
        for tokens, seconds in samples:
            compute(rates, tokens, seconds)
        some, more = sorted((data.draw(st.integers(0, 300_000)), data.draw(st.integers(0, 300_000))))
        assert 0 <= rates.prefill_s(some) <= rates.prefill_s(more) * (1 + 1e-9)

    def test_the_epoch_tells_of_rates_that_are_quite_others(self, rates, pool):
        compute(rates, 1024, 0.256 * 1.2)
        assert pool.epoch == 0
        compute(rates, 1024, 0.05)
        assert pool.epoch == 1
        for _ in range(50):
            compute(rates, 1024, 0.05)
        settled = pool.epoch
        compute(rates, 1024, 0.05, times=50)
        assert pool.epoch == settled


class TestPace:
    def test_clearly_slower_hardware_has_its_own(self, pool):
        fast, slow = EngineRates(pool), EngineRates(pool)
        for _ in range(3 * WINDOW):
            compute(fast, 1000, 1.0), compute(slow, 1000, 3.0)
        assert slow.prefill_s(1000) == pytest.approx(3.0)
        assert fast.prefill_s(1000) == pytest.approx(1.0)
        assert slow.prefill_tok_s == pytest.approx(fast.prefill_tok_s / 3)
        assert slow.prefill_s(9000) == pytest.approx(3 * fast.prefill_s(9000))

    def test_it_takes_many_samples_to_tell(self, pool):
        fast, slow = EngineRates(pool), EngineRates(pool)
        compute(fast, 1000, 1.0, times=WINDOW)
        compute(slow, 1000, 3.0, times=WINDOW // 2 - 1)
        assert slow.pace == 1.0
        assert slow.prefill_s(1000) == pytest.approx(1.0)

    def test_a_change_of_all_is_no_pace_of_one(self, rates):
        compute(rates, 1000, 9.0, times=2 * WINDOW)
        for _ in range(2 * WINDOW):
            compute(rates, 1000, 1.0)
            assert rates.pace == 1.0

    @pytest.mark.parametrize("number", [1, 2, 5])
    def test_equal_engines_do_not_drift_off_together(self, pool, number):
        # Times that hang on more than the tokens computed: once paces fell, and the curve rose, without end.
        random, engines = Random(1), [EngineRates(pool) for _ in range(number)]  # noqa: S311 - a test
        for _ in range(20_000):
            tokens = int(2 ** random.uniform(6.1, 14))
            seconds = (0.02 + tokens / 10_000) * random.choice((1.0, 1.0, 4.0))
            compute(random.choice(engines), tokens, seconds)
        for engine in engines:
            assert 0.5 * 0.12 < engine.prefill_s(1000) < 5 * 0.12


class TestOthers:
    def test_teach_until_something_better_does(self, rates, pool):
        assert not pool.learned
        rates.learn(LoadSample(Work(1000), 3.0, 1.0, blurred=True))
        assert (pool.learned, rates.prefill_s(1000)) == (True, pytest.approx(3.0))
        compute(rates, 1000, 1.0)
        assert rates.prefill_s(1000) == pytest.approx(1.0)
        for _ in range(2 * WINDOW):
            rates.learn(LoadSample(Work(1000), 3.0, 1.0, blurred=True))
        assert rates.prefill_s(1000) == pytest.approx(1.0)


def answer(rates, prefilled, output, seconds, *, times=1):
    for _ in range(times):
        rates.answered(0.0, AnswerSample(prefilled, output, seconds))


class TestWholeAnswers:
    def test_teach_both_rates(self, rates, pool):
        for at in range(WINDOW):
            answer(rates, 1000 + 100 * at, 10 + at % 7, (1000 + 100 * at) / 500 + 0.1 * (10 + at % 7))
        assert pool.learned
        assert rates.prefill_s(5000) == pytest.approx(10.0)
        assert (pool.prefill_tok_s, pool.fit.step_s) == pytest.approx((500, 0.1))

    def test_teach_until_a_first_token_does(self, rates, pool):
        answer(rates, 1000, 0, 9.0, times=WINDOW)
        assert rates.prefill_s(1000) == pytest.approx(9.0)
        compute(rates, 2000, 1.0)
        assert (pool.fit, rates.prefill_s(1000)) == (None, pytest.approx(0.5))
        answer(rates, 1000, 0, 9.0, times=2 * WINDOW)
        assert rates.prefill_s(1000) == pytest.approx(0.5)

    def test_teach_a_pace_every_few_of_them(self, rates, pool, monkeypatch):
        asked, usual = [], pool.usual
        monkeypatch.setattr(pool, "usual", lambda *each: asked.append(each) or usual(*each))
        answer(rates, 1000, 0, 1.0, times=10 * REFIT)
        assert 0 < len(asked) <= 10


class TestInterference:
    def test_is_found_between_busy_and_quiet_samples(self, rates, pool):
        for at in range(4 * WINDOW):
            streams = at % 5
            compute(rates, 1000, 1.0 * (1 + 0.05 * streams), streams)
        assert pool.interference == pytest.approx(0.05, rel=0.2)
        assert rates.prefill_s(1000) == pytest.approx(1.0, rel=0.05)

    def test_is_never_a_help_nor_out_of_bounds(self, pool):
        for slope, expected in ((-0.1, 0.0), (5.0, MAX_INTERFERENCE)):
            rates = EngineRates(pool := PoolRates())
            for at in range(2 * WINDOW):
                compute(rates, 1000, 1.0 + slope * (at % 4), at % 4)
            assert pool.interference == expected


class TestRestores:
    """Where 1,000 tokens are computed in a second."""

    @pytest.mark.parametrize(
        ("restored", "host_s", "disk_s"),
        [
            # 100 tokens take 0.1 s of each: 2,000 were restored in 0.4, 0.2 and 8.9 s.
            ([(0.5, 100, 2000), (0.3, 100, 2000), (9.0, 100, 2000)], 0.2, 0.6),
            ([(1.0, 0, 5000), (1.0, 0, 400, 500)] * 3, 0.2, 1000 / 900),  # mostly from disk
            ([(40.0, 0, 4000), (40.0, 0, 4000)], 1 / HOST_SPEEDUP, 3 / HOST_SPEEDUP),
            ([*[(10.0, 0, 10_000)] * 3, (5.0, 4000, 1000)], 1.0, 3.0),  # mostly computed: of the curve
            ([(20.0, 1000, 4000)] * (2 * WINDOW), 1 / HOST_SPEEDUP, 3 / HOST_SPEEDUP),
            (
                [
                    *[(10.0, 0, 10_000)] * 3,
                    *((2.0, 1000, 1000), (0.5, 1000, 1000), (1.5, 1000, 10_000), (0.1, 0, 63)),
                ],
                1.0,
                3.0,
            ),
        ],
        ids=["median", "each tier", "two", "mostly computed", "a delay", "halves teach nothing"],
    )
    def test_are_what_the_rest_of_the_time_leaves(self, rates, restored, host_s, disk_s):
        compute(rates, 1000, 1.0)
        for seconds, computed, *below in restored:
            restore(rates, seconds, computed, *below)
        assert rates.restore_s(1000, 0) == pytest.approx(host_s)
        assert rates.restore_s(0, 1000) == pytest.approx(disk_s)
        assert (rates.prefill_s(1000), rates.prefill_s(4000)) == pytest.approx((1.0, 4.0))


class TestANewcomer:
    @pytest.mark.parametrize("blurred", [False, True])
    def test_it_learns_what_another_one_learned_from(self, rates, blurred):
        assert rates.timings is None
        for tokens in (512, 2048):
            for _ in range(WINDOW // 2):
                rates.learn(LoadSample(Work(tokens), tokens / 1000, 0.0, blurred=blurred))
        new = EngineRates(PoolRates())
        new.adopt(1.0, rates.timings)
        assert new.prefill_tok_s == pytest.approx(rates.prefill_tok_s) == pytest.approx(1000)
        compute(new, 512, 0.256)
        assert (new.prefill_tok_s == pytest.approx(2000)) is blurred  # a clear sample replaces blurred ones

    def test_whole_answers_too(self, rates):
        for tokens in range(512, 512 + WINDOW):
            rates.answered(1.0, AnswerSample(tokens, 10, tokens / 1000 + 0.1))
        new = EngineRates(PoolRates())
        new.adopt(1.0, rates.timings)
        assert new.pool.fit == rates.pool.fit

    def test_what_it_learned_itself_stays(self, rates):
        compute(rates, 512, 0.512, times=WINDOW)
        new = EngineRates(PoolRates())
        compute(new, 512, 0.256, times=WINDOW)
        new.adopt(1.0, rates.timings)
        assert new.prefill_tok_s == pytest.approx(2000)
