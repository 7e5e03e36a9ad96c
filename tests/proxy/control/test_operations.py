import asyncio

import pytest

from engine_adapter import EngineUnavailable, KvProgress
from proxy.control.operations import (
    HISTORY,
    OperationPart,
    Operations,
    OperationState,
    Target,
    kind_of,
    new_operation,
    run_parts,
)
from proxy.errors import BadRequest
from proxy.runtime import Supervisor


@pytest.fixture
async def tasks():
    tasks = Supervisor()
    yield tasks
    await tasks.stop()


async def nothing(_operation):
    pass


@pytest.mark.parametrize(
    ("error", "is_told"),
    [(BadRequest("why"), True), (EngineUnavailable("why"), True), (ZeroDivisionError("why"), False)],
    ids=["refused", "engine away", "a bug"],
)
async def test_an_error_fails_it_with_its_text_and_a_bug_without(tasks, error, is_told):
    async def work(_operation):
        raise error

    operation = Operations(tasks).start(new_operation("flush", "all"), work)
    await operation.wait(5)
    assert operation.state is OperationState.FAILED
    assert ("why" in operation.error) is is_told


async def test_cancelling_ends_it_and_its_parts(tasks):
    operations, ended = Operations(tasks), asyncio.Event()

    async def work(_operation):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    operation = operations.start(new_operation("flush", "all", [OperationPart("a", "flush")]), work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert operations.cancel(operation.operation_id) is operation
    assert operation.state is OperationState.CANCELLED
    assert operation.parts[0].state is OperationState.CANCELLED
    async with asyncio.timeout(5):
        await ended.wait()
    await asyncio.sleep(0)
    assert operation.state is OperationState.CANCELLED


async def test_history_is_bounded_and_keeps_what_runs(tasks):
    operations = Operations(tasks)
    gate = asyncio.Event()
    running = operations.start(new_operation("flush", "all"), lambda _: gate.wait())
    for _ in range(HISTORY + 5):
        done = operations.start(new_operation("flush", "all"), nothing)
        await done.wait(5)
    newest = operations.newest()
    assert len(newest) == HISTORY
    assert (newest[0], newest[-1]) == (done, running)
    gate.set()


async def test_one_engine_fails_and_the_others_go_on(tasks):
    parts = [OperationPart("a", "flush"), OperationPart("b", "flush")]

    async def bad():
        raise EngineUnavailable("gone")

    async def work(_operation):
        await run_parts(zip(parts, (bad, lambda: nothing(None)), strict=True))

    operation = Operations(tasks).start(new_operation("flush", "all", parts), work)
    await operation.wait(5)
    assert [part.state for part in parts] == [OperationState.FAILED, OperationState.DONE]
    assert operation.state is OperationState.FAILED
    assert operation.error == "1 of 2 engines failed: a: gone"


def test_progress_adds_up_over_targets():
    part = OperationPart("a", "flush")
    part.advance(part.progress, KvProgress(2, 3, 20, {"in_use": 1}))
    before = part.progress
    part.advance(before, KvProgress(1, 4, 10, {"in_use": 2, "pinned": 1}))
    part.advance(before, KvProgress(4, 4, 40, {"in_use": 2, "pinned": 1}))
    assert part.progress == KvProgress(6, 7, 60, {"in_use": 3, "pinned": 1})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "target"),
        ({"model": "m", "cache_salt": "s"}, "target"),
        ({"messages": [], "prompt": "x"}, "prompt"),
        ({"prompt": "x", "all": True}, "all"),
        ({"all": True, "engine": "a"}, "all"),
        ({"all": True, "tenant": "t"}, "all"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": [], "extra_ids": [1]}, "extra_ids"),
        ({"messages": [], "prompt_table": "t"}, "prompt_table"),
        ({"token_ids": [1], "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt_cache_key": "k", "cache_salt": "s"}, "cache_salt"),
        ({"request_id": "r", "cache_salt": "s"}, "cache_salt"),
        ({"prompt": "x", "tokens": 3}, "tokens"),
    ],
)
def test_a_wrong_target_names_its_field(fields, param):
    with pytest.raises(BadRequest) as caught:
        kind_of(Target(**fields))
    assert caught.value.param == param
