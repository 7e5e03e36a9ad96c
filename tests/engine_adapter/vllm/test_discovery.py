from collections import Counter
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from engine_adapter.errors import EngineUnavailable, EngineUnhealthy
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.adapter import ServedModel
from engine_adapter.http.control import ControlClient
from engine_adapter.types import Finding, Role
from engine_adapter.vllm.adapter import findings_of
from engine_adapter.vllm.discovery import (
    RankSource,
    Trials,
    VllmFacts,
    VllmMetrics,
    discover,
    event_endpoints,
    look,
    read_metrics,
    try_out,
)
from tests.engines import engine_spec, served
from tests.fake_engines.text import MODEL_DIR
from tests.fake_engines.vllm import running_vllm


@asynccontextmanager
async def connected(url, **fields):
    spec = engine_spec("vllm", url, **fields)
    async with aclosing(ControlClient(spec)) as control:
        yield control, spec


async def found(url, **fields):
    """What a server at that address is, as an engine with these fields."""
    async with connected(url, **fields) as (control, spec):
        return await discover(control, spec, None)


async def test_what_a_server_is():
    with running_vllm(loras=("ada", "bo"), max_model_len=512) as server:
        facts = await found(server.url)
    model = facts.model
    assert (model.name, model.loras) == ("tiny", {"ada", "bo"})
    assert (model.root, model.max_model_len, facts.version) == (str(MODEL_DIR), 512, "0.32.0")
    assert (facts.tokenizes, facts.renders, facts.resets) == (True, True, True)
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
        source = (await found(server.url, dp_rank=2)).source
        assert source.endpoint == server.fake.publishers[2].endpoint.replace("127.0.0.1", "*")
        with pytest.raises(EngineUnavailable, match=r"no data-parallel rank 3: it has \[0, 1, 2\]"):
            await found(server.url, dp_rank=3)
        assert (await found(server.url)).source is None


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
    with served(answering(**answers)) as url, pytest.raises(EngineUnavailable, match=why):
        await found(url)


async def test_the_name_the_operator_gave_and_a_server_that_says_little():
    models = {"data": [{"id": "a"}, {"id": "b", "max_model_len": 9}, {"id": "l", "parent": "a"}]}
    with served(answering(models, **{"/version": {}, "/kv_event_sources": {}})) as url:
        facts = await found(url, model="b")
        assert (await found(url, model="alias")).model.name == "a"
    model = facts.model
    assert (model.name, model.max_model_len, model.loras) == ("b", 9, {"l"})
    assert (facts.version, facts.source, facts.names_sources) == ("", None, True)
    assert (facts.tokenizes, facts.renders, facts.resets) == (False, False, False)
    assert facts.trials.reports_cached is None


async def tried(server, known=Trials()):  # noqa: B008 - frozen
    async with connected(server.url) as (control, _):
        return await try_out(control, "tiny", await look(control, None), {}, known)


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


@asynccontextmanager
async def behind_gateway(refuses):
    """A vLLM that respects salts, behind a gateway. `refuses`: paths, or "unsalted", and how many of their
    first requests the gateway refuses."""

    async def answer(request):
        is_salted = "cache_salt" in await request.json()
        for kind in (request.url.path, "salted" if is_salted else "unsalted"):
            if refuses.get(kind):
                refuses[kind] -= 1
                return JSONResponse({"error": "slow down"}, 429)
        if is_salted:
            return JSONResponse({"error": {"message": "wrong", "param": "cache_salt"}}, 400)
        return JSONResponse({"usage": {"prompt_tokens_details": {"cached_tokens": 0}}})

    routes = [Route("/v1/{path:path}", answer, methods=["POST"])]
    with served(Starlette(routes=routes)) as url:
        async with connected(url) as (control, _):
            yield control


