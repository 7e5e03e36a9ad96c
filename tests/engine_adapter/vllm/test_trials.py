import pytest

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineSpec
from engine_adapter.vllm.metrics import look
from engine_adapter.vllm.trials import Trials, try_out
from tests.fake_engines.vllm import running_vllm


async def tried(server, known=Trials()):  # noqa: B008 - frozen
    control = ControlClient(EngineSpec("vllm", server.url, "e"))
    try:
        return await try_out(control, "tiny", await look(control, None), {}, known)
    finally:
        await control.aclose()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, Trials(True, True)),
        ({"knows_salts": False}, Trials(False, True)),
        ({"enable_prompt_tokens_details": False}, Trials(True, False)),
        ({"tells_zero": False}, Trials(True, True)),
        ({"tells_zero": False, "enable_prefix_caching": False}, Trials(True, False)),
    ],
)
async def test_what_requests_tell(options, found):
    with running_vllm(**options) as server:
        assert await tried(server) == found


async def test_a_busy_server_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.trials._PATIENCE_S", 0.2)
    with running_vllm() as server:
        server.core.hold()
        assert await tried(server) == Trials(takes_salt=True, reports_cached=None)
        server.core.release()
        assert await tried(server, Trials(takes_salt=True)) == Trials(True, True)


async def test_a_busy_server_that_queues_a_salted_request_does_not_heed_the_salt(monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.trials._PATIENCE_S", 0.2)
    with running_vllm(saltless=("/v1/responses",)) as server:
        server.core.hold()
        assert (await tried(server)).takes_salt is False
        server.core.release()


async def test_a_server_that_answers_no_trial_is_not_ready(monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.trials._PATIENCE_S", 0.2)
    with running_vllm(knows_salts=False) as server:
        server.core.hold()
        with pytest.raises(EngineUnavailable, match="too busy to show whether it respects cache salts"):
            await tried(server)
        server.core.release()
