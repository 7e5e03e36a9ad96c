from proxy.core.placement.decision import Cost, Placement
from proxy.core.placement.load import Work

NEAR, FAR = Cost("near", cached_tokens=640, host_tokens=80, disk_tokens=48), Cost("far", cached_tokens=160)


def test_the_first_token_waits_for_the_requests_own_terms_alone():
    cost = Cost(
        "a", queue_s=1.0, room_s=2.0, restore_s=0.25, prefill_s=0.5, interference_s=0.125,
        congestion_s=8.0, later_s=9.0, again_s=5.0, regret_s=7.0, total_s=32.875,
    )  # fmt: skip
    assert cost.first_token_s == 3.875


def test_a_decision_says_what_the_engine_has_to_do():
    placement = Placement.of("near", 640, 1000, (FAR, NEAR), "lowest cost")
    assert (placement.engine, placement.uncached_tokens) == ("near", 360)
    assert placement.work == Work(360, 80, 48)


def test_a_decision_says_what_another_engine_would_reuse():
    costs = FAR, NEAR
    assert Placement.of("far", 160, 1000, costs, "lowest cost").elsewhere == 640
    assert Placement.of("far", 160, 1000, (FAR,), "lowest cost").elsewhere is None
    assert Placement.of("far", 160, 1000, costs, "lowest cost").costs == costs
