import asyncio

import structlog

from proxy.runtime import Supervisor


async def test_a_crash_is_logged_with_its_name_and_takes_nothing_down():
    tasks = Supervisor()

    async def work():
        raise ValueError("a bug")

    with structlog.testing.capture_logs() as logs:
        tasks.start("w", work())
        await asyncio.sleep(0.01)
    assert [(line["event"], line["task"]) for line in logs] == [
        ("background task crashed: this is a bug in kvpin", "w")
    ]
    assert not tasks._tasks


async def test_a_name_runs_once_the_newest():
    tasks, ended = Supervisor(), []

    async def work(name):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    tasks.start("w", work("old"))
    await asyncio.sleep(0)
    tasks.start("w", work("new"))
    await asyncio.sleep(0.01)
    assert ended == ["old"]
    await tasks.stop()
    assert ended == ["old", "new"]


async def test_stop_waits_also_for_what_was_cancelled_before():
    tasks, ended = Supervisor(), []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append(1)

    tasks.start("w", work())
    await asyncio.sleep(0)
    tasks.cancel("w")
    await tasks.stop()
    assert ended == [1]
    assert not tasks._ending


async def test_work_cancelled_before_its_first_step_leaves_no_warning(recwarn):
    tasks = Supervisor()

    async def work():
        raise AssertionError

    tasks.start("w", work())
    tasks.cancel("w")
    tasks.cancel("unknown")
    await tasks.stop()
    assert not recwarn.list


async def test_kept_work_starts_again_after_a_crash(monkeypatch):
    monkeypatch.setattr("proxy.runtime.RESTART_S", 0.0)
    tasks, runs, again = Supervisor(), [], asyncio.Event()

    async def work():
        runs.append(len(runs))
        if len(runs) == 1:
            raise ValueError("a bug")
        again.set()
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as logs:
        tasks.keep("w", work)
        await asyncio.wait_for(again.wait(), 1)
    assert len(logs) == 1
    await tasks.stop()
    assert runs == [0, 1]
