from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission import MAX_LOOKS, QUANTUM, Backlog, Entry, FairQueue, Needs, Pace, retry_after_s

BASE, ADA = Needs(), Needs(lora="ada")


def entry(tenant="a", item="", *, tokens=QUANTUM, priority=0, size=1, needs=BASE):
    return Entry(tenant, priority, tokens, size, needs, item)


def filled(*entries, most=1000, size=10**9):
    queue = FairQueue(most, size)
    for each in entries:
        assert queue.add(each) == []
    return queue


def taken(queue, most=10**6, may_go=lambda _: True, free=frozenset({BASE, ADA})):
    items = []
    while len(items) < most and (found := queue.take(free, may_go)) is not None:
        items.append(found.item)
    return items


REQUESTS = st.tuples(st.sampled_from("abc"), st.integers(1, 5 * QUANTUM), st.sampled_from([BASE, ADA]))


@given(st.lists(REQUESTS, min_size=1, max_size=60), st.sampled_from([{BASE}, {BASE, ADA}]))
def test_no_tenant_that_waits_gets_less_than_another_by_more_than_its_longest_request(requests, free):
    queue = filled(
        *(entry(tenant, (tenant, tokens), tokens=tokens, needs=each) for tenant, tokens, each in requests)
    )
    left = {
        tenant: [tokens for name, tokens, each in requests if name == tenant and each in free]
        for tenant in "abc"
    }
    given_tokens, longest = dict.fromkeys("abc", 0), max(tokens for _, tokens, _ in requests)
    while all(left.values()):
        ((tenant, tokens),) = taken(queue, 1, free=free)
        assert tokens == left[tenant].pop(0)  # its own are served in order
        given_tokens[tenant] += tokens
        assert max(given_tokens.values()) - min(given_tokens.values()) <= 2 * (longest + QUANTUM)


def test_priorities_order_the_requests_of_one_tenant_only():
    queue = filled(
        entry("a", "late", priority=1), entry("a", "usual"), entry("a", "soon", priority=-1), entry("b", "b")
    )
    assert taken(queue) == ["soon", "b", "usual", "late"]
    assert taken(filled(entry("a", "a"), entry("b", "b", priority=-1))) == ["a", "b"]


def test_requests_whose_engine_is_busy_hold_up_nobody_however_many_they_are():
    stuck = [entry(tenant, "ada", needs=ADA) for tenant in "abcdefghijkl" for _ in range(MAX_LOOKS)]
    queue = filled(*stuck, entry("a", "1"), entry("z", "2"), entry("a", "3", priority=1))
    assert taken(queue, free={BASE}) == ["1", "2", "3"]
    assert len(taken(queue)) == len(stuck)


@given(st.integers(1, 5 * QUANTUM))
def test_a_passed_over_tenant_saves_up_no_more_than_its_first_request_needs(tokens):
    stuck = [entry("a", "a", needs=ADA, tokens=tokens) for _ in range(50)]
    queue = filled(*stuck, *(entry("b", "b", tokens=tokens) for _ in range(100)))
    taken(queue, 40, free={BASE})
    items = taken(queue, 20)
    assert (items.count("a") - items.count("b")) * tokens <= 2 * (tokens + QUANTUM)


def test_who_comes_later_takes_turns_with_those_who_were_served_before():
    queue = filled(*(entry("old", "o") for _ in range(100)))
    taken(queue, 50)
    for _ in range(50):
        queue.add(entry("new", "n"))
    assert taken(queue, 20).count("n") == pytest.approx(10, abs=1)


def test_placement_is_asked_about_a_few_requests_at_a_time_and_about_all_in_time():
    queue, asked = filled(*(entry(str(n % 50), n) for n in range(100))), []
    assert queue.take({BASE}, asked.append) is None
    assert asked == list(range(MAX_LOOKS))
    while len(set(asked)) < 100:
        before = len(asked)
        assert queue.take({BASE}, asked.append) is None
        # The first ones are asked about each time: what they wait for may have come.
        assert asked[before : before + 4] == [0, 1, 2, 3]
        assert MAX_LOOKS // 2 < len(asked) - before <= MAX_LOOKS
    assert taken(queue, may_go=lambda item: item == 3) == [3]
    assert [99] in [taken(queue, may_go=lambda item: item == 99) for _ in range(30)]


