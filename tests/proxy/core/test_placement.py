import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import Forecast
from proxy.core.blocks import Chain
from proxy.core.index import Match
from proxy.core.load import LoadView
from proxy.core.placement import Candidate, cost_of, place, place_least_loaded, predict

IDLE = LoadView(0, 0, 0)


def prompt(n_tokens=1600, size=16):
    return Chain(tuple(range(n_tokens // size)), n_tokens, size)


def candidate(engine="a", *, match=None, load=IDLE, rate=1000.0, **more):
    return Candidate(
        engine, more.pop("tokens_per_block", 16), match or Match(), load, rate, 10 * rate, **more
    )


class TestPredict:
    @pytest.mark.parametrize(
        ("n_tokens", "match", "size", "expected"),
        [
            (100, Match(), 16, 0),
            (100, Match(gpu=3), 16, 48),
            (96, Match(gpu=6), 16, 80),  # the last token is computed in any case
            (97, Match(gpu=6), 16, 96),
            (100, Match(gpu=1, host=2, disk=1, pending=1), 16, 80),
            (200, Match(gpu=7), 64, 64),  # an engine of larger blocks reuses whole ones of its own
            (128, Match(gpu=8), 64, 64),
            (200, Match(gpu=1), 64, 0),
        ],
    )
    def test_is_what_the_engine_will_report(self, n_tokens, match, size, expected):
        assert predict(prompt(n_tokens), match, size) == expected


class TestCost:
    def test_terms(self):
        load = LoadView(in_flight=3, prefill_tokens=500, decoding=2)
        cost = cost_of(candidate(match=Match(gpu=10, host=5, disk=5), load=load), prompt(1000))
        assert cost.cached_tokens == 320
        assert cost.queue_s == pytest.approx(0.5)
        assert cost.restore_s == pytest.approx(160 / 10_000)
        assert cost.prefill_s == pytest.approx(0.68)
        assert cost.interference_s == pytest.approx(0.004)
        assert cost.total_s == pytest.approx(0.5 + 0.016 + 0.68 + 0.004)
        assert cost.in_flight == 3

    def test_what_it_evicts_is_regretted(self):
        costs = [cost_of(candidate(free_blocks=free), prompt(160)) for free in (None, 10, 4, 0)]
        assert [cost.regret_s for cost in costs] == pytest.approx([0, 0, 4 * 0.096, 4 * 0.16])
        assert costs[3].total_s == pytest.approx(0.8)

    def test_no_more_is_restored_than_is_reused(self):
        cost = cost_of(candidate(match=Match(host=2)), prompt(32))
        assert cost.cached_tokens == 16
        assert cost.restore_s == pytest.approx(16 / 10_000)


class TestPlace:
    def test_prefers_the_engine_that_holds_the_prefix(self):
        placement = place([candidate("a"), candidate("b", match=Match(gpu=90))], prompt())
        assert (placement.engine, placement.predicted_tokens) == ("b", 1440)
        assert placement.uncached_tokens == 160
        assert placement.rule == "lowest cost"
        assert [cost.engine for cost in placement.costs] == ["a", "b"]

    def test_a_long_queue_outweighs_a_cached_prefix(self):
        busy = LoadView(in_flight=8, prefill_tokens=8000, decoding=0)
        placement = place([candidate("a"), candidate("b", match=Match(gpu=90), load=busy)], prompt())
        assert placement.engine == "a"

    def test_a_short_queue_does_not(self):
        busy = LoadView(in_flight=1, prefill_tokens=1000, decoding=0)
        placement = place([candidate("a"), candidate("b", match=Match(gpu=90), load=busy)], prompt())
        assert placement.engine == "b"

    def test_restoring_beats_computing_and_loses_to_memory(self):
        host, gpu = candidate("host", match=Match(host=90)), candidate("gpu", match=Match(gpu=90))
        assert place([candidate("none"), host], prompt()).engine == "host"
        assert place([host, candidate("gpu", match=Match(gpu=90))], prompt(100_000)).engine in ("host", "gpu")
        assert place([host, gpu], prompt(1441)).engine == "gpu"

    def test_rates_that_differ_by_noise_are_a_tie_for_the_emptier_cache(self):
        fast = candidate("fast", rate=1100.0, free_blocks=200)
        roomy = candidate("roomy", rate=1000.0, free_blocks=300)
        assert place([fast, roomy], prompt()).engine == "roomy"

    def test_a_real_difference_is_no_tie(self):
        fast = candidate("fast", rate=1200.0, free_blocks=200)
        roomy = candidate("roomy", rate=1000.0, free_blocks=300)
        assert place([fast, roomy], prompt()).engine == "fast"

    def test_a_tie_is_never_given_to_an_engine_that_holds_less(self):
        holds = candidate("holds", match=Match(gpu=5), free_blocks=100)
        empty = candidate("empty", rate=1040.0, free_blocks=200)
        assert place([empty, holds], prompt()).engine == "holds"

    def test_a_shared_prefix_does_not_draw_new_prompts_past_an_empty_engine(self):
        full = candidate("full", match=Match(gpu=40), free_blocks=0)
        empty = candidate("empty", free_blocks=1000)
        assert place([full, empty], prompt(1000)).engine == "empty"

    def test_a_conversation_stays_on_its_full_engine(self):
        full = candidate("full", match=Match(gpu=55), free_blocks=0)
        empty = candidate("empty", match=Match(gpu=10), free_blocks=1000)
        assert place([full, empty], prompt(1000)).engine == "full"

    def test_nothing_is_regretted_where_the_capacity_is_unknown(self):
        assert cost_of(candidate(free_blocks=None), prompt()).regret_s == 0
        assert cost_of(candidate(free_blocks=0), prompt(1000)).regret_s == pytest.approx(4.0)

    def test_equal_engines_take_turns(self):
        served = {"a": 0, "b": 0, "c": 0}
        order = []
        for _ in range(6):
            placement = place([candidate(name, served=n) for name, n in served.items()], prompt())
            served[placement.engine] += 1
            order.append(placement.engine)
        assert order == ["a", "b", "c", "a", "b", "c"]

    def test_a_shared_beginning_does_not_fill_one_engine_past_an_empty_one(self):
        full = candidate("full", match=Match(gpu=20), free_blocks=0)
        assert place([full, candidate("empty", free_blocks=200)], prompt()).engine == "empty"

    def test_a_prediction_on_blocks_still_to_come_is_not_firm(self):
        assert place([candidate(match=Match(gpu=2))], prompt()).firm
        assert not place([candidate(match=Match(gpu=2, pending=1))], prompt()).firm

    def test_tells_what_of_the_prediction_needs_no_lower_tier(self):
        placement = place([candidate(match=Match(gpu=4, host=6, lead=3))], prompt(160))
        assert (placement.predicted_tokens, placement.gpu_tokens) == (144, 48)
        assert place([candidate(match=Match(gpu=10, lead=10))], prompt(160)).gpu_tokens == 144

    @given(
        st.lists(
            st.tuples(st.integers(0, 100), st.integers(0, 20_000), st.floats(1, 1e5), st.integers(0, 50)),
            min_size=1,
            max_size=6,
        )
    )
    def test_never_costs_more_than_the_tie_tolerance_over_the_cheapest(self, rows):
        candidates = [
            candidate(str(i), match=Match(gpu=gpu), load=LoadView(1, queued, 0), rate=rate, free_blocks=free)
            for i, (gpu, queued, rate, free) in enumerate(rows)
        ]
        placement = place(candidates, prompt())
        chosen = next(cost for cost in placement.costs if cost.engine == placement.engine)
        assert chosen.total_s <= min(cost.total_s for cost in placement.costs) * 1.15


class TestForecast:
    """What an engine's own adapter foresees stands in place of the index and the learned rates."""

    def test_its_terms_are_the_cost(self):
        load = LoadView(in_flight=3, prefill_tokens=500, decoding=2)
        foreseen = Forecast(
            123, wait_s=1.0, restore_s=0.2, prefill_s=0.03, interference_s=0.004, regret_s=0.0005
        )
        told = candidate(match=Match(gpu=90), load=load, free_blocks=0, forecast=foreseen)
        cost = cost_of(told, prompt())
        assert (cost.engine, cost.cached_tokens, cost.in_flight) == ("a", 123, 3)
        assert (cost.queue_s, cost.restore_s, cost.prefill_s) == (1.0, 0.2, 0.03)
        assert (cost.interference_s, cost.regret_s) == (0.004, 0.0005)
        assert cost.total_s == pytest.approx(1.2345)

    def test_it_is_the_prediction_to_the_token(self):
        placement = place([candidate(forecast=Forecast(123), match=Match(gpu=90))], prompt())
        assert (placement.predicted_tokens, placement.uncached_tokens) == (123, 1477)
        assert placement.gpu_tokens == 123

    @pytest.mark.parametrize("firm", [True, False])
    def test_it_says_whether_that_is_firm(self, firm):
        told = candidate(forecast=Forecast(0, firm=firm), match=Match(gpu=1, pending=5 * firm))
        assert place([told], prompt()).firm is firm

    def test_it_is_held_against_what_other_engines_are_known_for(self):
        slots = candidate("slots", forecast=Forecast(1000, prefill_s=0.5))
        assert place([slots, candidate("index", match=Match(gpu=90))], prompt()).engine == "index"
        assert place([slots, candidate("index", match=Match(gpu=10))], prompt()).engine == "slots"


class TestPlaceLeastLoaded:
    def test_no_forecast_counts(self):
        rows = [candidate("a", load=LoadView(1, 0, 0), forecast=Forecast(9)), candidate("b")]
        placement = place_least_loaded([*rows])
        assert (placement.engine, placement.predicted_tokens, placement.firm) == ("b", 0, True)

    def test_takes_the_fewest_in_flight(self):
        loads = {"a": LoadView(3, 0, 3), "b": LoadView(1, 9999, 0), "c": LoadView(2, 0, 0)}
        placement = place_least_loaded([candidate(name, load=load) for name, load in loads.items()], 7)
        assert (placement.engine, placement.predicted_tokens, placement.n_tokens) == ("b", 0, 7)
        assert placement.rule == "least loaded"
        assert [cost.in_flight for cost in placement.costs] == [3, 1, 2]

    def test_equal_engines_take_turns_whatever_they_hold(self):
        served = {"a": 0, "b": 0}
        order = []
        for _ in range(4):
            rows = [
                candidate(name, served=n, match=Match(gpu=9 * (name == "b"))) for name, n in served.items()
            ]
            order.append(place_least_loaded(rows).engine)
            served[order[-1]] += 1
        assert order == ["a", "b", "a", "b"]
