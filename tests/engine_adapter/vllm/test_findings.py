from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.control import ControlClient
from engine_adapter.vllm.discovery import discover, event_endpoints
from engine_adapter.vllm.findings import findings_of
from tests.engines import engine_spec
from tests.fake_engines.vllm import running_vllm


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