@pytest.mark.parametrize(
    "refuses",
    [{"/v1/messages": 2, "/v1/chat/completions": 1}, {"/v1/completions": 2}],
    ids=["salted requests", "completions"],
)
async def test_what_a_gateway_refuses_of_many_requests_at_once_is_tried_again(refuses, monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.discovery._AGAIN_S", 0.01)
    async with behind_gateway(refuses) as control:
        assert await try_out(control, "tiny", VllmMetrics(), {}, Trials()) == Trials(True, True)


async def test_a_gateway_that_lets_no_more_requests_through_says_nothing_of_an_engine(monkeypatch):
    monkeypatch.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.7)
    async with behind_gateway({"/v1/messages": 1000}) as control:
        with pytest.raises(EngineUnhealthy, match="too busy to be asked what it can do: it answers 429"):
            await try_out(control, "tiny", VllmMetrics(), {}, Trials())


async def test_a_gateway_that_refuses_all_completions_but_salted_ones_does_not_keep_an_engine_out(
    monkeypatch,
):
    monkeypatch.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.7)
    async with behind_gateway({"unsalted": 1000}) as control:
        assert await try_out(control, "tiny", VllmMetrics(), {}, Trials()) == Trials(True, None)


@pytest.mark.parametrize("times", [1, 1000])
async def test_a_gateways_refusal_says_nothing_of_what_a_server_can_do(times, monkeypatch):
    """It refuses the first requests of each route that may be missing."""
    monkeypatch.setattr("engine_adapter.vllm.discovery._AGAIN_S", 0.01)
    monkeypatch.setattr("engine_adapter.vllm.discovery._PATIENCE_S", 0.7)
    config, asked = {"vllm_config": {"kv_transfer_config": {"kv_role": "kv_producer"}}}, Counter()

    async def answer(request):
        path = request.url.path
        asked[path] += 1
        if asked[path] <= times:
            return JSONResponse({"error": "slow down"}, 429)
        return JSONResponse(config, 200 if path == "/server_info" else 404)

    others = Route("/{path:path}", answer, methods=["GET", "POST"])
    app = answering({"data": [{"id": "m"}]}, **{"/version": {}, "/kv_event_sources": {}})
    with served(Starlette(routes=[*app.routes, others])) as url:
        if times > 1:
            with pytest.raises(EngineUnhealthy, match="it answers 429"):
                await found(url)
            return
        facts = await found(url)
    assert (facts.tokenizes, facts.renders, facts.resets, facts.loads_loras) == (False,) * 4
    assert facts.kv_transfer.role is Role.PREFILL


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
    with running_vllm(**options) as server:
        (finding,) = findings_of(await found(server.url), engine_spec("vllm", server.url))
        assert remedy in finding.remedy


URL = "http://127.0.0.1:8000"
SOURCE = RankSource("tcp://*:5557", "tcp://*:5657", "kv@tiny")
FACTS = VllmFacts(
    model=ServedModel("tiny", 1024, "/m", {}, frozenset(), {}),
    version="0.32.0",
    metrics=VllmMetrics(ranks=(0,), block_size=16, blocks=128, caching=True),
    source=SOURCE,
    names_sources=True,
    tokenizes=True,
    renders=True,
    resets=True,
    loads_loras=False,
    trials=Trials(takes_salt=True, reports_cached=True),
)
"""Of a server that lacks nothing."""


@pytest.mark.parametrize("version", ["0.32.0", "0.24.0rc1", "nightly"])
def test_nothing_to_find(version):
    assert findings_of(replace(FACTS, version=version), engine_spec("vllm", URL)) == ()


def test_a_key_does_not_guard_everything():
    (finding,) = findings_of(FACTS, engine_spec("vllm", URL, api_key="secret"))
    assert "only kvpin" in finding.remedy
    assert "secret" not in str(finding)


def test_a_replay_that_does_not_answer():
    (finding,) = findings_of(FACTS, engine_spec("vllm", URL), replay_is_silent=True)
    assert "replay=tcp://HOST:PORT" in finding.remedy


