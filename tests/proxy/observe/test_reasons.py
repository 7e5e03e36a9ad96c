"""Every sentence that explains a placement, case by case."""

import pytest
from msgspec.structs import replace

from proxy.core.placement.decision import Cost, Pair, Placement
from proxy.observe.reasons import Reason, reason_of, tie_of, utilisation_of, why


def cost(engine, cached=0, *, prefill=None, strain=1.0, **terms):
    """A cost at 4,000 tokens, a thousand of which take 250 ms; other terms by name."""
    prefill = (4000 - cached) / 4000 if prefill is None else prefill
    regret = terms.pop("regret", 0.0)
    seconds = {
        f"{name}_s": terms.pop(name)
        for name in ("queue", "room", "restore", "interference", "later", "again")
        if name in terms
    }
    congestion = (prefill + seconds.get("restore_s", 0.0)) * (strain - 1)
    total = sum(seconds.values()) + prefill + congestion + (regret or 0.0)
    return Cost(
        engine, prefill_s=prefill, congestion_s=congestion, regret_s=regret, total_s=total,
        cached_tokens=cached, **seconds, **terms,
    )  # fmt: skip


def placed(engine, *costs, strain=1.0, rule="lowest cost"):
    chosen = next(each for each in costs if each.engine == engine)
    return replace(Placement.of(engine, chosen.cached_tokens, 4000, costs, rule), strain=strain)


def test_utilisation_is_what_strain_comes_of():
    assert utilisation_of(placed("a", cost("a"), strain=4.0)) == 0.75
    assert utilisation_of(placed("a", cost("a"))) == 0


class TestHeld:
    def test_the_others_would_have_to_compute_more(self):
        placement = placed("e1", cost("e0"), cost("e1", 3200))
        assert reason_of(placement) is Reason.HELD
        assert why(placement) == (
            "e1 holds 3,200 of 4,000 tokens; it computes 800 tokens in 200 ms, but computing 4,000 tokens on "
            "e0 takes 1.0 s"
        )

    def test_the_one_that_is_held_against_it_is_the_next_best(self):
        placement = placed("e1", cost("e0"), cost("e1", 3200), cost("e2", 800, restore=0.5, host_tokens=800))
        assert why(placement).endswith("computing 4,000 tokens on e0 takes 1.0 s")

    def test_it_is_worth_waiting_for(self):
        placement = placed("e1", cost("e0"), cost("e1", 3200, queue=0.3))
        assert why(placement).startswith(
            "e1 holds 3,200 of 4,000 tokens; it is free in 300 ms and computes 800 tokens in 200 ms, but"
        )

    def test_streams_are_to_leave_room_for_it(self):
        placement = placed("e1", cost("e0"), cost("e1", 3200, queue=0.2, room=0.1))
        assert "it is free in 200 ms, has memory 100 ms later and computes 800 tokens" in why(placement)

    def test_it_comes_back_from_the_host_tier(self):
        placement = placed("e1", cost("e0"), cost("e1", 3200, queue=0.005, restore=0.05, host_tokens=1600))
        assert why(placement).startswith(
            "e1 holds 3,200 of 4,000 tokens; it is free in 5.0 ms, restores 1,600 tokens in 50 ms and "
            "computes 800 tokens in 200 ms, but"
        )

    def test_another_holds_as_much_and_is_busier(self):
        placement = placed("e1", cost("e0", 3200, queue=0.4), cost("e1", 3200))
        assert why(placement).endswith("but 400 ms of prefill wait on e0")

    def test_a_second_of_work_counts_for_what_it_costs_all(self):
        for strain, said in (
            (1.0, "2.0 s of prefill wait on e0"),
            (4.0, "computing 4,000 tokens on e0 takes 1.0 s"),
        ):
            costs = cost("e0", queue=2.0, strain=strain), cost("e1", 3200, queue=0.5, strain=strain)
            assert why(placed("e1", *costs, strain=strain)).endswith(said)

    def test_another_would_answer_sooner_and_hold_up_the_rest(self):
        costs = cost("e0", strain=4.0), cost("e1", 3200, queue=1.5, strain=4.0)
        placement = placed("e1", *costs, strain=4.0)
        assert why(placement) == (
            "e1 holds 3,200 of 4,000 tokens; e0 would answer sooner, in 1.0 s against 1.7 s, but would delay "
            "later requests by 3.0 s, at 75% utilisation"
        )

    def test_another_would_answer_sooner_and_evict(self):
        placement = placed("e1", cost("e0", regret=2.5), cost("e1", 3200, queue=1.5, regret=0.1))
        assert why(placement).endswith("sooner, in 1.0 s against 1.7 s, but would evict KV worth 2.5 s")

    def test_another_would_answer_sooner_and_is_busier(self):
        placement = placed("e1", cost("e0", later=2.5), cost("e1", 3200, queue=1.5, later=0.5))
        assert why(placement).endswith(
            "sooner, in 1.0 s against 1.7 s, but would make the next turns wait 2.0 s longer, because it is "
            "busier"
        )

    def test_another_would_answer_sooner_and_leave_a_beginning_to_be_computed_again(self):
        placement = placed("e1", cost("e0", again=2.5), cost("e1", queue=1.5))
        assert why(placement).endswith("but would have the next prompt with this beginning compute it again")


