"""Every sentence that explains a placement, case by case."""

import random
from fnmatch import fnmatchcase

import pytest
from msgspec.structs import replace

from proxy.core.placement.decision import Cost, Pair
from proxy.core.reasons import Moments, Reason, parts_of, reason_of, tie_of, utilisation_of, why
from tests.placements import placement_of


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
    return Cost(
        engine, prefill_s=prefill, congestion_s=congestion, regret_s=regret, cached_tokens=cached,
        **seconds, **terms,
    )  # fmt: skip


def placed(engine, *costs, strain=1.0, rule="lowest cost"):
    chosen = next(each for each in costs if each.engine == engine)
    return replace(placement_of(engine, chosen.cached_tokens, 4000, costs, rule), strain=strain)


def held(*others, strain=1.0, **terms):
    """A placement on e1, which holds most."""
    return placed("e1", *others, cost("e1", 3200, strain=strain, **terms), strain=strain)


def paired(alone, *, together=False, **terms):
    """A pair of p and d, where d alone would cost `alone`; `together`: neither can answer alone."""
    both = replace(
        cost("d", prefill=0.2, **terms), prefiller="p", pulled_tokens=4000, transfer_s=0.05,
        cached_tokens=3200,
    )  # fmt: skip
    legs = Pair(placed("p", cost("p", 3200)), placed("d", alone), 1.0, together)
    return replace(placed("d", alone), chosen=both, pair=legs, all_costs=lambda: (alone, both))


