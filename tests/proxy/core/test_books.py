"""Orders about engines, and issued keys: whichever kvpin they were given to, all have them."""

import hmac
import math
import random

import msgspec
import pytest

from proxy.api.admin.endpoint import MAX_KEY_MODELS
from proxy.core import books as module
from proxy.core.books import (
    MAX_KEYS,
    MAX_SKEW_S,
    EngineBook,
    EngineMark,
    IssuedKey,
    KeyBook,
    decode_marks,
    encode_marks,
    signed,
    verified,
)
from proxy.core.quotas import TenantLimits
from proxy.peers.bus import MAX_FRAME_BYTES

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
    assert (book.is_drained("a"), book.is_removed("a"), book._marks["a"].added) == (False, False, b"{}")
    other.merge(decode_marks(encode_marks(book.marks())), now=NOW)
    assert other.marks() == book.marks()
    assert heard == [1, 1]
    other.drain("a", drained=True, now=1.0)
    assert other._marks["a"].added == b"{}", "an order to drain it takes nothing else back"


def test_an_engine_that_is_readmitted_or_added_takes_requests_as_its_settings_say():
    book = EngineBook()
    book.remove("a", now=1.0)
    assert [mark.engine for mark in book.removals()] == ["a"]
    book.readmit("a", now=1.0)
    book.add("b", b"{}", now=1.0)
    assert book.removals() == []
    assert [(book.is_drained(name), book._marks[name].added) for name in "ab"] == [
        (False, b""),
        (False, b"{}"),
    ]


def test_the_oldest_orders_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MAX_MARKS", 2)
    book = EngineBook()
    for number, name in enumerate("abc"):
        book.drain(name, drained=True, now=float(number))
    assert decode_marks(encode_marks(book.marks())) == [
        EngineMark("c", True, 2.0),
        EngineMark("b", True, 1.0),
    ]


def test_a_book_that_hears_only_of_undone_drains_has_a_limit_too(monkeypatch):
    monkeypatch.setattr(module, "MAX_MARKS", 2)
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


# --- issued keys ---------------------------------------------------------------------------------


def key(number=1, *, removed=False):
    """It is removed as long after its issue as all others."""
    removed_at = number + 0.5 if removed else 0.0
    return IssuedKey(f"key-{number}", "t", b"%d" % number, "last", float(number), removed=removed_at)


def book_of(*entries):
    book = KeyBook()
    book.merge(entries)
    return book


def test_books_that_heard_the_same_hold_the_same():
    told = [key(2), key(1), key(1, removed=True)]
    books = [book_of(*told), book_of(*reversed(told)), book_of(*told, *told)]
    assert [book.entries() for book in books] == [[key(1, removed=True), key(2)]] * 3
    assert [each.id for each in books[0].issued()] == ["key-2"]


def test_a_removed_key_never_comes_back_and_the_book_stays_closed():
    book = book_of(key(), key(removed=True))
    book.merge([key()])
    assert book.issued() == []
    assert book.has_issued
    assert not KeyBook().has_issued


def test_listeners_are_called_when_something_is_new():
    book, calls = book_of(), []
    book.listeners.append(lambda: calls.append(len(book.issued())))
    for entries in ([key()], [key()], [], [key(removed=True)], [key()], [key(removed=True)]):
        book.merge(entries)
    assert calls == [1, 0]


def test_only_the_newest_marks_are_kept_and_every_key():
    book, calls = book_of(key(0)), []
    book.merge(key(number, removed=True) for number in range(1, MAX_KEYS + 3))
    assert [each.id for each in book.entries()[:2]] == ["key-0", "key-3"]
    assert len(book.entries()) == MAX_KEYS + 1
    book.listeners.append(lambda: calls.append(1))
    book.merge([key(1, removed=True)])  # a kvpin that still has it would be told, and tell again
    assert calls == []


def test_a_tenant_with_a_key_keeps_its_limits_however_many_keys_are_removed():
    limits = TenantLimits(requests_per_minute=7)
    told = msgspec.structs.replace(key(1, removed=True), tenant="limited", limits=limits)
    own = msgspec.structs.replace(key(2), tenant="limited")
    book = book_of(told, own, *(key(number, removed=True) for number in range(3, MAX_KEYS + 9)))
    assert book.limits() == {"limited": limits}
    book.merge([book.removal(own, 9e9)])
    assert book.limits() == {}


@pytest.mark.parametrize("now", [9e9, 0.5])
def test_the_newest_removal_is_kept_however_old_the_key_is_and_whatever_the_clock_says(now):
    book = book_of(key(0), *(key(number, removed=True) for number in range(1, MAX_KEYS + 1)))
    mark = book.removal(book.issued()[0], now)
    for told in ([*book.entries(), mark], [mark]):
        book.merge(told)
        assert book.issued() == []
        assert mark in book.entries()
        assert len(book.entries()) == MAX_KEYS


def test_only_who_has_the_secret_can_tell_of_keys():
    told = signed([key()], b"secret", 5.0)
    assert verified(told, b"secret", 5.0) == [key()]
    changed = told.replace(b"last", b"mine")
    for forged, secret in ((told, b"other"), (changed, b"secret"), (told[:40], b"secret"), (b"", b"secret")):
        assert verified(forged, secret, 5.0) is None
    no_entries = msgspec.msgpack.encode([5.0, ["x"]])
    assert verified(hmac.digest(b"secret", no_entries, "sha256") + no_entries, b"secret", 5.0) is None


def test_an_old_state_that_is_told_once_more_opens_no_removed_key():
    told = signed([key()], b"secret", 1000.0)
    for now, is_taken in (
        (1000.0 + MAX_SKEW_S, True),
        (1000.0 - MAX_SKEW_S, True),
        (1001.0 + MAX_SKEW_S, False),
    ):
        assert (verified(told, b"secret", now) is not None) is is_taken
    assert verified(signed([key()], b"secret", float("nan")), b"secret", 1000.0) is None
    assert verified(told, b"secret", None) == [key()], "only this user may write there"


def test_all_keys_of_a_full_book_fit_in_one_message_of_the_exchange():
    names = tuple(["x" * 256] * MAX_KEY_MODELS)
    keys = [
        IssuedKey(f"key-{n:012}", "t" * 64, b"d" * 32, "last", 1e9, "n" * 64, names, 1e9) for n in range(20)
    ]
    marks = [KeyBook().removal(each, 1e9) for each in keys]
    size = len(signed([*keys, *marks], b"secret", 1e9)) / 20 * MAX_KEYS
    assert size < 0.9 * MAX_FRAME_BYTES