class TestReleased:
    @pytest.mark.parametrize(
        ("terms", "obstacle"),
        [
            ({"queue": 1.9}, "1.9 s of prefill wait there"),
            ({"room": 1.9}, "running streams there leave no memory for it for 1.9 s"),
            (
                {"restore": 1.9, "host_tokens": 2000, "disk_tokens": 1200},
                "restoring 3,200 tokens there takes 1.9 s",
            ),
            ({"restore": 1.9}, "restoring its KV there takes 1.9 s"),
            ({"prefill": 1.9}, "computing 800 tokens there takes 1.9 s"),
            ({"interference": 1.9}, "running streams there slow the prompt by 1.9 s"),
            ({"later": 1.9}, "the next turns would wait 1.9 s there"),
            ({"again": 1.9}, "the next prompt with this beginning would compute it there again: 1.9 s"),
            ({"regret": 1.9}, "making room there evicts KV worth 1.9 s"),
        ],
    )
    def test_the_term_that_made_the_difference_is_named(self, terms, obstacle):
        placement = placed("e0", cost("e0"), cost("e1", 3200, **terms))
        assert reason_of(placement) is Reason.RELEASED
        assert why(placement) == (
            f"e1 holds 3,200 of 4,000 tokens, but {obstacle}; e0 computes 4,000 tokens in 1.0 s"
        )

    def test_an_engine_whose_regret_was_not_looked_at_is_dearer_by_another_term(self):
        placement = placed("e0", cost("e0", regret=0.5), cost("e1", 3200, queue=9.0, regret=None))
        assert "but 9.0 s of prefill wait there" in why(placement)

    def test_of_several_holders_the_one_that_costs_least_is_told_of(self):
        placement = placed("e0", cost("e0"), cost("e1", 3200, queue=5.0), cost("e2", 3200, queue=2.0))
        assert why(placement).startswith("e2 holds 3,200 of 4,000 tokens, but 2.0 s")

    def test_what_saves_nothing_to_speak_of_does_not_decide(self):
        costs = cost("e0", free_blocks=9), cost("e1", 2), cost("e2", queue=1.0)
        assert why(placed("e0", *costs)) == (
            "e1 holds 2 of 4,000 tokens, which saves less than a millisecond; of 2 engines within 1 ms, "
            "e0 has the most free cache (9 blocks)"
        )


class TestGathered:
    def test_a_burst_waits_where_its_prefix_is_computed(self):
        placement = placed("e1", cost("e0"), cost("e1", 3200, pending_tokens=3200, queue=0.4))
        assert reason_of(placement) is Reason.GATHERED
        assert why(placement) == (
            "e1 is computing 3,200 of 4,000 tokens for requests in flight; it is free in 400 ms and computes "
            "800 tokens in 200 ms, but computing 4,000 tokens on e0 takes 1.0 s"
        )

    def test_what_all_share_and_what_one_computes(self):
        placement = placed("e1", cost("e0", 2800), cost("e1", 3200, pending_tokens=400))
        assert reason_of(placement) is Reason.GATHERED

    def test_what_several_compute(self):
        costs = cost("e0", 3200, pending_tokens=3200, queue=1.0), cost("e1", 3200, pending_tokens=1616)
        assert reason_of(placed("e1", *costs)) is Reason.GATHERED

    def test_a_little_that_pends_is_not_what_decided(self):
        for elsewhere, pending in ((3200, 16), (1584, 1600), (0, 0)):
            placement = placed(
                "e1", cost("e0", elsewhere, queue=1.0), cost("e1", 3200, pending_tokens=pending)
            )
            assert reason_of(placement) is Reason.HELD


