"""A request that is being served. Deadlines over real sockets: tests/flow/test_lives.py."""

import asyncio
from array import array
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest

from engine_adapter import EngineDied, EngineRejected, Headers, JsonBody, Resumption
from proxy.core.life import Cause, Phase, RetryBudget, Rules
from proxy.prompt import Prompt
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.migration import SentStream
from proxy.request.records import RequestRecord
from proxy.steps import request
from proxy.steps.preparation import Ready
from proxy.steps.request import Request
from tests.fakes import CHAT

QUIET = Rules()


def request_for(path=CHAT, rules=QUIET):
    call = Call("r", "POST", path, Headers([]), None)
    made = Request(call, Reply(Nobody()), RequestRecord.of(call), Admission.of_kvpin(), rules, RetryBudget())
    made.n_candidates = 2
    return made


async def test_in_mid_stream_another_engine_may_go_on_whatever_this_one_says():
    made = request_for()
    made.told = SentStream("vllm", None, has_role=False, texts=(), resumption=None, cached_tokens=None)
    assert made.cause_for(EngineRejected("x", status=400)) is Cause.ENGINE_REFUSED
    made.reply.complete = True  # with the error itself as its end
    assert made.cause_for(EngineRejected("x", status=400)) is Cause.ENGINE_REJECTED


@pytest.mark.parametrize("begun", [0, 1])
async def test_a_stream_goes_on_only_where_engines_make_the_prompt_with_which_it_began(begun):
    """The other prompts do not end with the tokens that the client has: such an engine would begin again."""
    pool, builders = SimpleNamespace(chain=lambda prompt: prompt.token_ids, engines={}), [object(), object()]
    body = JsonBody(b'{"model":"m","stream":true}')
    call = Call("r", "POST", CHAT, Headers([]), body)
    mine, other = (
        Ready(call, pool, None, None, prompt=Prompt(token_ids=array("i", [one])), rendering=builders[one])
        for one in (0, 1)
    )
    made = request_for()
    made.is_ready(msgspec.structs.replace(mine, others=(other,)))
    made.prepared()
    made.placed("a")
    made.record.attempts.append("a")
    made.entered(0.0)
    made.began(0.0)
    made.ready = (mine, other)[begun]
    made.reply.started = True
    resumption = Resumption(array("i", [7, 8]), {"answer_token_ids": [7, 8]})
    told = SentStream("embedded", {}, True, (), resumption, None)
    made.passage = SimpleNamespace(told=lambda _cached: told)
    made.fails(Cause.ENGINE_DIED, EngineDied("x"))
    assert made.ready.others == ()
    assert made.ready.rendering is builders[begun]
    assert made.ready.call.body.get("answer_token_ids") == [7, 8]
    assert list(made.ready.prompt.token_ids) == [begun, 7, 8]


class World:
    """A request and its timer, in a task of its own."""

    def __init__(self, rules=QUIET):
        self.rules = rules
        self.works = lambda: asyncio.sleep(60)

    async def live(self):
        self.request = request_for(rules=self.rules)
        self.request.watch()
        try:
            await self.works()
        except asyncio.CancelledError:
            return self.request.interrupted()
        finally:
            self.request.stop()


async def test_a_client_that_leaves_as_well_is_the_cause():
    world = World()
    task = asyncio.create_task(world.live())
    await asyncio.sleep(0)
    world.request._interrupt = Cause.OUR_LIMIT
    world.request._cancel()
    task.cancel()
    assert await task is None
    assert task.cancelling() == 1


async def test_a_clean_up_that_hangs_is_interrupted_again(monkeypatch):
    monkeypatch.setattr(request, "CLEAN_UP_S", 0.02)
    world, cancels = World(Rules(total_s=0.02)), []

    async def hangs():
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(2):  # each takes an interruption of its own
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
                cancels.append(asyncio.current_task().cancelling())

    world.works = hangs
    task = asyncio.create_task(world.live())
    assert await asyncio.wait_for(task, 30) is Cause.OUR_LIMIT
    assert cancels == [2, 3]
    assert not task.cancelling()


async def test_an_engine_that_is_lost_between_two_attempts_or_after_the_end_is_no_matter():
    world = World()
    task = asyncio.create_task(world.live())
    await asyncio.sleep(0)
    world.request.engine_lost()
    await asyncio.sleep(0.01)
    assert world.request.phase is Phase.ADMITTED
    task.cancel()
    assert await task is None
    world.request.engine_lost()
    await asyncio.sleep(0.01)
