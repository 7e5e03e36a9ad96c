import asyncio

import pytest

from engine_adapter import EngineUnavailable
from proxy.control.operations import (
    HISTORY,
    Operations,
    OperationState,
    Target,
    kind_of,
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

    operation = Operations(tasks).start("flush", "all", (), work)
    await operation.wait(5)
    assert operation.state is OperationState.FAILED
    assert ("why" in operation.error) is is_told


async def test_history_is_bounded_and_keeps_what_runs(tasks):
    operations = Operations(tasks)
    gate = asyncio.Event()
    running = operations.start("flush", "all", (), lambda _: gate.wait())
    for _ in range(HISTORY + 5):
        done = operations.start("flush", "all", (), nothing)
        await done.wait(5)
    newest = operations.newest()
    assert len(newest) == HISTORY
    assert (newest[0], newest[-1]) == (done, running)
    gate.set()


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
