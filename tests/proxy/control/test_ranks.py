"""Servers with several data-parallel ranks: each rank becomes an engine. Fake servers on sockets."""

import asyncio
import contextlib
from dataclasses import replace

import httpx
import pytest

from engine_adapter import EngineSpec, HttpTransport
from proxy.control.ranks import Ranks
from proxy.core.audit import Trust
from proxy.fleet.discovery import FoundEngine
from proxy.fleet.engine import EngineState
from proxy.server.app import Proxy, build_app
from proxy.settings import EngineSettings, HealthSettings, ManagedSettings, Settings
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.vllm import running_vllm
from tests.fakes import is_tokenised, serving
from tests.kv_world import until

URL = "http://gpu7:8000"


def vllm(**more):
    return EngineSettings(kind="vllm", id="v", url=URL, **more)


def ids(engines):
    return [each.id for each in engines]


def test_an_entry_stands_for_the_ranks_that_its_server_told():
    ranks = Ranks()
    assert not ranks.learn(URL, ())
    assert not ranks.learn(URL, (0,))
    assert ranks.split(vllm()) == [vllm()]
    assert ranks.learn(URL, (0, 1))
    assert not ranks.learn(URL, (0, 1))
    assert not ranks.learn(URL, ())
    assert ids(ranks.split(vllm())) == ["v-dp0", "v-dp1"]
    assert [each.spec().options.rank for each in ranks.split(vllm())] == [0, 1]
    assert ranks.learn(URL, (0, 1, 2))
    assert ids(ranks.split(vllm())) == ["v-dp0", "v-dp1", "v-dp2"]
    assert ranks.learn(URL, (0,))
    assert ranks.split(vllm()) == [vllm()]


@pytest.mark.parametrize(
    "entry",
    [
        vllm(dp_rank=1),
        EngineSettings(kind="openai_compatible", id="o", url=URL),
        ManagedSettings(kind="vllm", id="m", command="vllm serve --port {port}"),
    ],
)
def test_what_names_its_rank_or_can_have_none_is_one_engine(entry):
    ranks = Ranks()
    ranks.learn(URL, (0, 1))
    assert ranks.split(entry) == [entry]


def test_each_rank_has_the_settings_of_the_server_and_the_next_event_ports():
    entry = vllm(events="tcp://gpu7:5557", replay="tcp://gpu7:5657", api_key="k", share_kv=True)
    spec = entry.of_rank(2).spec()
    assert (spec.api_key, spec.share_kv, spec.url) == ("k", True, URL)
    assert (spec.options.events, spec.options.replay) == ("tcp://gpu7:5559", "tcp://gpu7:5659")
    assert entry.spec().options.events == "tcp://gpu7:5557"


@contextlib.asynccontextmanager
async def kvpin_over(kind, url):
    """A proxy that was told only the address of a server, and a client of it."""
    settings = Settings(
        reuse=True,
        engines=(EngineSettings(kind=kind, id="e", url=url),),
        health=HealthSettings(interval_s=0.05),
    )
    proxy = Proxy(settings, HttpTransport())
    proxy.start()
    try:
        async with serving(build_app(proxy)) as own, httpx.AsyncClient(base_url=own, timeout=60) as client:
            yield proxy, client
    finally:
        await proxy.stop()


def engines(proxy):
    """The ready engines whose events are followed."""
    found = proxy.fleet.engines.values()
    return {
        each.id for each in found if each.state is EngineState.READY and each.audit.trust is Trust.PRECISE
    }


def stored(proxy):
    """Blocks that the engines have told of."""
    return sum(each.view.counts.stored for each in proxy.fleet.engines.values())


async def complete(client, first):
    body = {"model": "tiny", "prompt": list(range(first, first + 80)), "max_tokens": 2}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvpin-engine"], int(answer.headers["x-kvpin-predicted-tokens"])


