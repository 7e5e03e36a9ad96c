import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_adapter import Forecast
from engine_adapter.types import Attention
from proxy.core.index.blocks import Chain
from proxy.core.index.match import Match
from proxy.core.placement.decision import CALM, TERMS, Candidate, Cost, Outlook
from proxy.core.placement.demand import InUse, Residents
from proxy.core.placement.load import LoadView
from proxy.core.placement.rates import EngineRates, PoolRates
from proxy.core.placement.scores import (
    GROWTH,
    MAX_LOOKS,
    SHARED,
    TIE_S,
    Scores,
    place,
    place_least_loaded,
    predict,
    spare_of,
)

# All that is idle comes back; a second of prefill is one of three that all wait for in the end.
BUSY = Outlook(now=100.0, strain=3.0, returns=lambda _idle_s: 1.0)


def prompt(n_tokens=1600, size=16):
    return Chain(tuple(range(n_tokens // size)), n_tokens, size)


def cost_of(candidate, chain, outlook=CALM):
    return Scores([candidate], chain, outlook).cost(0)


def rates(tok_s=1000.0, interference=0.0):
    pool = PoolRates()
    pool.computed(1000, 1000 / tok_s, 0)
    pool.interference = interference
    return EngineRates(pool)


def blocks_of(at, size):
    """Those of a prompt, by its number."""
    return range(10**6 * at, 10**6 * at + size)


def full_of(*sizes):
    """What an engine holds: prompts of so many blocks, least recently used first."""
    residents = Residents(lambda _block: True)
    for at, size in enumerate(sizes):
        residents.use(float(at), blocks_of(at, size), size)
    return residents


def candidate(engine="a", *, rate=1000.0, interference=0.0, queue_s=0.0, decoding=0, in_flight=0, **more):
    load = LoadView(in_flight, queue_s, decoding)
    return Candidate(engine, more.pop("tokens_per_block", 16), rates(rate, interference), load=load, **more)


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
        assert predict(prompt(n_tokens), match.blocks, size) == expected


class TestTerms:
    """By hand: 1000 tokens a second computed, 10,000 restored from host memory, a third of that from disk."""

    def test_without_what_is_lost(self):
        match, in_use = Match(gpu=10, host=5, disk=3, pending=2), InUse(100)
        in_use.add(range(50))
        told = candidate(
            match=match, queue_s=0.5, decoding=2, in_flight=3, interference=0.05, free_blocks=7, turn=9,
            busy=0.25, in_use=in_use,
        )  # fmt: skip
        expected = {
            "queue_s": 0.5,
            "room_s": 8.0 * 12 / 50,
            "restore_s": 80 / 10_000 + 48 / (10_000 / 3),
            "prefill_s": 0.68,
            "interference_s": 0.68 * 0.05 * 2,
            "congestion_s": (0.0224 + 0.68) * 2,
            "later_s": 4 * 0.25 * 2.0,
        }
        assert cost_of(told, prompt(1000), Outlook(0.0, 3.0, CALM.returns, 5.0, 2.0, 8.0)) == Cost(
            "a", **{name: pytest.approx(seconds) for name, seconds in expected.items()}, regret_s=None,
            cached_tokens=320, host_tokens=80, disk_tokens=48, pending_tokens=32, in_flight=3, free_blocks=7,
            turn=9,
        )  # fmt: skip

    def test_none_is_forgotten(self):
        """A new term has to have a value here."""
        in_use = InUse(100)
        in_use.add(range(10**6, 10**6 + 90))
        match, parted = Match(gpu=10, host=5), Match(cut=50, lacks=Attention.WINDOW)
        told = candidate(
            match=match, queue_s=0.5, decoding=2, interference=0.05, busy=0.25, in_use=in_use, room=0,
            residents=full_of(100),
        )  # fmt: skip
        outlook = Outlook(9.0, 3.0, lambda _idle_s: 1.0, 5.0, 2.0, 8.0, stall=0.05, arrivals=lambda _: 0.5)
        chosen = place([told, candidate("b", queue_s=99.0, match=parted)], prompt(1600), outlook).chosen
        assert [name for name in TERMS if not getattr(chosen, name)] == ["transfer_s"], "which pairs have"

    def test_the_first_token_waits_for_the_requests_own_terms_alone(self):
        cost = Cost(
            "a", queue_s=1.0, room_s=2.0, restore_s=0.25, prefill_s=0.5, interference_s=0.125,
            congestion_s=8.0, later_s=9.0, again_s=5.0, regret_s=7.0,
        )  # fmt: skip
        assert (cost.first_token_s, cost.total_s) == (3.875, 32.875)

    def test_no_more_is_restored_or_awaited_than_is_reused(self):
        for tier in ("host", "disk", "pending"):
            cost = cost_of(candidate(match=Match(**{tier: 2})), prompt(32))
            assert cost.cached_tokens == getattr(cost, f"{tier}_tokens") == 16

    @pytest.mark.parametrize(
        ("room", "cached", "lost"),
        [
            (None, 0, 0),  # nobody knows
            (100, 0, 0),  # there is room for all of it
            (60, 0, 40),  # 40 of the 50 blocks of the one that was used least recently
            (10, 0, 50 + 40),
            (0, 0, 50 + 50),
            (0, 50, 50),  # what is cached takes no room
            (0, 100, 0),  # but for the end of a block
        ],
    )
    def test_what_it_evicts_is_regretted(self, room, cached, lost):
        told = candidate(room=room, match=Match(gpu=cached), residents=full_of(50, 50, 50))
        placement = place([told], prompt(1601), BUSY)
        assert placement.chosen.regret_s == pytest.approx(lost * 16 / 1000 * 3.0)
        assert placement.chosen.total_s == pytest.approx(placement.uncached_tokens * 3 / 1000 + lost * 0.048)
        assert place([told], prompt(1601), CALM).chosen.regret_s == 0.0

    @pytest.mark.parametrize(("free", "moved"), [(200, 0), (70, 10), (40, 40), (0, 80)])
    def test_what_goes_to_the_host_tier_is_brought_back(self, free, moved):
        """20 of 100 blocks lie on the GPU, 30 below: 80 need room there, and nothing is lost for good."""
        told = candidate(
            room=1000,
            free_blocks=free,
            match=Match(gpu=20, host=30, lead=20),
            residents=full_of(50, 50),
            on_gpu=full_of(50, 50),
        )
        outlook = Outlook(5.0, 3.0, lambda _idle_s: 1.0, turns=4.0)
        assert place([told], prompt(1600), outlook).chosen.regret_s == pytest.approx(
            moved * 16 / 10_000 * 3.0
        )


class TestPlace:
    @pytest.mark.parametrize(
        ("queue_s", "strain", "chosen"),
        [
            (1.43, 1.0, "holds"),
            (1.45, 1.0, "idle"),  # 1440 tokens take 1.44 s
            (1.45, 2.0, "holds"),  # twice as long of all who wait, where engines are busy half of the time
            (2.89, 2.0, "idle"),
        ],
    )
    def test_a_queue_outweighs_a_prefix_when_it_takes_longer_than_to_compute_it(
        self, queue_s, strain, chosen
    ):
        holds = candidate("holds", match=Match(gpu=90), queue_s=queue_s)
        placement = place([candidate("idle"), holds], prompt(), Outlook(0.0, strain, CALM.returns))
        assert (placement.engine, placement.strain) == (chosen, strain)

    @pytest.mark.parametrize(
        ("gpu", "elsewhere"), [((4,), None), ((4, 2), 32), ((4, 0), 0), ((2, 4), 32), ((4, 4), 64)]
    )
    def test_tells_what_another_engine_would_reuse(self, gpu, elsewhere):
        held = [candidate(str(at), match=Match(gpu=blocks)) for at, blocks in enumerate(gpu)]
        placement = place(held, prompt(160))
        assert (placement.chosen.cached_tokens, placement.elsewhere) == (64, elsewhere)

    def test_what_the_dear_would_lose_is_not_looked_at(self):
        cheap, dear = candidate("cheap", room=0), candidate("dear", queue_s=9.0, room=0)
        costs = place([dear, cheap], prompt(), BUSY).costs
        assert [cost.regret_s for cost in costs] == [None, 0.0]

    def test_what_is_lost_is_looked_at_on_a_few_engines_of_which_each_gets_its_turn(self):
        turns = dict.fromkeys(map(str, range(MAX_LOOKS + 4)), 0)
        for turn in range(1, 3 * len(turns) + 1):
            placement = place(
                [candidate(name, turn=last, room=0, residents=full_of(100)) for name, last in turns.items()],
                prompt(),
                BUSY,
            )
            assert sum(cost.regret_s is not None for cost in placement.costs) == MAX_LOOKS
            turns[placement.engine] = turn
        assert min(turns.values()) > 2 * len(turns)

    def test_a_prediction_on_blocks_still_to_come_or_beside_unknown_ones_is_not_firm(self):
        assert place([candidate(match=Match(gpu=2))], prompt()).firm
        assert not place([candidate(match=Match(gpu=2, pending=1))], prompt()).firm
        assert not place([candidate(match=Match(gpu=2), complete=False)], prompt()).firm

    def test_tells_what_of_the_prediction_needs_no_lower_tier(self):
        placement = place([candidate(match=Match(gpu=4, host=6, lead=3))], prompt(160))
        assert (placement.predicted_tokens, placement.gpu_tokens) == (144, 48)
        assert place([candidate(match=Match(gpu=10, lead=10))], prompt(160)).gpu_tokens == 144


class TestBursts:
    """A beginning of 800 tokens that takes 0.8 s is being computed on one engine."""

    leader = candidate("leader", match=Match(pending=50), queue_s=0.6, in_flight=5, decoding=2)

    @pytest.mark.parametrize(
        ("queue_s", "spare"), [(0.0, 1.0), (0.2, 0.75), (0.4, 0.5), (0.8, 0.25), (9.0, 0.25)]
    )
    def test_an_engine_is_spare_if_it_is_soon_idle(self, queue_s, spare):
        both = [self.leader, candidate("other", queue_s=queue_s)]
        assert spare_of(both, prompt()) == pytest.approx(spare)

    def test_what_an_engine_holds_already_makes_no_burst(self):
        both = [candidate("leader", match=Match(gpu=50), queue_s=0.6), candidate("other")]
        assert spare_of(both, prompt()) == 0.0

    def test_work_delays_those_who_are_still_to_come_to_where_requests_wait(self):
        calm, burst = (cost_of(self.leader, prompt(), replace(CALM, spare=spare)) for spare in (0.0, 0.5))
        # 0.8 s for each that is to come: three wait. The engine that is spare is so by half.
        assert (calm.stall_s, burst.stall_s) == (0.0, pytest.approx(0.8 * 3 * GROWTH / 2))
        assert burst.total_s == pytest.approx(calm.total_s + burst.stall_s)
        idle = candidate("other", in_flight=2, decoding=2)
        assert cost_of(idle, prompt(), replace(CALM, spare=0.5)).stall_s == 0.0


class TestPartedPrompts:
    """The second prompt leaves windows where they part, on the engine that holds the first."""

    def test_a_beginning_is_completed_where_it_is(self):
        half, chain = Match(cut=50, lacks=Attention.WINDOW), prompt(1600)
        told = candidate("a", queue_s=1.0, match=half), candidate("b"), candidate("c", match=Match(gpu=10))
        placement = place(told, chain, BUSY)
        assert [cost.again_s for cost in placement.costs] == [
            0.0,
            pytest.approx(SHARED * 3 * 0.64),
            pytest.approx(SHARED * 3 * 0.64),
        ]
        assert [place(told[:2], chain, outlook).engine for outlook in (BUSY, CALM)] == ["a", "b"]
        is_whole = replace(told[0], match=Match())
        assert place((is_whole, told[1]), chain, BUSY).engine == "b"

    def test_what_an_engine_reuses_need_not_be_completed_on_another(self):
        whole, half = Match(gpu=50), Match(gpu=20, cut=30, lacks=Attention.STATE)
        told = candidate("a", match=half), candidate("b", match=whole), candidate("c")
        assert [cost.again_s for cost in place(told, prompt(1600), BUSY).costs] == [0.0, 0.0, 0.0]

    def test_an_adapter_that_follows_its_engine_is_taken_at_its_word(self):
        told = candidate("a", match=Match(cut=50)), candidate("b", forecast=Forecast(cached_tokens=0))
        assert [cost.again_s for cost in place(told, prompt(1600), BUSY).costs] == [0.0, 0.0]


class TestTies:
    """Costs within a millisecond are equal."""

    def test_go_to_the_engine_of_the_session_then_the_emptiest_then_in_turns(self):
        last = candidate("last", is_last=True, queue_s=TIE_S / 2, turn=9)
        roomy, fresh = candidate("roomy", free_blocks=9, turn=8), candidate("fresh", free_blocks=8, turn=1)
        assert place([fresh, roomy, last], prompt()).engine == "last"
        assert place([fresh, roomy], prompt()).engine == "roomy"
        assert place([replace(roomy, free_blocks=8), fresh], prompt()).engine == "fresh"
        assert place([candidate("none"), candidate("some", free_blocks=1)], prompt()).engine == "some"


class TestForecast:
    """What an engine's own adapter foresees stands in place of the index and the learned rates."""

    @pytest.mark.parametrize("firm", [True, False])
    def test_it_says_whether_that_is_firm(self, firm):
        told = candidate(forecast=Forecast(0, firm=firm), match=Match(gpu=1, pending=5 * firm))
        assert place([told], prompt()).firm is firm

    def test_it_is_held_against_what_other_engines_are_known_for(self):
        slots = candidate("slots", forecast=Forecast(1000, prefill_s=0.5))
        assert place([slots, candidate("index", match=Match(gpu=90))], prompt()).engine == "index"
        assert place([slots, candidate("index", match=Match(gpu=10))], prompt()).engine == "slots"


class TestPlaceLeastLoaded:
    def test_takes_the_fewest_in_flight(self):
        rows = [
            candidate(name, in_flight=n, queue_s=9.0 * (n == 1))
            for name, n in zip("abc", (3, 1, 2), strict=True)
        ]
        placement = place_least_loaded(rows)
        assert (placement.engine, placement.predicted_tokens, placement.n_tokens) == ("b", 0, 0)
        assert placement.rule == "least loaded"
        assert [cost.in_flight for cost in placement.costs] == [3, 1, 2]

    def test_of_equals_the_sessions_own_then_in_turns_whatever_they_hold(self):
        rows = [candidate("a", turn=2, match=Match(gpu=9)), candidate("b", turn=1), candidate("c", turn=3)]
        assert place_least_loaded(rows).engine == "b"
        assert place_least_loaded([*rows, candidate("d", turn=4, is_last=True)]).engine == "d"
        assert place_least_loaded([candidate("d", in_flight=1, is_last=True), *rows]).engine == "b"


LOADS = st.tuples(st.integers(0, 100), st.floats(0, 50), st.floats(1, 1e5), st.integers(0, 200))


class TestWhateverTheState:
    @given(st.lists(LOADS, min_size=1, max_size=4), st.floats(1, 20), st.booleans())
    def test_a_decision_goes_by_the_sum_of_the_terms(self, rows, strain, is_foreseen):
        candidates = [
            candidate(
                str(at), match=Match(gpu=gpu, host=5, cut=gpu % 3), queue_s=queue_s, rate=rate, busy=0.5,
                decoding=gpu,
                forecast=Forecast(gpu, wait_s=queue_s, restore_s=0.5, prefill_s=1.5) if is_foreseen else None,
            )
            for at, (gpu, queue_s, rate, _) in enumerate(rows)
        ]  # fmt: skip
        scores = Scores(candidates, prompt(), Outlook(0.0, strain, BUSY.returns, 3.0, 0.5))
        assert scores.totals == [pytest.approx(cost.total_s) for cost in scores.costs()]

    @given(st.lists(LOADS, min_size=1, max_size=2 * MAX_LOOKS), st.floats(1, 20))
    def test_none_costs_less_by_more_than_a_tie_but_by_what_it_would_lose(self, rows, strain):
        candidates = [
            candidate(
                str(at), match=Match(gpu=gpu), queue_s=queue_s, rate=rate, room=room, residents=full_of(50)
            )
            for at, (gpu, queue_s, rate, room) in enumerate(rows)
        ]
        placement = place(candidates, prompt(), Outlook(0.0, strain, BUSY.returns))
        looked_at = [cost.total_s for cost in placement.costs if cost.regret_s is not None]
        assert placement.chosen.total_s <= min(looked_at) + TIE_S
        if len(rows) <= MAX_LOOKS:
            assert placement.chosen.total_s <= min(cost.total_s for cost in placement.costs) + TIE_S

    @given(LOADS, st.floats(1, 20), st.floats(0, 10), st.integers(0, 100))
    def test_cost_never_falls_with_the_queue_nor_with_what_is_to_be_computed(self, row, strain, wait_s, less):
        gpu, queue_s, rate, room = row
        outlook = Outlook(0.0, strain, BUSY.returns)

        def cost(queue_s, blocks):
            told = candidate(
                queue_s=queue_s, match=Match(gpu=blocks), rate=rate, room=room, residents=full_of(50, 50)
            )
            return place([told], prompt(), outlook).chosen.total_s

        assert cost(queue_s, gpu) <= cost(queue_s + wait_s, gpu)
        assert cost(queue_s, gpu) <= cost(queue_s, max(gpu - less, 0)) + 1e-9