class TestSpread:
    def test_where_least_waits(self):
        placement = placed("e0", cost("e0"), cost("e1", queue=0.4), cost("e2", queue=0.6))
        assert reason_of(placement) is Reason.SPREAD
        assert why(placement) == (
            "no engine holds any of the prompt; e0 computes 4,000 tokens in 1.0 s, but 400 ms of prefill "
            "wait on e1"
        )

    def test_where_least_is_lost(self):
        placement = placed("e0", cost("e0"), cost("e1", regret=0.2))
        assert why(placement).endswith("but making room on e1 evicts KV worth 200 ms")


class TestTies:
    @pytest.mark.parametrize(
        ("chosen", "other", "tie"),
        [
            ({"is_last": True}, {"free_blocks": 9}, "served this session before"),
            ({"free_blocks": 1200, "turn": 8}, {"free_blocks": 9}, "has the most free cache (1,200 blocks)"),
            ({"turn": 3}, {"turn": 8}, "was chosen longest ago"),
            ({"turn": 3, "free_blocks": 0}, {"turn": 8}, "was chosen longest ago"),
            ({}, {"turn": 8}, "was not chosen before"),
            ({"is_last": True, "turn": 1}, {"is_last": True, "turn": 2}, "was chosen longest ago"),
        ],
    )
    def test_what_decided_is_told(self, chosen, other, tie):
        placement = placed("e0", cost("e0", **chosen), cost("e1", **other), cost("e2", queue=1.0))
        assert tie_of(placement) == tie
        assert why(placement) == f"no engine holds any of the prompt; of 2 engines within 1 ms, e0 {tie}"

    def test_a_millisecond_is_none(self):
        assert tie_of(placed("e0", cost("e0", queue=0.0009), cost("e1"))) is not None
        assert tie_of(placed("e0", cost("e0"), cost("e1", queue=0.0011))) is None

    def test_what_was_not_looked_at_was_dearer(self):
        assert tie_of(placed("e0", cost("e0", regret=0.5), cost("e1", queue=0.5, regret=None))) is None

    def test_requests_in_flight_that_are_equal(self):
        costs = Cost("e0", in_flight=2, turn=4), Cost("e1", in_flight=2, turn=7), Cost("e2", in_flight=3)
        placement = placed("e0", *costs, rule="least loaded")
        assert why(placement).endswith("in flight (2); of 2 engines with as few, e0 was chosen longest ago")


def test_a_prompt_that_is_not_known():
    placement = placed("e0", Cost("e0", in_flight=2), Cost("e1", in_flight=3), rule="least loaded")
    assert reason_of(placement) is Reason.BALANCED
    assert why(placement) == "the prompt is not known here: e0 has the fewest requests in flight (2)"


def test_one_engine_alone():
    placement = placed("e0", cost("e0", 800))
    assert reason_of(placement) is Reason.ONLY
    assert why(placement) == "e0 is the only engine that can take the request; it holds 800 of 4,000 tokens"


class TestPaired:
    def pair(self, alone, **terms):
        """A pair of p and d, where d alone would cost `alone`."""
        both = replace(
            cost("d", prefill=0.2, **terms), prefiller="p", pulled_tokens=4000, transfer_s=0.05,
            cached_tokens=3200, total_s=0.25,
        )  # fmt: skip
        legs = Pair(placed("p", cost("p", 3200)), placed("d", alone), 1.0)
        return replace(placed("d", alone), chosen=both, pair=legs, all_costs=lambda: (alone, both))

    def test_the_prompt_would_wait_behind_others(self):
        placement = self.pair(cost("d", queue=2.0))
        assert reason_of(placement) is Reason.PAIRED
        assert tie_of(placement) is None
        assert why(placement) == (
            "p computes 800 tokens in 200 ms, and d reads the KV of 4,000 from it in 50 ms; without a pair, "
            "2.0 s of prefill wait on d"
        )

    def test_the_prompt_would_delay_streams(self):
        alone = replace(cost("d"), stall_s=3.0)
        assert why(self.pair(alone)).endswith(
            "without a pair, computing 4,000 tokens on d delays other requests by 3.0 s in all"
        )

    def test_a_pair_that_was_not_chosen_is_no_rival(self):
        alone, both = cost("d"), replace(cost("d", 3200), prefiller="p", total_s=9.0)
        placement = placed("d", alone, both)
        assert placement.chosen is alone
        assert reason_of(placement) is not Reason.PAIRED
        other = placed("e", cost("e", 3200), alone, both)
        assert "on d takes 1.0 s" in why(other)
