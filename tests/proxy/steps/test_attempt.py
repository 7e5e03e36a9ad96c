"""What a failed attempt says about its engine. Attempts over real sockets: tests/proxy/test_flow.py."""

from types import SimpleNamespace

import pytest

from engine_adapter import EngineRejected
from proxy.core.life import Cause, FailedAttempt
from proxy.fleet.fleet import Fleet
from proxy.steps.request import Request
from tests.fakes import add_ready


@pytest.mark.parametrize("cause", Cause)
async def test_only_some_causes_say_something_about_the_engine(cause):
    engine = add_ready(Fleet(), "a")
    ready = SimpleNamespace(pool=SimpleNamespace(engines={"a": engine}))
    made = SimpleNamespace(ready=ready, call=SimpleNamespace(route="/v1/files"))
    Request.blame(made, [FailedAttempt("a", cause, EngineRejected("x", status=503))])
    is_suspect = cause in (
        Cause.ENGINE_UNREACHABLE, Cause.ENGINE_DIED, Cause.ENGINE_LATE, Cause.ENGINE_GARBLED
    )  # fmt: skip
    assert (engine.state == "suspect") is is_suspect
    assert engine.check_now.is_set() is (is_suspect or cause is Cause.ENGINE_SILENT)
    assert (engine.breaker is not None) is (
        is_suspect or cause in (Cause.ENGINE_REFUSED, Cause.ENGINE_DENIED, Cause.ENGINE_MODEL_FAILED)
    )
    assert engine.lacks == ({"/v1/files"} if cause is Cause.ENGINE_LACKS else set())