FREE = cost("e0")
SOONER = "*e0 would answer sooner, in 1.0 s against 1.7 s, but would "
# What is decided; a `*` stands for words that another case has.
CASES = [
    (Reason.HELD, held(FREE),
     "e1 holds 3,200 of 4,000 tokens; it computes 800 tokens in 200 ms; on e0 computing 4,000 tokens*"),
    # The next best is held against it.
    (Reason.HELD, placed("e1", FREE, cost("e1", 3200), cost("e2", 800, restore=0.5)),
     "*; on e0 computing 4,000 tokens takes 1.0 s"),
    (Reason.HELD, held(FREE, queue=0.3), "*; it is free in 300 ms and computes 800*"),
    (Reason.HELD, held(FREE, queue=0.2, room=0.1), "* in 200 ms, has memory 100 ms later and computes*"),
    (Reason.HELD, held(FREE, queue=0.005, restore=0.05, host_tokens=1600),
     "*; it is free in 5.0 ms, restores 1,600 tokens in 50 ms and computes 800 tokens in 200 ms; on e0 *"),
    (Reason.HELD, held(cost("e0", 3200, queue=0.4)), "*; on e0 400 ms of prefill wait"),
    # A second of work counts for what it costs all.
    (Reason.HELD, held(cost("e0", queue=2.0), queue=0.5), "*; on e0 2.0 s of prefill wait"),
    (Reason.HELD, held(cost("e0", queue=2.0, strain=4.0), queue=0.5, strain=4.0), "*; on e0 computing 4,0*"),
    # Another would answer sooner, at a cost to others.
    (Reason.HELD, held(cost("e0", strain=4.0), queue=1.5, strain=4.0),
     f"{SOONER}delay later requests by 3.0 s, at 75% utilisation"),
    (Reason.HELD, held(cost("e0", regret=2.5), queue=1.5, regret=0.1), f"{SOONER}evict KV worth 2.5 s"),
    (Reason.HELD, held(cost("e0", later=2.5), queue=1.5, later=0.5), f"{SOONER}make the next turns * 2.0*"),
    (Reason.SPREAD, placed("e1", cost("e0", again=2.5), cost("e1", queue=1.5)), "* but would have the next*"),
    # A regret that was not looked at is dearer by another term.
    (Reason.RELEASED, placed("e0", cost("e0", regret=0.5), cost("e1", 3200, queue=9.0, regret=None)),
     "* but 9.0 s of prefill wait there*"),
    # Of several holders, the one that costs least is told of.
    (Reason.RELEASED, placed("e0", FREE, cost("e1", 3200, queue=5.0), cost("e2", 3200, queue=2.0)),
     "e2 holds 3,200 of 4,000 tokens, but 2.0 s*"),
    (Reason.RELEASED, placed("e0", cost("e0", free_blocks=9), cost("e1", 2), cost("e2", queue=1.0)),
     "e1 holds 2 of 4,000 tokens, which saves less than a millisecond; of 2 engines within 1 ms, e0 has*"),
    (Reason.GATHERED, held(FREE, pending_tokens=3200, queue=0.4),
     "e1 is computing 3,200 of 4,000 tokens for requests in flight; it is free in 400 ms*"),
    # What all share and what one computes; what several compute.
    (Reason.GATHERED, held(cost("e0", 2800), pending_tokens=400), "*"),
    (Reason.GATHERED, held(cost("e0", 3200, pending_tokens=3200, queue=1.0), pending_tokens=1616), "*"),
    # A little that pends is not what decided.
    (Reason.HELD, held(cost("e0", 3200, queue=1.0), pending_tokens=16), "*"),
    (Reason.HELD, held(cost("e0", 1584, queue=1.0), pending_tokens=1600), "*"),
    (Reason.SPREAD, placed("e0", FREE, cost("e1", queue=0.4), cost("e2", queue=0.6)),
     "no engine holds any of the prompt; e0 computes 4,000 tokens in 1.0 s; on * 400 ms of prefill wait"),
    (Reason.SPREAD, placed("e0", FREE, cost("e1", regret=0.2)), "*; on e1 making room evicts KV worth*"),
    (Reason.BALANCED, placed("e0", Cost("e0", in_flight=2), Cost("e1", in_flight=3), rule="least loaded"),
     "the prompt is not known here: e0 has the fewest requests in flight (2)"),
    (Reason.BALANCED,
     placed("e0", Cost("e0", in_flight=2, turn=4), Cost("e1", in_flight=2, turn=7), Cost("e2", in_flight=3),
            rule="least loaded"),
     "*; of 2 engines with as few, e0 was chosen longest ago"),
    (Reason.ONLY, placed("e0", cost("e0", 800)), "e0 is the only engine*; it holds 800 of 4,000 tokens"),
    (Reason.ONLY, replace(placed("e0", cost("e0", 800)), unlike=("e1", "e2")),
     "e0 holds 800 of 4,000 tokens; e1 and e2 would not cost less, and cannot go on with an answer of e0: *"),
    (Reason.PAIRED, paired(cost("d", queue=2.0)),
     "p computes 800 tokens in 200 ms, and d reads the KV of 4,000 from it in 50 ms; without a pair, 2.0 s*"),
    (Reason.PAIRED, paired(cost("d"), together=True), "p holds 3,200 *, and d answers: neither of them can*"),
    (Reason.PAIRED, paired(replace(cost("d"), stall_s=3.0)), "* on d delays other requests by 3.0 s in all"),
    *(
        (Reason.RELEASED, placed("e0", FREE, cost("e1", 3200, **terms)),
         f"e1 holds 3,200 of 4,000 tokens, but {obstacle}; e0 computes 4,000 tokens in 1.0 s")
        for terms, obstacle in (
            ({"room": 1.9}, "running streams there leave no memory for it for 1.9 s"),
            ({"restore": 1.9, "host_tokens": 2000, "disk_tokens": 1200}, "restoring 3,200 tokens * 1.9 s"),
            ({"restore": 1.9}, "restoring its KV there takes 1.9 s"),
            ({"prefill": 1.9}, "computing 800 tokens there takes 1.9 s"),
            ({"interference": 1.9}, "running streams there slow the prompt by 1.9 s"),
            ({"later": 1.9}, "the next turns would wait 1.9 s there"),
            ({"again": 1.9}, "the next prompt with this beginning would compute it there again: 1.9 s"),
            ({"regret": 1.9}, "making room there evicts KV worth 1.9 s"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "placement", "said"), CASES, ids=lambda each: str(each)[:60])
def test_the_reason_and_its_sentence(reason, placement, said):
    assert reason_of(placement) is reason
    assert fnmatchcase(why(placement), said), why(placement)


def test_utilisation_is_what_strain_comes_of():
    assert utilisation_of(placed("a", cost("a"), strain=4.0)) == 0.75
    assert utilisation_of(placed("a", cost("a"))) == 0


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

    @pytest.mark.parametrize(
        ("costs", "is_tie"),
        [
            ((cost("e0", queue=0.0009), cost("e1")), True),
            ((cost("e0"), cost("e1", queue=0.0011)), False),
            ((cost("e0", regret=0.5), cost("e1", queue=0.5, regret=None)), False),  # it was dearer
        ],
    )
    def test_a_millisecond_is_none(self, costs, is_tie):
        assert (tie_of(placed("e0", *costs)) is not None) is is_tie


def test_a_pair_that_was_not_chosen_is_no_rival():
    alone, both = cost("d"), replace(cost("d", 3200), prefiller="p", transfer_s=9.0)
    placement = placed("d", alone, both)
    assert placement.chosen is alone
    assert reason_of(placement) is not Reason.PAIRED
    assert "; on d computing 4,000 tokens takes 1.0 s" in why(placed("e", cost("e", 3200), alone, both))


AT_ONCE = dict.fromkeys(("came", "arrived", "prepared", "placed", "gathered", "sent", "began"), 5.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_measured_time(seed):
    draw = random.Random(seed)  # noqa: S311
    times = sorted(draw.uniform(0, 9) for _ in AT_ONCE)
    reported = {name: draw.choice([None, draw.uniform(0, 9)]) for name in ("prefill_s", "decode_s")}
    moments = Moments(
        **dict(zip(AT_ONCE, times, strict=True)),
        queued_s=draw.uniform(0, times[3] - times[2]),
        is_whole=draw.random() < 0.5,
        **reported,
    )
    parts = parts_of(moments)
    assert sum(parts.values()) == pytest.approx(moments.began - moments.came)
    assert all(seconds > 0 for seconds in parts.values())
