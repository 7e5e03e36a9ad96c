from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineUnavailable
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineSpec
from engine_adapter.vllm.adapter import findings_of
from engine_adapter.vllm.discovery import Trials, discover, event_endpoints, look, try_out
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


@asynccontextmanager
async def discovered(spec_fields=None, **options):
    with running_vllm(**options) as server:
        spec = engine_spec("vllm", server.url, **(spec_fields or {}))
        control = ControlClient(spec)
        try:
            yield await discover(control, spec, None), spec, server
        finally:
            await control.aclose()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"kv_events": False}, '--kv-events-config \'{"enable_kv_cache_events":true'),
        ({"names_sources": False}, "events=tcp://HOST:5557,replay=tcp://HOST:5657"),
        ({"replay_endpoint": False}, '"replay_endpoint"'),
        ({"enable_prompt_tokens_details": False}, "--enable-prompt-tokens-details"),
        ({"enable_prefix_caching": False}, "without --no-enable-prefix-caching"),
        ({"enable_scale_out": False}, "--enable-scale-out"),
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"log_stats": False}, "without --disable-log-stats"),
        ({"ranks": 2}, "each rank as an engine of its own, or add it 2 times, with dp_rank=0 to 1"),
        ({"knows_salts": False}, "upgrade vLLM"),
        ({"version": "0.19.1"}, "upgrade it to 0.24 or later"),
    ],
)
async def test_each_thing_missing_has_its_flag(options, remedy):
    async with discovered(**options) as (facts, spec, _):
        (finding,) = findings_of(facts, spec)
        assert remedy in finding.remedy


async def test_nothing_to_find():
    for version in ("0.32.0", "0.24.0rc1", "nightly"):
        async with discovered(version=version) as (facts, spec, _):
            assert findings_of(facts, spec) == ()


async def test_a_key_does_not_guard_everything():
    async with discovered({"api_key": "secret"}, api_key="secret") as (facts, spec, _):
        (finding,) = findings_of(facts, spec)
        assert "only kvpin" in finding.remedy
        assert "secret" not in str(finding)


async def test_a_replay_that_does_not_answer():
    async with discovered() as (facts, spec, _):
        (finding,) = findings_of(facts, spec, replay_is_silent=True)
        assert "replay=tcp://HOST:PORT" in finding.remedy


async def test_an_event_address_that_is_none_is_a_finding():
    """Connecting to it would fail again and again."""
    async with discovered() as (facts, spec, _):
        odd = replace(facts, source=changed(facts.source, endpoint="tcp://gpu7"))
        assert event_endpoints(odd, spec) is None
        (finding,) = findings_of(odd, spec)
        assert "tcp://gpu7 cannot be reached from here" in finding.problem


async def test_events_that_stay_on_the_engines_machine():
    async with discovered() as (facts, spec, _):
        bound = changed(facts.source, endpoint="tcp://127.0.0.1:5557", replay_endpoint=None)
        there, remote = replace(facts, source=bound), replace(spec, url="http://gpu7:8000")
        assert event_endpoints(there, remote) is None
        (finding,) = findings_of(there, remote)
        assert "tcp://127.0.0.1:5557 cannot be reached from here" in finding.problem
        told = engine_spec("vllm", remote.url, events="tcp://gpu7:6000")
        assert event_endpoints(there, told) == EventEndpoints("tcp://gpu7:6000", None, "kv@tiny")


async def test_where_events_are():
    async with discovered() as (facts, spec, server):
        publisher = server.publisher
        expected = EventEndpoints(publisher.endpoint, publisher.replay_endpoint, "kv@tiny")
        assert event_endpoints(facts, spec) == expected
        assert event_endpoints(facts, engine_spec("vllm", spec.url, replay="tcp://h:1")).replay == "tcp://h:1"
    async with discovered(names_sources=False) as (facts, spec, _):
        named = engine_spec("vllm", spec.url, events="tcp://h:1", replay="tcp://h:2")
        assert event_endpoints(facts, named) == EventEndpoints("tcp://h:1", "tcp://h:2", "")


async def test_an_engine_that_says_that_it_is_of_another_kind(embedded_engine):
    spec = engine_spec("vllm", embedded_engine.url)
    control = ControlClient(spec)
    try:
        (finding,) = findings_of(await discover(control, spec, None), spec)
    finally:
        await control.aclose()
    assert "no vllm" in finding.problem
    assert f"--engine embedded={embedded_engine.url};" in finding.remedy
