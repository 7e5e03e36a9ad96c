import pytest

from engine_adapter import (
    EngineDied,
    EngineDiverged,
    EngineGarbled,
    EngineLost,
    EngineRejected,
    EngineUnreachable,
    Headers,
    ModelFailed,
)
from proxy.core.life import Cause, Life, Rules
from proxy.core.retry_budget import RetryBudget
from proxy.request.alarm import Alarm
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.records import RequestRecord
from proxy.request.transcript import SentStream
from proxy.steps.serving import Serving, cause_for
from tests.fakes import CHAT

FILES = "/v1/files/f-1"


async def serving(path=CHAT):
    call = Call("r", "POST", path, Headers([]), None)
    life = Life(Rules(), RetryBudget(), 0.0)
    made = Serving(call, Reply(Nobody()), RequestRecord.of(call), life, Alarm(life), Admission.of_kvpin())
    made.n_candidates = 2
    return made


@pytest.mark.parametrize(
    ("error", "path", "cause"),
    [
        (EngineUnreachable("x"), CHAT, Cause.ENGINE_UNREACHABLE),
        (EngineDied("x"), CHAT, Cause.ENGINE_DIED),
        (EngineGarbled("x"), CHAT, Cause.ENGINE_GARBLED),
        (EngineLost("x"), CHAT, Cause.ENGINE_LOST),
        (EngineDiverged("x"), CHAT, Cause.DIVERGED),
        (EngineRejected("x", status=503), CHAT, Cause.ENGINE_REFUSED),
        (EngineRejected("x", status=400), CHAT, Cause.ENGINE_REJECTED),
        (EngineRejected("x", status=404), CHAT, Cause.ENGINE_REJECTED),
        (EngineRejected("x", status=404), FILES, Cause.ENGINE_LACKS),
        (EngineRejected("x", status=401), CHAT, Cause.ENGINE_DENIED),
        (ModelFailed("x"), CHAT, Cause.ENGINE_MODEL_FAILED),
        (ValueError("x"), CHAT, Cause.BUG),
    ],
)
async def test_the_cause_of_an_error(error, path, cause):
    assert cause_for(error, await serving(path)) is cause


async def test_in_mid_stream_another_engine_may_go_on_whatever_this_one_says():
    made = await serving()
    made.told = SentStream("vllm", None, has_role=False, texts=(), resumption=None, cached_tokens=None)
    assert cause_for(EngineRejected("x", status=400), made) is Cause.ENGINE_REFUSED
    made.reply.complete = True  # with the error itself as its end
    assert cause_for(EngineRejected("x", status=400), made) is Cause.ENGINE_REJECTED
