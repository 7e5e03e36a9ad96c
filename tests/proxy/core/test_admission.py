import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission import (
    MAX_LOOKS,
    QUANTUM,
    Backlog,
    Entry,
    FairQueue,
    Pace,
    retry_after_s,
)


def entry(tenant="a", item="", *, tokens=QUANTUM, priority=0, size=1):
    return Entry(tenant, priority, tokens, size, item)


def filled(*entries, most=1000, size=10**9):
    queue = FairQueue(most, size)
    for each in entries:
        assert queue.add(each) == []
    return queue


def taken(queue, count=10**6, may_go=lambda _: True):
    items = []
    while len(items) < count and (found := queue.take(may_go)) is not None:
        items.append(found.item)
    return items


def test_a_greedy_tenant_waits_for_its_turns():
    queue = filled(
        *(entry("greedy", f"g{n}") for n in range(4)), entry("modest", "m0"), entry("modest", "m1")
    )
    assert taken(queue) == ["g0", "m0", "g1", "m1", "g2", "g3"]
    assert (len(queue), queue.take(lambda _: True)) == (0, None)


def test_turns_are_in_tokens_not_in_requests():
    long = [entry("long", "L", tokens=4 * QUANTUM) for _ in range(3)]
    short = [entry("short", "s", tokens=QUANTUM) for _ in range(8)]
    assert "".join(taken(filled(*long, *short))).startswith("sssLssssL")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5 * QUANTUM)), min_size=1, max_size=60))
def test_no_tenant_that_waits_gets_less_than_another_by_more_than_its_longest_request(requests):
    queue = filled(*(entry(tenant, (tenant, tokens), tokens=tokens) for tenant, tokens in requests))
    left = {tenant: [tokens for name, tokens in requests if name == tenant] for tenant in "abc"}
    given_tokens, longest = dict.fromkeys("abc", 0), max(tokens for _, tokens in requests)
    while all(left.values()):
        tenant, tokens = queue.take(lambda _: True).item
        assert tokens == left[tenant].pop(0)  # its own are served in order
        given_tokens[tenant] += tokens
        assert max(given_tokens.values()) - min(given_tokens.values()) <= 2 * (longest + QUANTUM)


def test_priorities_order_the_requests_of_one_tenant_only():
    queue = filled(
        entry("a", "late", priority=1), entry("a", "usual"), entry("a", "soon", priority=-1), entry("b", "b")
    )
    assert taken(queue) == ["soon", "b", "usual", "late"]


def test_a_request_whose_engine_is_busy_lets_others_go():
    queue = filled(entry("a", "stuck"), entry("b", "b1"), entry("b", "b2"))
    assert taken(queue, may_go=lambda item: item != "stuck") == ["b1", "b2"]
    assert taken(queue) == ["stuck"]


def test_a_passed_over_tenant_goes_as_soon_as_it_may():
    queue = filled(*(entry("b", "b", tokens=9) for _ in range(50)), entry("a", "stuck", tokens=9))
    assert set(taken(queue, 20, may_go=lambda item: item != "stuck")) == {"b"}
    assert taken(queue, 1) == ["stuck"]


def test_a_passed_over_tenant_saves_up_no_more_than_a_turn():
    queue = filled(entry("a", "stuck"), entry("a", "next"), *(entry("b", "b") for _ in range(50)))
    taken(queue, 40, may_go=lambda item: item != "stuck")
    assert taken(queue, 6).count("b") >= 2


def test_who_comes_later_takes_turns_with_those_who_were_served_before():
    queue = filled(*(entry("old", "o") for _ in range(100)))
    taken(queue, 50)
    for _ in range(50):
        queue.add(entry("new", "n"))
    assert taken(queue, 20).count("n") == pytest.approx(10, abs=1)


def test_who_was_served_lately_is_not_first_again():
    queue = filled(entry("a", "a", tokens=9), entry("b", "b", tokens=9), entry("a", "a", tokens=9))
    assert taken(queue) == ["a", "b", "a"]


