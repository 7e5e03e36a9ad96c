from proxy.core.quotas import (
    DAY_S,
    MOST_DAYS,
    ByteBudget,
    DayUse,
    Denied,
    Left,
    Quota,
    TenantLimits,
    Use,
    UseBook,
    Used,
)


def test_requests_of_a_minute_are_refilled_one_by_one():
    quota = Quota(TenantLimits(requests_per_minute=6))
    assert [quota.enter(1000.0) for _ in range(6)] == [None] * 6
    assert quota.enter(1000.0) == Denied("requests_per_minute", 6, 10)
    assert quota.enter(1005.0) == Denied("requests_per_minute", 6, 5)
    assert quota.enter(1010.0) is None
    assert quota.enter(1010.0) is not None
    assert [quota.enter(5000.0) for _ in range(7)].count(None) == 6  # no more than a minute's worth


def test_tokens_are_charged_afterwards():
    quota = Quota(TenantLimits(tokens_per_minute=600))
    assert quota.enter(1000.0) is None
    quota.spend(900)
    assert quota.enter(1000.0) == Denied("tokens_per_minute", 600, 31)
    assert quota.enter(1031.0) is None


def test_what_was_used_elsewhere_counts():
    changed = set()
    here = Quota(TenantLimits(3, 600, 2), "t", changed)
    assert not changed
    here.used_elsewhere(1000.0, "peer", Use(2, 700, 1))
    assert here.enter(1000.0) == Denied("tokens_per_minute", 600, 11)
    assert here.enter(1011.0) is None
    assert here.enter(1011.0) == Denied("concurrent_requests", 2, 1)
    here.leave_elsewhere("peer")
    here.leave_elsewhere("peer")
    assert here.enter(1011.0) == Denied("requests_per_minute", 3, 9)
    here.spend(5)
    assert changed == {here}
    assert here.take() == Use(1, 5, 1)
    here.leave()
    assert here.take() == Use(0, 0, 0)
    alone = Quota(TenantLimits(concurrent_requests=1))
    assert [alone.enter(0.0), alone.enter(0.0)] == [None, Denied("concurrent_requests", 1, 1)]
    alone.leave()
    assert alone.enter(0.0) is None


def test_use_elsewhere_of_a_tenant_without_limits():
    here = Quota(TenantLimits())
    here.used_elsewhere(0.0, "peer", Use(1, 1, 9))
    here.used_elsewhere(0.0, "peer", Use(0, 0, 0))
    assert here.enter(0.0) is None


def test_what_is_left_is_what_decides():
    quota = Quota(TenantLimits(requests_per_minute=2, tokens_per_minute=600))
    assert quota.left(0.0) == [Left("requests", 2, 2, 0.0), Left("tokens", 600, 600, 0.0)]
    quota.enter(0.0)
    quota.spend(900)
    assert quota.left(0.0) == [Left("requests", 2, 1, 30.0), Left("tokens", 600, 0, 90.0)]
    assert quota.enter(30.0).what == "tokens_per_minute"
    assert quota.left(60.0) == [Left("requests", 2, 2, 0.0), Left("tokens", 600, 300, 30.0)]
    assert Quota(TenantLimits(concurrent_requests=1)).left(0.0) == []


def test_what_was_given_back_may_be_taken_again():
    budget = ByteBudget(10)
    budget.take(8)
    assert (budget.has(2), budget.has(3)) == (True, False)
    budget.take(5)  # who must, takes more than there is
    assert (budget.used, budget.has(0)) == (13, False)
    budget.give_back(13)
    assert budget.has(10)


NOW = 20_000 * DAY_S + 5.0  # 2024-10-04


def test_the_last_days_newest_first():
    book = UseBook()
    for day, tenant, model in ((20_000, "b", "m"), (20_000, "a", "m"), (19_999, "", ""), (19_998, "a", "m")):
        book[day, tenant, model].requests += 1
    book[20_000, "a", "m"].output_tokens += 7
    assert [*book.since(2, NOW)] == [
        DayUse("2024-10-04", "a", "m", 1, 0, 0, 0, 7),
        DayUse("2024-10-04", "b", "m", 1, 0, 0, 0, 0),
        DayUse("2024-10-03", None, None, 1, 0, 0, 0, 0),
    ]


def test_old_days_are_dropped_and_the_oldest_of_too_many(monkeypatch):
    book = UseBook(((day, "t", "m"), Used(1)) for day in range(20_000 - MOST_DAYS, 20_001))
    book.prune()
    assert [day for day, *_ in book] == [*range(20_001 - MOST_DAYS, 20_001)]
    monkeypatch.setattr("proxy.core.quotas._MOST_ROWS", 1)
    book.prune()
    assert [day for day, *_ in book] == [20_000]


def test_a_clock_that_was_ahead_drops_no_other_days():
    book = UseBook(((day, "t", "m"), Used(1)) for day in (19_999, 20_000, 47_000))
    book.prune()
    assert len(book) == 3
