"""What counts of the orders about each engine, whichever kvpin they were given to."""

import math
import random

import pytest

from proxy.core import books as engine_book
from proxy.core.books import MAX_SKEW_S, EngineBook, EngineMark, decode_marks, encode_marks

NOW = 1000.0


def test_books_agree_whatever_the_order_in_which_they_hear():
    rng = random.Random(7)  # noqa: S311 - no secret
    marks = [
        EngineMark(rng.choice("abc"), rng.random() < 0.5, float(rng.randrange(9)), rng.random() < 0.5)
        for _ in range(60)
    ]
    books = [EngineBook() for _ in range(3)]
    for book in books:
        for mark in rng.sample(marks, len(marks)):
            book.merge([mark], now=NOW)
    assert {frozenset(book.marks()) for book in books} == {frozenset(books[0].marks())}
    assert len(books[0].marks()) == 3


def test_a_later_order_counts_whatever_the_clock_says():
    book, heard = EngineBook(), []
    book.listeners.append(lambda: heard.append(1))
    book.drain("a", drained=True, now=100.0)
    book.drain("a", drained=False, now=50.0)
    assert not book.is_drained("a")
    book.merge([EngineMark("a", True, 100.0)], now=NOW)  # the older order comes late
    assert not book.is_drained("a")
    assert heard == [1, 1]


def test_removing_and_adding_an_engine_ends_the_order_to_drain_it_at_all_kvpins():
    book, other, heard = EngineBook(), EngineBook(), []
    other.listeners.append(lambda: heard.append(1))
    book.drain("a", drained=True, now=5.0)
    other.merge(book.marks(), now=NOW)
    book.remove("a", now=1.0)
    assert (book.is_drained("a"), book.is_removed("a")) == (False, True)
    book.add("a", b"{}", now=1.0)
    assert (book.is_drained("a"), book.is_removed("a"), book.added("a")) == (False, False, b"{}")
    other.merge(decode_marks(encode_marks(book.marks())), now=NOW)
    assert other.marks() == book.marks()
    assert heard == [1, 1]
    other.drain("a", drained=True, now=1.0)
    assert other.added("a") == b"{}", "an order to drain it takes nothing else back"


def test_an_engine_that_is_readmitted_or_added_takes_requests_as_its_settings_say():
    book = EngineBook()
    book.remove("a", now=1.0)
    assert [mark.engine for mark in book.removals()] == ["a"]
    book.readmit("a", now=1.0)
    book.add("b", b"{}", now=1.0)
    assert book.removals() == []
    assert [(book.is_drained(name), book.added(name)) for name in "ab"] == [(False, b""), (False, b"{}")]


def test_the_oldest_orders_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(engine_book, "MAX_MARKS", 2)
    book = EngineBook()
    for number, name in enumerate("abc"):
        book.drain(name, drained=True, now=float(number))
    assert decode_marks(encode_marks(book.marks())) == [
        EngineMark("c", True, 2.0),
        EngineMark("b", True, 1.0),
    ]


def test_a_book_that_hears_only_of_undone_drains_has_a_limit_too(monkeypatch):
    monkeypatch.setattr(engine_book, "MAX_MARKS", 2)
    book = EngineBook()
    book.merge([EngineMark(name, drained=False, at=1.0) for name in "abc"], now=NOW)
    assert len(book.marks()) == 2


def test_an_undone_drain_that_was_never_known_is_no_news():
    """An engine that drains for another reason, as its source says, goes on draining."""
    book, heard = EngineBook(), []
    book.listeners.append(lambda: heard.append(1))
    book.merge([EngineMark("a", drained=False, at=1.0)], now=NOW)
    assert heard == []


@pytest.mark.parametrize("at", [NOW + MAX_SKEW_S + 1, 1e300, math.inf, math.nan])
def test_an_order_from_the_future_does_not_count(at):
    """No later order could undo it."""
    book = EngineBook()
    assert not book.merge(
        [EngineMark("a", drained=True, at=at), EngineMark("b", drained=True, at=NOW)], now=NOW
    )
    assert [mark.engine for mark in book.marks()] == ["b"]
    assert book.merge([EngineMark("a", drained=True, at=NOW + MAX_SKEW_S)], now=NOW)
    book.drain("a", drained=False, now=NOW)
    assert not book.is_drained("a")