def test_where_it_is_full_the_tenant_with_most_loses_its_last():
    queue = filled(entry("greedy", "g0"), entry("greedy", "g1", priority=1), entry("greedy", "g2"), most=3)
    modest, more = entry("modest", "m"), entry("greedy", "g3")
    assert [each.item for each in queue.add(modest)] == ["g1"]
    assert queue.add(more) == [more]
    assert queue.add(own := entry("modest", "m2")) == [own]  # two and two: the newcomer
    assert queue.entries == 3


def test_where_its_bodies_are_too_long_the_tenant_with_most_bytes_loses():
    queue = filled(
        entry("small", "s0", size=1), entry("small", "s1", size=1), entry("big", "b", size=8), size=10
    )
    assert [each.item for each in queue.add(entry("small", "s2", size=1))] == ["b"]
    assert queue.add(huge := entry("big", "h", size=11)) == [huge]


def test_tokens_ahead_are_ones_own_and_as_many_of_each_other():
    queue = filled(
        entry("a", tokens=1000),
        entry("a", tokens=500, priority=2),
        entry("b", tokens=9000),
        entry("c", tokens=10),
    )
    assert queue.ahead("a", 0, 100, {BASE}) == 1100 + (1100 + QUANTUM) + 10
    assert queue.ahead("new", 0, 100, {BASE}) == 100 + 1500 + (100 + QUANTUM) + 10


def test_a_pace_is_known_after_a_while():
    pace = Pace()
    pace.begin(100.0)
    assert pace.per_s(100.0) is None
    pace.took(100.2, 100)
    assert pace.per_s(100.5) is None
    assert pace.per_s(110.0) is None  # one slow request tells little
    assert pace.per_s(131.0) == pytest.approx(3, rel=0.1)
    for at in range(1, 11):
        pace.took(100.2 + at, 100)
    assert pace.per_s(110.2) == pytest.approx(100, rel=0.1)
    assert pace.per_s(130.2) < 50  # nothing has left since
    pace.begin(1000.0)  # none waited: that time does not count
    assert pace.per_s(1000.0) == pytest.approx(100, rel=0.1)


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


# Needs, and the engines that can take a request with them.
ENGINES = {
    BASE: frozenset("ABC"),
    ADA: frozenset("AB"),
    Needs(home="A"): frozenset("A"),
    Needs(home="C"): frozenset("C"),
    Needs(lora="lin"): frozenset("BC"),
}
STEPS = st.one_of(
    st.tuples(
        st.just("add"),
        st.sampled_from("abcd"),
        st.integers(-1, 1),
        st.integers(1, 2 * QUANTUM),
        st.sampled_from(list(ENGINES)),
    ),
    st.tuples(st.just("leave"), st.integers(0, 99)),
    st.tuples(st.sampled_from(["free", "busy"]), st.sampled_from("ABC")),
    st.just(("take",)),
)


@given(st.lists(STEPS, max_size=120), st.integers(1, 12))
def test_each_request_leaves_once_and_none_waits_while_an_engine_that_can_take_it_is_free(steps, most):
    queue, waiting, free, numbers = FairQueue(most, 10**9), [], set(), count()
    for step, *rest in steps:
        if step == "add":
            tenant, priority, tokens, needs = rest
            new = entry(tenant, next(numbers), priority=priority, tokens=tokens, needs=needs)
            waiting.append(new)
            for displaced in queue.add(new):
                waiting.remove(displaced)
        elif step == "leave" and waiting:
            leaves = waiting.pop(rest[0] % len(waiting))
            queue.remove(leaves)
            queue.remove(leaves)
        elif step == "free":
            free |= set(rest)
        elif step == "busy":
            free -= set(rest)
        elif step == "take":
            may_go = [each for each in waiting if free & ENGINES[each.needs]]
            found = queue.take({needs for needs, able in ENGINES.items() if free & able}, lambda _: True)
            assert (found is None) is (not may_go)
            if found is not None:
                own = [each for each in may_go if each.tenant == found.tenant]
                assert found is min(own, key=lambda each: (each.priority, each.item))
                waiting.remove(found)
                free.remove(min(free & ENGINES[found.needs]))
        assert queue.entries == len(waiting) <= most
        held = {needs: {} for needs in {each.needs for each in waiting}}
        for each in waiting:
            held[each.needs][each.tenant] = held[each.needs].get(each.tenant, 0) + each.tokens
        assert queue.tokens == held
        assert queue.ahead("new", 0, 10**6, held) == 10**6 + sum(each.tokens for each in waiting)
    left = taken(queue, free=ENGINES)
    assert sorted(left) == sorted(each.item for each in waiting)
