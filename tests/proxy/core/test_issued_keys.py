import hmac

import msgspec
import pytest

from proxy.api.admin.endpoint import MAX_KEY_MODELS
from proxy.core.books import MAX_KEYS, MAX_SKEW_S, IssuedKey, KeyBook, signed, verified
from proxy.core.quotas import TenantLimits
from proxy.peers.bus import MAX_FRAME_BYTES


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
