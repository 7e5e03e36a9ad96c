"""A request that is being served. Deadlines over real sockets: tests/flow/test_lives.py."""

import asyncio
from array import array
from contextlib import suppress
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from engine_adapter import EngineDied, EngineRejected, Headers, JsonBody, Resumption
from proxy.core.audit import Unchecked
from proxy.core.life import Cause, FailedAttempt, Phase, RetryBudget, Rules
from proxy.core.placement.decision import Cost, Placement
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.prompt import Prompt
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.migration import SentStream
from proxy.request.records import RequestRecord
from proxy.steps import request
from proxy.steps.checks import check_prediction
from proxy.steps.preparation import Ready
from proxy.steps.request import Request
from tests.fakes import CHAT, add_ready

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
    made.is_ready(replace(mine, others=(other,)))
    made.prepared()
    made.placed("a")
    made.record.attempts.append("a")
    made.entered(0.0)
    made.began(0.0)
    made.ready = (mine, other)[begun]
    made.reply.started = made.reply.is_events = True
    resumption = Resumption(array("i", [7, 8]), {"answer_token_ids": [7, 8]})
    told = SentStream("embedded", {}, True, (), resumption, None)
    made.passage = SimpleNamespace(told=lambda _cached: told)
    made.fails(Cause.ENGINE_DIED, EngineDied("x"))
    assert made.ready.others == ()
    assert made.ready.rendering is builders[begun]
    assert made.ready.call.body.get("answer_token_ids") == [7, 8]
    assert list(made.ready.prompt.token_ids) == [begun, 7, 8]


@pytest.mark.parametrize("cause", Cause)
async def test_only_some_causes_say_something_about_the_engine(cause):
    engine = add_ready(Fleet(), "a")
    ready = SimpleNamespace(pool=SimpleNamespace(engines={"a": engine}))
    asks = SimpleNamespace(ready=ready, call=SimpleNamespace(route="/v1/files"))
    Request.blame(asks, [FailedAttempt("a", cause, EngineRejected("x", status=503))])
    is_suspect = cause in (
        Cause.ENGINE_UNREACHABLE, Cause.ENGINE_DIED, Cause.ENGINE_LATE, Cause.ENGINE_GARBLED
    )  # fmt: skip
    assert (engine.state == "suspect") is is_suspect
    assert engine.check_now.is_set() is (is_suspect or cause is Cause.ENGINE_SILENT)
    assert (engine.breaker is not None) is (
        is_suspect or cause in (Cause.ENGINE_REFUSED, Cause.ENGINE_DENIED, Cause.ENGINE_MODEL_FAILED)
    )
    assert engine.lacks == ({"/v1/files"} if cause is Cause.ENGINE_LACKS else set())


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


# --- what reports are compared with --------------------------------------------------------------

PROMPT = Prompt(array("i", range(40)))
PLACED = Placement(Cost("a"), 32, 40, tuple, "lowest cost")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tokens_agree": False}, Unchecked.TOKENS_DIFFER),
        ({"may_be_evicted": True}, Unchecked.MAY_BE_EVICTED),
        ({"reported": None, "error": "no"}, Unchecked.FAILED),
        ({"reported": None, "runs_prompt": False}, Unchecked.NO_PROMPT),
        ({"tokens_agree": False, "firm": False}, Unchecked.TOKENS_DIFFER),
        ({"has_ingest": False}, Unchecked.REUSE_OFF),
        # What may be doubted and is not. Nothing can be evicted of a prompt of which nothing is cached.
        ({"tokens_agree": None}, None),
        ({"may_be_evicted": True, "predicted_tokens": 0}, None),
    ],
)
def test_what_is_no_firm_prediction_is_not_compared(more, why):
    """All is well with it, but for what `more` says. Further reasons: tests/proxy/test_flow.py."""
    engine, given = (
        add_ready(fleet := Fleet(), "a"),
        {"tokens_agree": True, "error": None, "runs_prompt": True},
    )
    placement = replace(PLACED, **{name: more[name] for name in ("firm", "predicted_tokens") if name in more})
    placed = SimpleNamespace(may_be_evicted=more.get("may_be_evicted", False))
    lease = SimpleNamespace(placement=placement, placed=placed, evicted_since=False)
    record = SimpleNamespace(**given | more, placement=placement)
    ingest = Ingest(fleet, None) if more.get("has_ingest", True) else None
    ready = SimpleNamespace(prompt=PROMPT)
    assert check_prediction(ingest, engine, ready, lease, record, more.get("reported", 32)) is why
    assert engine.audit.view().checked == (why is None)
    assert record.placement.firm is (why is not Unchecked.MAY_BE_EVICTED and placement.firm)
