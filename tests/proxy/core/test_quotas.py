from proxy.core.quotas import Denied, Left, Quota, TenantLimits, Use


def test_without_limits_all_is_allowed():
    quota = Quota(TenantLimits())
    for _ in range(100):
        assert quota.enter(0.0) is None
        quota.spend(10**9)
        quota.leave()


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


def test_requests_at_a_time():
    quota = Quota(TenantLimits(requests_per_minute=3, concurrent_requests=1))
    for _ in range(2):
        assert quota.enter(0.0) is None
        assert quota.enter(0.0) == Denied("concurrent_requests", 1, 1)
        quota.leave()
    assert quota.enter(0.0) is None  # those that were denied do not count


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
