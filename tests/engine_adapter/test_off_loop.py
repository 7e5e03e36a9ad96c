import asyncio
import gc
import threading
import time
import weakref
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.off_loop import (
    PAYER,
    THREADS,
    FairThreads,
    JsonInStrings,
    JsonSize,
    in_own_thread,
    is_deeper,
    off_loop,
    shape_of,
)


async def test_short_work_stays_on_the_loop():
    assert await off_loop(threading.current_thread, ms=1) is threading.current_thread()


async def test_long_work_leaves_it():
    assert (await off_loop(threading.current_thread, ms=1.1)).name.startswith("off-loop")


async def test_a_thread_of_its_own_ends_with_its_work():
    """An encoder keeps 16 MB for each thread that encoded."""
    thread = await in_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    thread.join(5)
    assert not thread.is_alive()


async def test_the_loop_goes_on_meanwhile():
    go = threading.Event()
    work = asyncio.ensure_future(off_loop(lambda: go.wait(5), ms=200))
    await asyncio.sleep(0)
    go.set()
    assert await work


async def test_work_whose_caller_left_is_not_done():
    begun, go = [], threading.Event()
    jobs = [
        asyncio.ensure_future(off_loop(lambda number=number: (begun.append(number), go.wait(5)), ms=9))
        for number in range(20)
    ]
    while not begun:  # noqa: ASYNC110 - a thread begins it
        await asyncio.sleep(0.001)
    for job in jobs:
        job.cancel()
    await asyncio.wait(jobs)
    go.set()
    await off_loop(lambda: None, ms=9)
    assert len(begun) <= 4


async def test_slow_files_do_not_hold_it_up():
    """`asyncio.to_thread`, for files, has other threads."""
    go = threading.Event()
    reads = [asyncio.ensure_future(asyncio.to_thread(go.wait, 60)) for _ in range(40)]
    await asyncio.wait_for(off_loop(lambda: None, ms=9), 30)
    go.set()
    await asyncio.gather(*reads)


class TestFairness:
    """One tenant's work does not hold up another's."""

    def test_a_tenant_has_some_of_the_threads(self):
        threads, go = FairThreads(4, 2), threading.Event()
        begun = [threading.Event() for _ in range(8)]
        greedy = [threads.submit("a", "parse", lambda each=each: (each.set(), go.wait(5))) for each in begun]
        assert threads.submit("b", "parse", lambda: 7).result(5) == 7
        assert sum(each.is_set() for each in begun) <= 2
        go.set()
        assert all(each.result(5)[1] for each in greedy)

    def test_tenants_take_turns(self):
        threads, go, order = FairThreads(1, 1), threading.Event(), []
        first = threads.submit("a", "parse", lambda: go.wait(5))
        waiting = [
            threads.submit(name, "parse", lambda name=name: order.append(name))
            for name in ("a",) * 5 + ("b", "c")
        ]
        go.set()
        for each in (first, *waiting):
            each.result(5)
        assert order[:3] in (["a", "b", "c"], ["b", "c", "a"])
        assert order.count("a") == 5

    def test_a_thread_does_what_waits_before_another_is_made(self):
        threads, used = FairThreads(4, 2), set()
        for each in [
            threads.submit("a", "parse", lambda: used.add(threading.get_ident())) for _ in range(500)
        ]:
            each.result(5)
        assert len(used) <= 2

    def test_an_error_gives_the_thread_back(self):
        threads = FairThreads(1, 1)
        with pytest.raises(ZeroDivisionError):
            threads.submit("a", "parse", lambda: 1 // 0).result(5)
        assert threads.submit("a", "parse", lambda: 7).result(5) == 7

    async def test_who_sent_the_request_pays(self):
        def busy():
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass

        PAYER.set("test_off_loop")
        await off_loop(busy, ms=9, what="render")
        await off_loop(lambda: None, ms=0.5)
        spent = {what: s for (tenant, what), s in THREADS.spent.items() if tenant == "test_off_loop"}
        assert spent["render"] >= 0.01
        assert spent["parse"] == 0.0005


@pytest.mark.parametrize("ms", [0.0, 5.0])
async def test_an_error_reaches_the_caller_and_keeps_nothing_of_its_work(ms):
    class Body:
        pass

    def fails(body):
        raise ValueError(body.__class__.__name__)

    body = Body()
    is_there = weakref.ref(body)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="Body"):
            await off_loop(partial(fails, body), ms=ms)
        del body
        async with asyncio.timeout(5):
            while is_there() is not None:  # noqa: ASYNC110 - the thread still ends
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


ANY = JsonSize(1 << 60, 1 << 60, 1 << 60)
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(st.sampled_from('a"\\,:[]{} é'), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('a"\\,:[{'), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def counted(value):
    """Commas, and fields with lists and objects, of a value."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    own = 1 + (len(value) if isinstance(value, dict) else 0)
    return max(len(value) - 1, 0) + sum(a for a, _ in inner), own + sum(b for _, b in inner)


def depth(value):
    if not isinstance(value, (list, dict)):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(value=JSON, piece=st.integers(1, 40))
def test_it_counts_what_a_decoder_finds(value, piece):
    raw = msgspec.json.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_adapter.off_loop._PIECE", piece)
        found = shape_of(raw, ANY)
    assert found[:2] == counted(value)


@given(value=JSON, levels=st.integers(0, 6))
def test_depth_is_that_of_the_value(value, levels):
    assert is_deeper(msgspec.json.encode(value), levels) == (depth(value) > levels)


def test_base64_is_no_text():
    image = b"A" * (1 << 20)
    found = shape_of(b'{"a": [{"url": "data:image/png;base64,' + image + b'"}, "' + image + b'"]}', ANY)
    assert found.text < 5 * (16 << 10)


@pytest.mark.parametrize("piece", [b"two words ", b"\\n", "é".encode(), b'a", "b'])
def test_all_else_is_text(piece):
    raw = b'["' + piece * (200_000 // len(piece)) + b'"]'
    assert shape_of(raw, ANY).text >= len(raw)


@pytest.mark.parametrize(
    ("raw", "what"),
    [(b"[[],[]," * 99_999, "fields"), (b'{"a":0,' * 99_999, "fields"), (b'["","",' * 99_999, "values")],
)
def test_it_reads_no_further_than_a_limit(raw, what):
    found = shape_of(raw, JsonSize(5000, 5000, 1 << 60))
    assert found.above(JsonSize(5000, 5000, 1 << 60)) == what
    assert found.text < 100_000


def test_what_is_no_json_has_the_shape_up_to_the_fault():
    assert shape_of(b'{"a": 1, \\"b": [', ANY).fields >= 2


@pytest.mark.parametrize(
    "text", ["[" + "[]," * 150_000 + "[]]", "[" + "1," * 1_300_000 + "1]", "\ud800[{" * 90_000]
)
def test_strings_of_much_json_are_found_before_they_are_decoded(text):
    assert JsonInStrings().is_too_much(text)
    pieces, several = [text[at : at + 30_000] for at in range(0, len(text), 30_000)], JsonInStrings()
    assert [several.is_too_much(each) for each in pieces][-1]
    assert not any(JsonInStrings().is_too_much(each) for each in pieces)


def test_long_strings_of_little_json():
    strings = JsonInStrings()
    assert not any(
        strings.is_too_much(msgspec.json.encode({"a": "[{,:" * 90_000}).decode()) for _ in range(99)
    )
