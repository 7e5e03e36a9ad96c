from proxy.core.budget import FLOOR, MOST, PER_S, RetryBudget


def taken(budget, now):
    count = 0
    while budget.take(now):
        count += 1
    return count


def test_a_few_retries_are_always_there():
    budget = RetryBudget()
    assert taken(budget, 0.0) == FLOOR
    assert taken(budget, 3 / PER_S) == 3
    assert taken(budget, 1e6) == FLOOR


def test_each_request_adds_a_fifth():
    budget = RetryBudget()
    taken(budget, 0.0)
    for _ in range(50):
        budget.requested()
    assert taken(budget, 0.0) in (9, 10)  # of binary fractions
    for _ in range(10_000):
        budget.requested()
    assert MOST <= taken(budget, 0.0) <= MOST + 1