def test_of_another_kind_nothing_else_is_told():
    other = Finding("it is no vllm", "name its kind")
    assert findings_of(replace(FACTS, wrong_kind=other, resets=False), engine_spec("vllm", URL)) == (other,)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("tcp://gpu7", URL), ("tcp://127.0.0.1:5557", "http://gpu7:8000")],
    ids=["no address", "on the engine's machine alone"],
)
def test_events_at_an_address_that_is_not_reached_are_a_finding(endpoint, url):
    facts = replace(FACTS, source=RankSource(endpoint, None, "kv@tiny"))
    assert event_endpoints(facts, engine_spec("vllm", url)) is None
    (finding,) = findings_of(facts, engine_spec("vllm", url))
    assert f"{endpoint} cannot be reached from here" in finding.problem
    told = engine_spec("vllm", url, events="tcp://gpu7:6000")
    assert event_endpoints(facts, told) == EventEndpoints("tcp://gpu7:6000", None, "kv@tiny")


@pytest.mark.parametrize("fields", [{"publisher": "null"}, {"enable_kv_cache_events": False}])
def test_a_source_that_publishes_nothing_is_none(fields):
    facts = replace(FACTS, source=RankSource("tcp://*:5557", None, "kv@tiny", **fields))
    assert event_endpoints(facts, engine_spec("vllm", URL)) is None


def test_where_events_are():
    own = EventEndpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", "kv@tiny")
    assert event_endpoints(FACTS, engine_spec("vllm", URL)) == own
    assert event_endpoints(FACTS, engine_spec("vllm", URL, replay="tcp://h:1")).replay == "tcp://h:1"
    silent = replace(FACTS, source=None, names_sources=False)
    named = engine_spec("vllm", URL, events="tcp://h:1", replay="tcp://h:2")
    assert event_endpoints(silent, named) == EventEndpoints("tcp://h:1", "tcp://h:2", "")


PAGE = b"""\
process_start_time_seconds 1.7952503577e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.1
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 847.0
vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 3.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 384.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 400.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 63.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.795250395377022e+09
vllm:prefix_cache_queries_created{engine="1",model_name="tiny"} 1.795250395377099e+09
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="200"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",engine="1",num_gpu_blocks="None"} 1.0
"""


def test_one_rank_of_a_page():
    assert read_metrics(PAGE, 0) == VllmMetrics(
        ranks=(0, 1),
        identity="1795250357.700000-1795250395.377022",
        running=3,
        waiting=2,
        usage=0.5,
        block_size=32,
        blocks=99,
        caching=True,
        queries=847,
        hits=384,
        fetched=63,
    )
    other = read_metrics(PAGE, 1)
    assert (other.blocks, other.caching, other.tells_blocks, other.hits) == (None, False, False, 0)
    assert other.identity == "1795250357.700000-1795250395.377099"


def test_lmcache_below_it_shows():
    line = b'vllm:lmcache_mp_lookup_duration_seconds_count{engine="1",model_name="tiny"} 0.0\n'
    assert [read_metrics(PAGE + line, rank).lmcache for rank in (None, 0, 1)] == [True, False, True]
    assert not read_metrics(PAGE).lmcache


def test_all_ranks_together():
    both = read_metrics(PAGE)
    assert (both.running, both.waiting, both.usage, both.queries) == (4, 2, 0.3, 850)
    assert both.blocks == 198


def test_ranks_on_which_nothing_has_run_yet():
    page = b"\n".join(line for line in PAGE.splitlines() if b"cache_config_info" in line)
    seen = read_metrics(page, 0)
    assert (seen.ranks, seen.blocks, seen.running, seen.identity) == ((0, 1), 99, 0, None)


def test_a_page_that_tells_nothing_of_the_engine():
    assert read_metrics(b"process_start_time_seconds 5\n") == VllmMetrics(identity="5.000000")
    assert read_metrics(b"") == VllmMetrics()
    assert not VllmMetrics().tells_blocks
    with pytest.raises(EngineUnavailable):
        read_metrics(b"process_start_time_seconds soon\n")


@pytest.mark.parametrize(
    ("ranks", "addressable"), [((0, 1, 2), (0, 1, 2)), ((2, 3), ()), ((1,), ()), ((), ())]
)
def test_ranks_that_requests_cannot_name_are_none(ranks, addressable):
    assert VllmMetrics(ranks=ranks).addressable_ranks == addressable
