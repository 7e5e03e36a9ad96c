import asyncio

import pytest

from engine_adapter.errors import EngineError
from engine_adapter.llama_server.own_tasks import OwnTasks


@pytest.fixture
def tasks():
    return OwnTasks("e: work", EngineError)


async def test_work_goes_on_without_its_caller(tasks):
    gate, done = asyncio.Event(), []

    async def work():
        await gate.wait()
        done.append(await tasks.start(asyncio.sleep(0, "more")))

    caller = asyncio.create_task(asyncio.wait([tasks.start(work())]))
    await asyncio.sleep(0)
    caller.cancel()
    gate.set()
    await tasks.settled()
    assert done == ["more"]


async def test_cancelled_work_is_over(tasks):
    task = tasks.start(asyncio.sleep(60))
    await tasks.cancel()
    assert task.cancelled()
    await tasks.settled()


@pytest.mark.parametrize(
    ("error", "logged"), [(EngineError("known"), []), (ValueError("a bug"), ["e: work failed"])]
)
async def test_errors_that_no_caller_expects_are_logged(tasks, caplog, error, logged):
    async def work():
        raise error

    task = tasks.start(work())
    await tasks.settled()
    assert task.exception() is error
    assert [record.getMessage() for record in caplog.records] == logged
