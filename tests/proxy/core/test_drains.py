"""The last order about each engine, whichever kvpin it was given to."""

import random

from proxy.core import drains
from proxy.core.drains import DrainBook, DrainMark, decode_marks, encode_marks


def test_books_agree_whatever_the_order_in_which_they_hear():
    rng = random.Random(7)  # noqa: S311 - no secret
    marks = [DrainMark(rng.choice("abc"), rng.random() < 0.5, float(rng.randrange(9))) for _ in range(60)]
    books = [DrainBook() for _ in range(3)]
    for book in books:
        for mark in rng.sample(marks, len(marks)):
            book.merge([mark])
    assert {frozenset(book.marks()) for book in books} == {frozenset(books[0].marks())}
    assert len(books[0].marks()) == 3


def test_a_later_order_counts_whatever_the_clock_says():
    book, heard = DrainBook(), []
    book.listeners.append(heard.append)
    book.order("a", drained=True, now=100.0)
    book.order("a", drained=False, now=50.0)
    assert not book.is_drained("a")
    book.merge([DrainMark("a", True, 100.0)])  # the older order comes late
    assert not book.is_drained("a")
    assert heard == [["a"], ["a"]]


def test_removing_a_drained_engine_ends_its_order():
    book, other, heard = DrainBook(), DrainBook(), []
    book.listeners.append(heard.append)
    book.end("a", now=1.0)
    assert book.marks() == []
    book.order("a", drained=True, now=5.0)
    for _ in range(2):
        book.end("a", now=1.0)
    assert (book.is_drained("a"), book.is_ended("a")) == (False, True)
    assert heard == [["a"], ["a"]]
    other.merge(decode_marks(encode_marks(book.marks())))
    assert (other.is_drained("a"), other.is_ended("a")) == (False, True)
    book.order("a", drained=False, now=1.0)
    assert (book.is_ended("a"), heard[2:]) == (False, [["a"]]), "others that still have it follow"
    book.order("a", drained=True, now=1.0)
    assert book.is_drained("a")


def test_undoing_what_was_never_drained_leaves_nothing():
    book = DrainBook()
    book.order("a", drained=False, now=1.0)
    assert book.marks() == []


def test_the_oldest_orders_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(drains, "MAX_MARKS", 2)
    book = DrainBook()
    for number, name in enumerate("abc"):
        book.order(name, drained=True, now=float(number))
    assert decode_marks(encode_marks(book.marks())) == [DrainMark("c", True, 2.0), DrainMark("b", True, 1.0)]


def test_a_book_that_hears_only_of_undone_drains_has_a_limit_too(monkeypatch):
    monkeypatch.setattr(drains, "MAX_MARKS", 2)
    book = DrainBook()
    book.merge([DrainMark(name, drained=False, at=1.0) for name in "abc"])
    assert len(book.marks()) == 2


def test_an_undone_drain_that_was_never_known_is_no_news():
    """An engine that drains for another reason, as its source says, goes on draining."""
    book, heard = DrainBook(), []
    book.listeners.append(heard.append)
    book.merge([DrainMark("a", drained=False, at=1.0)])
    assert heard == []
