from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineSpec
from engine_adapter.vllm.discovery import Trials, discover, try_out
from engine_adapter.vllm.metrics import look
from tests.engines import engine_spec, served
from tests.fake_engines.text import MODEL_DIR
from tests.fake_engines.vllm import running_vllm


@asynccontextmanager
async def connected(url, **fields):
    spec = engine_spec("vllm", url, **fields)
    control = ControlClient(spec)
    try:
        yield control, spec
    finally:
        await control.aclose()


async def test_what_a_server_is():
    with running_vllm(loras=("ada", "bo"), max_model_len=512) as server:
        async with connected(server.url) as (control, spec):
            facts = await discover(control, spec, None)
    model = facts.model
    assert (model.name, model.loras) == ("tiny", {"ada", "bo"})
    assert (model.root, model.max_model_len, facts.version) == (str(MODEL_DIR), 512, "0.32.0")
    assert facts.tokenizes
    assert facts.renders
    assert facts.resets
    assert facts.source.topic == "kv@tiny"
    assert (facts.trials.takes_salt, facts.trials.reports_cached) == (True, True)


async def test_it_is_tried_out_once_a_process():
    with running_vllm() as server:
        async with connected(server.url) as (control, spec):
            facts = await discover(control, spec, None)
            tried = len(server.fake.seen)
            assert (await discover(control, spec, facts)).trials == facts.trials
            assert len(server.fake.seen) == tried
            server.fake.restart()
            await discover(control, spec, facts)
            assert len(server.fake.seen) == 2 * tried


async def test_a_rank_of_several():
    with running_vllm(ranks=3) as server:
        async with connected(server.url, dp_rank=2) as (control, spec):
            facts = await discover(control, spec, None)
            assert (
                facts.source.endpoint.rpartition(":")[2]
                == server.fake.publishers[2].endpoint.rpartition(":")[2]
            )
        async with connected(server.url, dp_rank=3) as (control, spec):
            with pytest.raises(EngineUnavailable, match=r"no data-parallel rank 3: it has \[0, 1, 2\]"):
                await discover(control, spec, None)
        async with connected(server.url) as (control, spec):
            assert (await discover(control, spec, None)).source is None


def answering(models=None, **others):
    """Another server: what `/v1/models` and other routes answer."""
    answers = {"/v1/models": models, **others}
    routes = [Route(path, lambda _, answer=answer: JSONResponse(answer)) for path, answer in answers.items()]
    return Starlette(routes=[*routes, Route("/metrics", lambda _: JSONResponse(None, 200))])


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"models": {"models": []}}, "names no model"),
        ({"models": {"data": []}}, "names no model"),
        (
            {"models": {"data": [{"id": "m"}]}, "/kv_event_sources": {"0": {"at": "h"}}},
            "/kv_event_sources: the answer is not as expected",
        ),
    ],
)
async def test_another_kind_of_server(answers, why):
    with served(answering(**answers)) as url:
        async with connected(url) as (control, spec):
            with pytest.raises(EngineUnavailable, match=why):
                await discover(control, spec, None)


async def test_the_name_the_operator_gave_and_a_server_that_says_little():
    models = {"data": [{"id": "a"}, {"id": "b", "max_model_len": 9}, {"id": "l", "parent": "a"}]}
    with served(answering(models, **{"/version": {}, "/kv_event_sources": {}})) as url:
        async with connected(url, model="b") as (control, spec):
            facts = await discover(control, spec, None)
        async with connected(url, model="alias") as (control, spec):
            assert (await discover(control, spec, None)).model.name == "a"
    model = facts.model
    assert (model.name, model.max_model_len, model.loras) == ("b", 9, {"l"})
    assert (facts.version, facts.source, facts.names_sources) == ("", None, True)
    assert not facts.tokenizes
    assert not facts.renders
    assert facts.trials.reports_cached is None


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
    monkeypatch.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.2)
    with running_vllm() as server:
        server.core.hold()
        assert await tried(server) == Trials(takes_salt=True, reports_cached=None)
        server.core.release()
        assert await tried(server, Trials(takes_salt=True)) == Trials(True, True)


async def test_a_busy_server_that_queues_a_salted_request_does_not_heed_the_salt(monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.2)
    with running_vllm(saltless=("/v1/responses",)) as server:
        server.core.hold()
        assert (await tried(server)).takes_salt is False
        server.core.release()


async def test_a_server_that_answers_no_trial_is_not_ready(monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.2)
    with running_vllm(knows_salts=False) as server:
        server.core.hold()
        with pytest.raises(EngineUnavailable, match="too busy to show whether it respects cache salts"):
            await tried(server)
        server.core.release()
