import asyncio
import threading
import time

import pytest

from engine_adapter.off_loop import in_own_thread, off_loop


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
