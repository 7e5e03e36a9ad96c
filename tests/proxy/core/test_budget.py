from proxy.core.budget import ByteBudget


def test_what_was_given_back_may_be_taken_again():
    budget = ByteBudget(10)
    budget.take(8)
    assert (budget.has(2), budget.has(3)) == (True, False)
    budget.take(5)  # who must, takes more than there is
    assert (budget.used, budget.has(0)) == (13, False)
    budget.give_back(13)
    assert budget.has(10)
