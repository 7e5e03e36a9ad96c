import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.core.index.blocks import Chain
from proxy.core.index.match import Match
from proxy.core.placement.decision import CALM, TERMS, Candidate, Outlook
from proxy.core.placement.demand import InUse, Residents
from proxy.core.placement.load import LoadView
from proxy.core.placement.pairs import (
    HANDSHAKE_S,
    KEPT_S,
    LEAST_PATIENCE_S,
    MAX_SOURCES,
    MAX_TARGETS,
    SPEEDUP,
    STALL,
    WINDOW,
    Prefillers,
    Transfers,
    best_pair,
    least_loaded_of,
    place_halves,
    place_with_pairs,
)
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.scores import TIE_S, Scores, place

# Engines compute 1,000 tokens a second.
POOL = PoolRates()
POOL.computed(1000, 1.0, 0)
TWO = Outlook(now=100.0, strain=2.0, returns=lambda _idle_s: 1.0, turns=3.0, rest_s=0.1)


def prompt(n_tokens=2000):
    return Chain(tuple(range(n_tokens // 16)), n_tokens, 16)


def engine(name, *, queue_s=0.0, decoding=0, gpu=0, **more):
    load = LoadView(decoding, queue_s, decoding)
    return Candidate(name, 16, EngineRates(POOL), match=Match(gpu=gpu), load=load, **more)


def nothing_comes(_engine):
    return 0.0


def placed(
    decoders, prefillers, chain=None, outlook=CALM, *, transfer_s=0.05, may=("d", "e"), arrivals=nothing_comes
):
    def takes_s(_source, _target, tokens):
        return transfer_s + tokens / 100_000

    pairs = Prefillers(prefillers, may, takes_s, arrivals)
    return place_with_pairs(decoders, pairs, chain or prompt(), outlook)


class TestAPair:
    def test_wins_where_the_decoder_is_busy_with_prompts(self):
        placement = placed([engine("d", queue_s=1.5)], [engine("p")])
        cost = placement.chosen
        assert (cost.engine, cost.prefiller, cost.pulled_tokens) == ("d", "p", 2000)
        assert (cost.prefill_s, cost.transfer_s) == (2.0, pytest.approx(0.07))
        assert cost.queue_s == 0, "the decoder's queue is over by then"
        assert cost.first_token_s == cost.total_s == pytest.approx(2.07)
        assert placement.engine == "d"
        assert [(each.engine, each.prefiller) for each in placement.costs] == [("d", None), ("d", "p")]

    def test_wins_where_a_prefill_would_delay_many_streams(self):
        quiet, busy = engine("d", decoding=0), engine("d", decoding=4)
        assert placed([quiet], [engine("p")]).pair is None
        placement = placed([busy], [engine("p")])
        assert placement.pair is not None
        assert placement.costs[0].stall_s == 2.0 * STALL * 4
        assert placement.costs[0].first_token_s == 2.0, "the request itself does not wait for that"
        assert place([busy], prompt()).chosen.stall_s == 0, "where no pair is possible, nothing is charged"

    def test_waits_for_what_is_left_of_the_decoders_queue(self):
        placement = placed([engine("d", queue_s=3.0)], [engine("p", queue_s=0.5)])
        assert placement.chosen.queue_s == pytest.approx(0.5 + 3.0 - 0.5 - 2.0 - 0.07)

    def test_spares_those_that_wait_for_memory_of_the_decoder(self):
        def placed_at(in_flight, capacity):
            full = InUse(capacity)
            full.add(range(10**6, 10**6 + 10))
            load = LoadView(in_flight, 0.0, 1)
            decoder = Candidate("d", 16, EngineRates(POOL), load=load, in_use=full)
            return placed([decoder], [engine("p", queue_s=0.5)])

        alone = placed_at(1, 10)
        assert (alone.pair, alone.costs[0].stall_s) == (None, 2.0 * STALL)
        spared = placed_at(3, 10)
        assert spared.pair is not None
        assert spared.costs[0].stall_s == pytest.approx(2.0 * STALL + 2 * 2.0), "two wait, two seconds each"
        assert spared.chosen.total_s == pytest.approx(alone.costs[1].total_s), "the pair keeps nobody waiting"
        assert placed_at(3, 1000).costs[0].stall_s == 2.0 * STALL, "nobody waits for memory"

    def test_spares_those_that_come_to_the_decoder_meanwhile(self):
        def placed_at(n_tokens, **per_s):
            chain = prompt(n_tokens)
            return placed([engine("d")], [engine("p")], chain, arrivals=lambda name: per_s.get(name, 0.0))

        busy = placed_at(2000, d=0.5)
        assert busy.costs[0].stall_s == pytest.approx(1.0), "one comes in two seconds, and waits for one"
        assert busy.costs[0].first_token_s == 2.0, "the request itself does not wait for that"
        assert (busy.pair is not None, busy.chosen.stall_s) == (True, 0)
        assert placed_at(2000, d=0.5, p=0.5).pair is None, "as many come to the prefiller"
        assert placed_at(200, d=0.5).pair is None, "fewer come meanwhile, and each waits less"

    def test_moves_what_the_decoder_lacks_and_computes_what_the_prefiller_lacks(self):
        placement = placed([engine("d", queue_s=9.0, gpu=25)], [engine("p", gpu=75)])
        assert (placement.predicted_tokens, placement.chosen.cached_tokens) == (1200, 1200)
        assert (placement.chosen.pulled_tokens, placement.chosen.prefill_s) == (1600, pytest.approx(0.8))
        pair = placement.pair
        assert (pair.prefill.engine, pair.prefill.predicted_tokens) == ("p", 1200)
        assert (pair.decode.engine, pair.decode.predicted_tokens) == ("d", 400)
        assert pair.decode.work.computed == 1600, "should it have to compute the prompt itself"
        assert pair.prefill.pair is pair.decode.pair is None

    def test_gives_its_first_leg_up_when_the_answer_would_be_twice_as_late(self):
        placement = placed([engine("d", queue_s=4.0)], [engine("p", gpu=75)])
        assert placement.pair.patience_s == pytest.approx(0.8 + 6.0)
        short = placed([engine("d", queue_s=0.5, decoding=9)], [engine("p", gpu=20)], prompt(400))
        assert short.pair.patience_s == pytest.approx(0.08 + LEAST_PATIENCE_S)

    def test_pays_for_what_it_evicts_on_both_engines(self):
        def full(size):
            residents = Residents(lambda _block: True)
            residents.use(0.0, range(10**6, 10**6 + size), size)
            return residents

        decoder = engine("d", queue_s=9.0, room=100, residents=full(50))
        source = engine("p", room=120, residents=full(50))
        cost = placed([decoder], [source], outlook=TWO).chosen
        assert cost.regret_s == pytest.approx(2.0 * 16 * (25 + 5) / 1000)
        assert cost.total_s == pytest.approx(
            cost.first_token_s + cost.congestion_s + cost.later_s + cost.regret_s
        )


class TestNoPair:
    def test_where_the_decoder_holds_nearly_all(self):
        placement = placed([engine("d", queue_s=9.0, gpu=122)], [engine("p", gpu=122)])
        assert placement.pair is None
        assert len(placement.costs) == 1, "48 tokens are computed at once"

    def test_where_the_prefiller_is_too_busy(self):
        placement = placed([engine("d", queue_s=1.0)], [engine("p", queue_s=2.0)])
        assert placement.pair is None
        assert placement.costs[-1].prefiller == "p", "why there is none can be read"


# A conversation whose two next turns wait a second for each prefill of others that they find.
TURNS = Outlook(now=0.0, strain=1.0, returns=lambda _idle_s: 0.0, turns=3.0, rest_s=1.0)


def shared(candidates, chain=None, outlook=TURNS, *, transfer_s=0.05, asked=None):
    """Engines without roles, which give KV to each other."""

    def takes_s(source, target, tokens):
        if asked is not None:
            asked.append((source, target))
        return transfer_s + tokens / 100_000

    pairs = Prefillers([], {each.engine for each in candidates}, takes_s, nothing_comes, candidates)
    return place_with_pairs(candidates, pairs, chain or prompt(), outlook)


class TestAHolder:
    """An engine without a role that holds the prompt."""

    def test_gives_it_to_an_engine_where_the_next_turns_wait_less(self):
        placement = shared([engine("a", gpu=120, busy=1.0), engine("b", busy=0.1)])
        cost = placement.chosen
        assert (cost.engine, cost.prefiller, cost.pulled_tokens, cost.cached_tokens) == ("b", "a", 2000, 1920)
        assert (cost.prefill_s, cost.later_s) == (pytest.approx(0.08), pytest.approx(0.2))
        alone = {each.engine: each.total_s for each in placement.costs if each.prefiller is None}
        assert alone == {"a": pytest.approx(2.08), "b": pytest.approx(2.2)}
        assert cost.total_s == pytest.approx(0.08 + 0.07 + 0.2)

    def test_keeps_it_where_it_answers_as_soon_itself(self):
        assert shared([engine("a", gpu=120, busy=0.1), engine("b", busy=0.1)]).pair is None
        assert shared([engine("a", gpu=120, busy=1.0), engine("b")], transfer_s=2.0).pair is None

    def test_computes_no_prompt_for_others_of_which_it_holds_little(self):
        few, half = engine("a", gpu=60, busy=1.0), engine("a", gpu=64, busy=1.0)
        others = [engine("b", busy=0.0, decoding=50)]
        POOL.interference, before = 0.1, POOL.interference
        try:
            assert shared([few, *others]).pair is None
            assert shared([half, *others]).pair is not None
        finally:
            POOL.interference = before

    def test_is_no_reason_to_price_the_streams_of_single_engines(self):
        placement = shared([engine("a", gpu=120, busy=1.0, decoding=4), engine("b", decoding=4)])
        assert placement.pair is not None
        assert all(cost.stall_s == 0 for cost in placement.costs)

    def test_of_a_large_pool_only_the_best_are_looked_at(self):
        asked = []
        holders = [engine(f"a{n}", gpu=120 - n, busy=1.0, queue_s=0.01 * n) for n in range(32)]
        idle = [engine(f"b{n}", busy=0.1 + 0.02 * n) for n in range(32)]
        placement = shared([*holders, *idle], asked=asked)
        assert (placement.chosen.prefiller, placement.engine) == ("a0", "b0")
        assert len(asked) <= 64 + MAX_SOURCES * MAX_TARGETS
        asked.clear()
        assert shared([engine(f"a{n}", gpu=120, busy=0.1) for n in range(64)], asked=asked).pair is None
        assert asked == [], "all of them hold it"


seconds = st.floats(0, 5)
engines = st.tuples(seconds, st.integers(0, 8), st.integers(0, 125))


@given(st.lists(engines, min_size=1, max_size=4), st.lists(engines, max_size=3), seconds, st.booleans())
def test_a_pair_never_costs_more_than_a_single_engine(decoders, prefillers, transfer_s, is_busy):
    def made(names, drawn):
        return [
            engine(name, queue_s=queue_s, decoding=decoding, gpu=gpu)
            for name, (queue_s, decoding, gpu) in zip(names, drawn, strict=False)
        ]

    outlook = TWO if is_busy else CALM
    placement = placed(
        made("defg", decoders), made("pqr", prefillers), None, outlook, transfer_s=transfer_s, may="defg"
    )
    singles = [cost.total_s for cost in placement.costs if cost.prefiller is None]
    assert len(singles) == len(decoders)
    if placement.pair is None:
        assert placement.chosen.total_s <= min(singles) + TIE_S
    else:
        assert placement.chosen.total_s < min(singles)
        assert placement.chosen in placement.costs


# The terms that each engine of a pair pays for itself, and those that the first one alone has: it computes.
OF_EACH = ("room_s", "restore_s", "later_s", "regret_s")
OF_THE_FIRST = ("prefill_s", "interference_s", "stall_s", "congestion_s", "again_s")


@given(
    st.lists(engines, min_size=1, max_size=2 * MAX_TARGETS),
    st.lists(engines, min_size=1, max_size=3),
    st.floats(1, 9),
    st.floats(0, 2),
)
def test_the_cost_of_a_pair_is_the_sum_of_its_terms(decoders, prefillers, strain, transfer_s):
    def made(name, drawn):
        residents = Residents(lambda _block: True)
        residents.use(0.0, range(10**6, 10**6 + 50), 50)
        return [
            replace(
                engine(f"{name}{at}", queue_s=queue_s, decoding=decoding, residents=residents, room=gpu),
                busy=0.1 * at,
                match=Match(gpu=gpu, host=gpu % 9, cut=gpu % 7),
                in_use=full() if at % 2 else None,
            )
            for at, (queue_s, decoding, gpu) in enumerate(drawn)
        ]  # fmt: skip

    candidates, chain = made("d", decoders), prompt(2300)
    outlook = Outlook(
        9.0, strain, lambda _idle_s: 1.0, 3.0, 0.5, 2.0, stall=STALL, arrivals=lambda _name: 0.5
    )
    pairs = Prefillers(
        made("p", prefillers), {f"d{at}" for at in range(99)}, lambda *_: transfer_s, nothing_comes
    )
    found = best_pair(candidates, pairs, chain, outlook, Scores(candidates, chain, outlook))
    first, second, cost = found.pair.prefill.chosen, found.pair.decode.chosen, found.chosen
    expected = {name: getattr(first, name) + getattr(second, name) for name in OF_EACH}
    expected |= {name: getattr(first, name) for name in OF_THE_FIRST}
    over_s = first.first_token_s + transfer_s
    expected |= {"queue_s": first.queue_s + max(second.queue_s - over_s, 0.0), "transfer_s": transfer_s}
    assert {name: getattr(cost, name) for name in TERMS} == pytest.approx(expected)
    assert cost.total_s == pytest.approx(sum(expected.values()))


# --- engines that answer only two at a time -----------------------------------------------------------------

# Answers take two seconds.
ANSWERS = Outlook(0.0, 1.0, lambda _idle_s: 0.0, answer_s=2.0)


def full():
    """Memory in which no request has room until one of them ends."""
    in_use = InUse(130)
    in_use.add(tuple(range(1000, 1100)))
    return in_use


def pair_of(placement):
    return placement.chosen.prefiller, placement.engine


def both(prefillers, decoders, *whole):
    partners = tuple(prefillers)
    answering = [engine(name, partners=partners, **more) for name, more in decoders.items()]
    return place_halves([*answering, *whole], None, prompt(), ANSWERS)


class TestHalves:
    def test_the_answer_comes_from_the_engine_that_has_room(self):
        placement = both([engine("p")], {"d": {"in_use": full()}, "e": {"decoding": 5}})
        assert pair_of(placement) == ("p", "e")
        (other,) = [cost for cost in placement.costs if cost.engine == "d"]
        assert other.room_s > 0
        assert other.total_s == pytest.approx(placement.chosen.total_s + other.room_s)

    @given(st.lists(st.floats(0, 3), min_size=1, max_size=5), st.lists(st.booleans(), min_size=1, max_size=5))
    def test_no_other_pair_costs_less(self, queues, are_full):
        prefillers = [engine(f"p{at}", queue_s=queue_s) for at, queue_s in enumerate(queues)]
        decoders = {f"d{at}": {"in_use": full() if is_full else None} for at, is_full in enumerate(are_full)}
        placement = both(prefillers, decoders)
        least_s = 2.0 + min(queues) + placement.chosen.room_s
        assert least_s - 1e-6 <= placement.chosen.total_s <= least_s + TIE_S + 1e-6
        for cost in placement.costs:
            alone = place([each for each in prefillers if each.engine == cost.prefiller], prompt(), ANSWERS)
            assert cost.total_s == pytest.approx(alone.chosen.total_s + cost.room_s)
        assert (placement.chosen.room_s > 0) == all(are_full)


class TestLeastLoaded:
    def test_of_each_half(self):
        partners = engine("p", decoding=2), engine("q", decoding=1)
        ones = [engine("d", decoding=4, partners=partners), engine("e", decoding=3, partners=partners)]
        placement = least_loaded_of(ones)
        assert pair_of(placement) == ("q", "e")
        assert placement.pair.together
        assert {(cost.prefiller, cost.engine) for cost in placement.costs} == {("q", "d"), ("q", "e")}

    def test_or_of_those_that_are_whole(self):
        ones = [engine("d", decoding=4, partners=(engine("p"),)), engine("w", decoding=3)]
        placement = least_loaded_of(ones)
        assert (pair_of(placement), placement.pair) == ((None, "w"), None)
        assert least_loaded_of([engine("w"), engine("v", decoding=1)]).engine == "w"


# --- transfers ----------------------------------------------------------------------------------------------


@pytest.fixture
def transfers():
    return Transfers(lambda: 1000.0)


def met(transfers, *links):
    for source, target in links:
        transfers.measured(0.0, source, target, 1000, 9.0)


UNKNOWN_S = 1000 / (SPEEDUP * 1000)


@pytest.mark.parametrize(
    ("measured", "now", "seconds"),
    [
        ([], 0.0, UNKNOWN_S),
        ([(1.0, 1000, 40.0), (1.0, 1000, 1.0), (1.0, 1000, 2.0), (1.0, 1000, 40.0)], 1.0, 1.0),
        ([(1.0, 1000, 1.0), (1.0, 10, 0.001)], 1.0, 1.0),
        ([(1.0, 1000, 1.0), *[(2.0, 1000, 4.0)] * WINDOW], 2.0, 4.0),
        ([(1.0, 1000, 50.0)], KEPT_S, 50.0),
        ([(1.0, 1000, 50.0)], KEPT_S + 2, UNKNOWN_S),
    ],
    ids=[
        "the first transfer tells nothing",
        "requests that waited for their engine make no link slow",
        "a round trip is no rate",
        "slow after some slow ones",
        "slow for a while",
        "tried again after a while",
    ],
)
def test_a_link_is_as_fast_as_its_fastest_late_transfer(transfers, measured, now, seconds):
    met(transfers, ("p", "d"))
    for at, tokens, took_s in measured:
        transfers.measured(at, "p", "d", tokens, took_s)
    assert transfers.seconds(now, "p", "d", 1000) == seconds
    assert transfers.seconds(now, "p", "e", 0) == HANDSHAKE_S, "these two have not met"


def test_an_engine_that_was_replaced_is_met_anew(transfers):
    met(transfers, ("p", "d"), ("q", "d"))
    transfers.forget("p")
    assert transfers.seconds(0.0, "p", "d", 0) == HANDSHAKE_S
    assert transfers.seconds(0.0, "q", "d", 0) == 0.0
