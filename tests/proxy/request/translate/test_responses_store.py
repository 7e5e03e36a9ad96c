"""The responses that are kept: room, age, tenants, conversations."""

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

from proxy.request.translate.responses_store import IDLE_S, ResponseStore, Turn


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def turn(previous=None, asked=b"q", name="1"):
    return Turn(previous, {f"msg_{name}": asked}, {f"out_{name}": b"a"})


def test_a_conversation_is_kept_once():
    first, shelf = turn(name="1"), ResponseStore().of(None)
    shelf.put("r1", b"{}", first)
    alone = shelf.bytes
    second = turn(first, name="2")
    shelf.put("r2", b"{}", second)
    assert shelf.bytes == 2 * alone
    assert [name for name, _ in second.conversation()] == ["msg_1", "out_1", "msg_2", "out_2"]
    assert list(map(list, second.input())) == [["msg_1"], ["out_1"], ["msg_2"]]
    assert shelf.delete("r1")
    assert not shelf.delete("r1")
    assert shelf.get("r1") is None
    assert shelf.item("msg_1") == b"q"  # r2 still needs it
    shelf.delete("r2")
    assert (shelf.bytes, shelf.item("msg_1"), shelf.item("out_2")) == (0, None, None)


def test_what_was_used_longest_ago_goes_first():
    shelf = ResponseStore(max_bytes=5 * 1024).of(None)
    for name in ("1", "2", "3"):
        shelf.put(f"r{name}", b"x" * 1000, turn(name=name))
        shelf.get("r1")
    assert [shelf.get(f"r{name}") is not None for name in ("1", "2", "3")] == [True, False, True]
    shelf.put("r4", b"x" * 10_000, turn(name="4"))
    assert shelf.bytes == 0


def test_a_turn_that_went_while_its_next_one_was_made_comes_back():
    shelf, first = ResponseStore().of(None), turn(name="1")
    shelf.put("r1", b"{}", first)
    shelf.delete("r1")
    shelf.put("r2", b"{}", turn(first, name="2"))
    assert shelf.item("out_1") == b"a"
    shelf.delete("r2")
    assert shelf.bytes == 0


def test_an_item_that_a_later_turn_has_too_stays():
    shelf = ResponseStore().of(None)
    for name in ("r1", "r2"):
        shelf.put(name, b"{}", turn(name="1"))
    shelf.delete("r1")
    assert shelf.item("msg_1") == b"q"


def test_an_item_that_an_earlier_turn_has_too_stays():
    shelf = ResponseStore().of(None)
    for name, asked in (("r1", b"first"), ("r2", b"second")):
        shelf.put(name, b"{}", turn(asked=asked, name="1"))
    assert shelf.item("msg_1") == b"second"
    shelf.delete("r2")
    assert (shelf.item("msg_1"), shelf.item("out_1")) == (b"first", b"a")
    shelf.delete("r1")
    assert (shelf.item("msg_1"), shelf._items) == (None, {})


def test_tenants_do_not_see_or_crowd_out_each_other():
    store = ResponseStore("ab", max_bytes=4 * 1024)
    store.of("a").put("r1", b"{}", turn(name="1"))
    for name in range(50):
        store.of("b").put(f"r{name + 2}", b"{}", turn(asked=b"q" * 500, name=str(name + 2)))
    assert store.of("a").get("r1") is not None
    assert store.of("b").get("r1") is None
    assert store.of("b").item("msg_1") is None
    assert 0 < store.of("b").bytes <= 2 * 1024


def test_a_tenant_that_was_removed_leaves_nothing():
    store = ResponseStore(("acme", "globex"))
    for tenant in ("acme", "globex"):
        store.of(tenant).put("r1", b"{}", turn(name="1"))
    store.divide(["acme"])
    store.of("globex").put("r2", b"{}", turn(name="2"))  # of a request that was in flight
    assert list(store._shelves) == ["acme"]
    assert store.of("acme").get("r1") is not None
    store.divide(["acme", "globex"])
    assert (store.of("globex").get("r1"), store.of("globex").get("r2")) == (None, None)


def test_what_nobody_uses_expires():
    clock = Clock()
    shelf = ResponseStore(clock=clock).of(None)
    for name in ("1", "2"):
        shelf.put(f"r{name}", b"{}", turn(name=name))
    clock.now = IDLE_S
    assert shelf.get("r1") is not None
    clock.now += 1
    assert [shelf.get(name) is None for name in ("r1", "r2")] == [False, True]


def test_what_is_counted_is_what_it_takes():
    store = ResponseStore()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        asked = {f"msg_{'0' * 48}{number}": b"{%d}" % number for number in range(20_000)}
        store.of(None).put("r", b"{}", Turn(None, asked, {}))
        took = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert took / 1.5 < store.of(None).bytes < took * 3


def test_threads_may_use_it_at_once():
    clock = Clock()
    store = ResponseStore(max_bytes=20_000, clock=clock)

    def use(worker):
        for number in range(2000):
            name = f"{worker}-{number}"
            store.of(None).put(name, b"x", turn(name=name))
            clock.now += IDLE_S / 20
            store.of(None).get(f"{worker}-{number - 3}")
            store.of(None).delete(f"{worker}-{number - 2}")

    switches = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(use, range(4)))
    finally:
        sys.setswitchinterval(switches)
    clock.now += 2 * IDLE_S
    store.of(None).get("")
    assert store.of(None).bytes == 0
