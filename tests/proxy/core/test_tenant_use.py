from proxy.core.tenant_use import DAY_S, MOST_DAYS, DayUse, UseBook, Used

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
    monkeypatch.setattr("proxy.core.tenant_use._MOST_ROWS", 1)
    book.prune()
    assert [day for day, *_ in book] == [20_000]


def test_a_clock_that_was_ahead_drops_no_other_days():
    book = UseBook(((day, "t", "m"), Used(1)) for day in (19_999, 20_000, 47_000))
    book.prune()
    assert len(book) == 3
