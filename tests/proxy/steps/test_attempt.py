"""What a failed attempt says about its engine. Attempts over real sockets: tests/proxy/test_flow.py."""

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
from proxy.core.life import Attempt, Cause, Life, Rules
from proxy.core.retry_budget import RetryBudget
from proxy.fleet.fleet import Fleet
from proxy.request.alarm import Alarm
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.records import RequestRecord
from proxy.request.tenants import Tenants
from proxy.steps.attempt import Attempts, Serving, cause_for
from tests.fakes import CHAT, add_ready

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
        (ModelFailed("x"), CHAT, Cause.ENGINE_MODEL_FAILED),
        (ValueError("x"), CHAT, Cause.BUG),
    ],
)
async def test_the_cause_of_an_error(error, path, cause):
    assert cause_for(error, await serving(path)) is cause


async def test_in_mid_stream_another_engine_may_go_on_whatever_this_one_says():
    made = await serving()
    made.reply.started = True
    assert cause_for(EngineRejected("x", status=400), made) is Cause.ENGINE_REFUSED


@pytest.mark.parametrize("cause", Cause)
async def test_only_some_causes_say_something_about_the_engine(cause):
    engine = add_ready(Fleet(), "a")
    attempts, made = Attempts(None, None, Tenants(())), await serving("/v1/files")
    made.engine = engine
    attempts.blame(made, Attempt("a", cause, EngineRejected("x", status=503)))
    is_suspect = cause in (
        Cause.ENGINE_UNREACHABLE, Cause.ENGINE_DIED, Cause.ENGINE_LATE, Cause.ENGINE_GARBLED
    )  # fmt: skip
    assert (engine.state == "suspect") is is_suspect
    assert engine.check_now.is_set() is (is_suspect or cause is Cause.ENGINE_SILENT)
    assert (engine.breaker is not None) is (
        is_suspect or cause in (Cause.ENGINE_REFUSED, Cause.ENGINE_MODEL_FAILED)
    )
    assert engine.lacks == ({"/v1/files"} if cause is Cause.ENGINE_LACKS else set())
