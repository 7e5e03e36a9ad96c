"""Engines that answer only two at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.blocks import Chain
from proxy.core.index.match import Match
from proxy.core.placement import halves
from proxy.core.placement.decision import Candidate, Outlook
from proxy.core.placement.halves import least_loaded_of, place_halves
from proxy.core.placement.in_use import InUse
from proxy.core.placement.load import LoadView
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.scores import TIE_S, place

# Engines compute 1,000 tokens a second.
POOL = PoolRates()
POOL.computed(1000, 1.0, 0)
# Answers take two seconds.
CALM = Outlook(0.0, 1.0, lambda _idle_s: 0.0, answer_s=2.0)
PROMPT = Chain(tuple(range(125)), 2000, 16)


def engine(name, *, queue_s=0.0, in_flight=0, gpu=0, **more):
    load = LoadView(in_flight, queue_s, in_flight)
    return Candidate(name, 16, EngineRates(POOL), match=Match(gpu=gpu), load=load, **more)


def full():
    """Memory in which no request has room until one of them ends."""
    in_use = InUse(130)
    in_use.add(tuple(range(1000, 1100)))
    return in_use


def pair_of(placement):
    return placement.chosen.prefiller, placement.engine


def placed(prefillers, decoders, alone=None):
    partners = tuple(prefillers)
    answering = [engine(name, partners=partners, **more) for name, more in decoders.items()]
    return place_halves(answering, PROMPT, CALM, alone)


class TestCheapest:
    def test_the_prompt_goes_where_it_costs_least(self):
        prefillers = [engine("p", queue_s=0.5), engine("q", queue_s=0.1), engine("r", gpu=100)]
        placement = placed(prefillers, {"d": {}})
        assert pair_of(placement) == ("r", "d")
        assert placement.predicted_tokens == 1600
        assert placement.chosen.total_s == pytest.approx(0.4)
        assert placement.pair.together
        assert (placement.pair.prefill.engine, placement.pair.decode.engine) == ("r", "d")

    def test_the_answer_comes_from_the_engine_that_has_room(self):
        placement = placed([engine("p")], {"d": {"in_use": full()}, "e": {"in_flight": 5}})
        assert pair_of(placement) == ("p", "e")
        (other,) = [cost for cost in placement.costs if cost.engine == "d"]
        assert other.room_s > 0
        assert other.total_s == pytest.approx(placement.chosen.total_s + other.room_s)

    def test_then_from_the_one_with_the_fewest_requests(self):
        decoders = {"c": {"in_flight": 3}, "d": {"in_flight": 1, "turn": 9}, "e": {"in_flight": 1, "turn": 4}}
        assert pair_of(placed([engine("p")], decoders)) == ("p", "e")
        decoders["d"]["is_last"] = True
        assert pair_of(placed([engine("p")], decoders)) == ("p", "d")

    def test_every_engine_is_in_the_costs(self):
        placement = placed([engine("p"), engine("q", gpu=9)], {"d": {}, "e": {"in_flight": 1}})
        found = {(cost.prefiller, cost.engine) for cost in placement.costs}
        assert found == {("p", "d"), ("q", "d"), ("q", "e")}
        assert placement.chosen in placement.costs

    def test_an_engine_that_answers_alone_wins_if_it_costs_no_more(self):
        alone = place([engine("w")], PROMPT)
        assert placed([engine("p")], {"d": {}}, alone).pair is None
        placement = placed([engine("p", gpu=50)], {"d": {}}, alone)
        assert pair_of(placement) == ("p", "d")
        assert {cost.engine for cost in placement.costs} == {"w", "d"}

    def test_a_choice_among_many_looks_at_each_engine_a_few_times(self, monkeypatch):
        looks = []
        wait_s = halves._wait_s
        monkeypatch.setattr(halves, "_wait_s", lambda cost: looks.append(cost) or wait_s(cost))
        placed([engine("p")], {f"d{n}": {} for n in range(256)})
        assert len(looks) <= 3 * 256

    def test_engines_meet_only_their_own_partners(self):
        one, other = (engine("p", queue_s=1.0),), (engine("q"),)
        ones = [engine("d", partners=one), engine("e", partners=other, in_flight=7)]
        assert pair_of(place_halves(ones, PROMPT, CALM, None)) == ("q", "e")

    @given(st.lists(st.floats(0, 3), min_size=1, max_size=5), st.lists(st.booleans(), min_size=1, max_size=5))
    def test_no_other_pair_costs_less(self, queues, are_full):
        prefillers = [engine(f"p{at}", queue_s=queue_s) for at, queue_s in enumerate(queues)]
        decoders = {f"d{at}": {"in_use": full() if is_full else None} for at, is_full in enumerate(are_full)}
        placement = placed(prefillers, decoders)
        least_s = 2.0 + min(queues) + placement.chosen.room_s
        assert least_s - 1e-6 <= placement.chosen.total_s <= least_s + TIE_S + 1e-6
        assert (placement.chosen.room_s > 0) == all(are_full)


class TestLeastLoaded:
    def test_of_each_half(self):
        partners = engine("p", in_flight=2), engine("q", in_flight=1)
        ones = [engine("d", in_flight=4, partners=partners), engine("e", in_flight=3, partners=partners)]
        placement = least_loaded_of(ones)
        assert pair_of(placement) == ("q", "e")
        assert placement.pair.together
        assert {(cost.prefiller, cost.engine) for cost in placement.costs} == {("q", "d"), ("q", "e")}

    def test_or_of_those_that_are_whole(self):
        ones = [engine("d", in_flight=4, partners=(engine("p"),)), engine("w", in_flight=3)]
        placement = least_loaded_of(ones)
        assert (pair_of(placement), placement.pair) == ((None, "w"), None)
        assert least_loaded_of([engine("w"), engine("v", in_flight=1)]).engine == "w"
