import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import pytest

from engine_adapter.off_loop import PAYER, THREADS, FairThreads, in_own_thread, off_loop


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
    ticks = 0
    work = asyncio.ensure_future(off_loop(lambda: time.sleep(0.2), ms=200))
    while not work.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks >= 5


@pytest.mark.parametrize("ms", [0, 100])
async def test_errors_reach_the_caller(ms):
    with pytest.raises(ZeroDivisionError):
        await off_loop(lambda: 1 // 0, ms=ms)


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
    reads = [asyncio.ensure_future(asyncio.to_thread(go.wait, 5)) for _ in range(40)]
    await asyncio.wait_for(off_loop(lambda: None, ms=9), 2)
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
        assert all(each.result(5) for each in greedy)

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
async def test_an_error_keeps_nothing_of_its_work(ms):
    class Body:
        pass

    def fails(body):
        raise ValueError(body.__class__.__name__)

    body = Body()
    is_there = weakref.ref(body)
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            await off_loop(partial(fails, body), ms=ms)
        del body
        async with asyncio.timeout(5):
            while is_there() is not None:  # noqa: ASYNC110 - the thread still ends
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