def test_only_a_few_tenants_are_looked_at():
    queue, asked = filled(*(entry(str(n), n) for n in range(100))), []
    assert queue.take(asked.append) is None
    assert len(asked) == MAX_LOOKS


def test_where_it_is_full_the_tenant_with_most_loses_its_last():
    queue = filled(entry("greedy", "g0"), entry("greedy", "g1", priority=1), entry("greedy", "g2"), most=3)
    modest, more = entry("modest", "m"), entry("greedy", "g3")
    assert [each.item for each in queue.add(modest)] == ["g1"]
    assert queue.add(more) == [more]
    assert queue.add(own := entry("modest", "m2")) == [own]  # two and two: the newcomer
    assert len(queue) == 3


def test_where_its_bodies_are_too_long_the_tenant_with_most_bytes_loses():
    queue = filled(
        entry("small", "s0", size=1), entry("small", "s1", size=1), entry("big", "b", size=8), size=10
    )
    assert [each.item for each in queue.add(entry("small", "s2", size=1))] == ["b"]
    assert queue.add(huge := entry("big", "h", size=11)) == [huge]


def test_what_is_removed_is_gone_and_may_be_removed_again():
    one, two = entry("a", "1"), entry("a", "2")
    queue = filled(one, two)
    for _ in range(2):
        queue.remove(one)
    assert taken(queue) == ["2"]
    queue.remove(two)
    queue.add(entry("a", "3"))
    queue.remove(two)
    queue.remove(entry("a", priority=3))
    assert len(queue) == 1


def test_tokens_ahead_are_ones_own_and_as_many_of_each_other():
    queue = filled(
        entry("a", tokens=1000),
        entry("a", tokens=500, priority=2),
        entry("b", tokens=9000),
        entry("c", tokens=10),
    )
    assert queue.ahead("a", 0, 100) == 1100 + (1100 + QUANTUM) + 10
    assert queue.ahead("new", 0, 100) == 100 + 1500 + (100 + QUANTUM) + 10


def test_a_pace_is_known_after_a_while_and_tells_the_wait():
    pace = Pace()
    pace.begin(100.0)
    assert pace.wait_s(100.0, 10) is None
    pace.took(100.2, 100)
    assert pace.wait_s(100.5, 10) is None
    for at in range(1, 11):
        pace.took(100.2 + at, 100)
    assert pace.wait_s(110.2, 1000) == pytest.approx(10, rel=0.1)
    assert pace.wait_s(130.2, 1000) > 20  # nothing has left since
    pace.begin(1000.0)  # it was empty: that time does not count
    assert pace.wait_s(1000.0, 1000) == pytest.approx(10, rel=0.1)


def test_a_backlog_shrinks_as_answers_begin():
    backlog = Backlog()
    backlog.placed()
    backlog.began(0.0)
    assert (backlog.waiting, backlog.wait_s(0.0)) == (0, 0.0)
    backlog.reported(20)
    assert backlog.wait_s(0.0) == 0.0  # nothing has begun yet
    for at in range(1, 11):
        backlog.began(at)
        backlog.placed()
    assert backlog.waiting == 20
    backlog.began(10.0)
    assert backlog.waiting == 19
    backlog.reported(20)
    assert backlog.wait_s(10.0) == pytest.approx(20, rel=0.3)
    backlog.reported(0)
    assert backlog.wait_s(10.0) == 0.0
    backlog.reported(20)
    assert backlog.wait_s(10.0) == 0.0  # those began before this wait


@pytest.mark.parametrize(
    ("wait_s", "limit_s", "told"), [(None, 10, 1), (12.5, 10, 3), (9, 10, 1), (1e9, 10, 60)]
)
def test_a_client_comes_back_when_the_wait_is_within_the_limit(wait_s, limit_s, told):
    assert retry_after_s(wait_s, limit_s) == told


def test_a_tenants_later_requests_pass_one_that_may_not_go():
    queue = filled(entry("a", "stuck"), entry("a", "next"), entry("b", "stuck"), entry("b", "other"))
    assert taken(queue, may_go=lambda item: item != "stuck") == ["next", "other"]
    assert taken(queue) == ["stuck", "stuck"]