@pytest.mark.parametrize(
    ("kind", "running"), [("vllm", running_vllm), ("sglang", running_sglang)], ids=["vllm", "sglang"]
)
async def test_one_address_becomes_an_engine_for_each_rank(kind, running):
    sizes = {"block_size": 16} if kind == "vllm" else {"page_size": 16}
    with running(ranks=3, **sizes) as server:
        async with kvpin_over(kind, server.url) as (proxy, client):
            await until(lambda: engines(proxy) == {"e-dp0", "e-dp1", "e-dp2"}, 60)
            await until(lambda: set(proxy.fleet.engines) == {"e-dp0", "e-dp1", "e-dp2"}, 60)
            await until(lambda: is_tokenised(proxy), 60)
            found = []
            for first in (100, 300, 500, 100, 300, 500):
                found.append(await complete(client, first))
                held = 5 * len({engine for engine, _ in found})
                await until(
                    lambda held=held: sum(e.view.counts.stored for e in proxy.fleet.engines.values()) >= held,
                    60,
                )
            homes = [engine for engine, _ in found]
            assert sorted(homes[:3]) == ["e-dp0", "e-dp1", "e-dp2"]
            assert homes[3:] == homes[:3]
            assert [predicted for _, predicted in found] == [0] * 3 + [64] * 3
            asked = [rank for rank, body in server.fake.seen if body.get("max_tokens") == 2]
            assert [f"e-dp{rank}" for rank in asked] == homes


async def test_a_server_that_comes_back_with_other_ranks_becomes_other_engines():
    with running_vllm(ranks=2) as server:
        async with kvpin_over("vllm", server.url) as (proxy, client):
            await until(lambda: set(proxy.fleet.engines) == {"e-dp0", "e-dp1"} == engines(proxy), 60)
            server.fake.options = replace(server.fake.options, ranks=1)
            server.fake.restart()
            await until(lambda: set(proxy.fleet.engines) == {"e"}, 60)
            assert (await complete(client, 100))[0] == "e"
            server.fake.options = replace(server.fake.options, ranks=2)
            server.fake.restart()
            await until(lambda: set(proxy.fleet.engines) == {"e-dp0", "e-dp1"} == engines(proxy), 60)
            assert (await complete(client, 100))[0] in ("e-dp0", "e-dp1")


class Source:
    """A source of engines that says what a test puts."""

    def __init__(self):
        self.said = asyncio.Queue()

    async def found(self):
        while True:
            yield await self.said.get()


async def test_all_ranks_of_a_server_drain_and_come_back_when_its_source_says_so():
    source = Source()
    with running_vllm(ranks=2) as server:
        pod = EngineSettings(kind="vllm", id="pod.llm", url=server.url)
        async with kvpin_over("vllm", "http://127.0.0.1:1") as (proxy, _):
            proxy.discovered.follow([], [("pods", source)], grace_s=1)
            for is_ready, state in ((True, "ready"), (False, "draining"), (True, "ready")):
                source.said.put_nowait((FoundEngine(pod, is_ready),))
                states = {"pod.llm-dp0": state, "pod.llm-dp1": state}
                await until(lambda told=states: states_of(proxy) == told, 60)
            source.said.put_nowait(())
            await until(lambda: states_of(proxy) == {}, 60)


def states_of(proxy):
    return {each.id: each.state.value for each in proxy.fleet.engines.values()}


async def test_ranks_whose_ids_are_taken_stay_one_engine():
    with running_vllm(ranks=2) as server:
        server.fake.options = replace(server.fake.options, ranks=1)
        server.fake.restart()
        async with kvpin_over("vllm", server.url) as (proxy, client):
            await until(lambda: proxy.fleet.engines["e"].state is EngineState.READY, 60)
            added = proxy.engines.add(EngineSpec("vllm", server.url, "e-dp1", headers={"x-to": "e-dp1"}))
            server.fake.options = replace(server.fake.options, ranks=2)
            server.fake.restart()
            for name in ("e", "e-dp1"):  # the admin API adds what it was told
                engine = proxy.fleet.engines[name]
                await until(lambda each=engine: each.info is not None and each.info.ranks == (0, 1), 60)
                await until(lambda each=engine: each.state is EngineState.READY, 60)
            assert set(proxy.fleet.engines) == {"e", "e-dp1"}
            assert "dp_rank=0 to 1" in str(added.adapter.findings())
            assert (await complete(client, 100))[0] in ("e", "e-dp1")
