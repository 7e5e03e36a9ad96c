"""Engines that are found join, drain and leave under load, and a source that fails keeps its engines."""

import asyncio
import contextlib
import json
from dataclasses import replace

import httpx
import pytest
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.control import reconciler
from proxy.core.audit import Trust
from proxy.fleet import discovery
from proxy.fleet.discovery import FoundEngine, SourceError
from proxy.fleet.engine import EngineState
from proxy.server.app import Proxy, build_app
from proxy.settings import EngineSettings, HealthSettings, Settings
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.vllm import running_vllm
from tests.fakes import INFO, FakeEngine, is_tokenised, serving
from tests.kv_world import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(discovery, "PAUSE_S", 0.01)
    monkeypatch.setattr(discovery, "WATCH_PAUSE_S", 0.01)
    monkeypatch.setattr(reconciler, "FIRST_BACKOFF_S", 0.01)


@contextlib.asynccontextmanager
async def running(**settings):
    proxy = Proxy(Settings(**settings), HttpTransport())
    proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


@contextlib.asynccontextmanager
async def loaded(proxy):
    """Requests all the time; gives a client, and the statuses of what was answered."""
    statuses, over = [], asyncio.Event()

    async def send(client):
        while not over.is_set():
            statuses.append((await client.post("/v1/chat/completions", json=CHAT)).status_code)

    async with (
        serving(build_app(proxy)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(4):
            group.create_task(send(client))
        try:
            yield client, statuses
        finally:
            over.set()


def state(proxy, engine_id):
    engine = proxy.fleet.engines.get(engine_id)
    return engine and engine.state


class Scripted:
    """A source that says what a test puts."""

    def __init__(self):
        self.said = asyncio.Queue()

    def say(self, *engines):
        self.said.put_nowait(engines)

    async def found(self):
        while True:
            said = await self.said.get()
            if isinstance(said[0] if said else None, str):
                raise SourceError(said[0])
            yield tuple(said)


def engine(engine_id, url, *, is_ready=True, **more):
    return FoundEngine(EngineSettings(kind="openai_compatible", url=url, id=engine_id, **more), is_ready)


async def test_engines_of_a_file_come_and_go_under_load(tmp_path):
    path = tmp_path / "engines.json"

    def write(*servers):
        engines = [{"kind": "openai_compatible", "url": each.url, "id": each.id} for each in servers]
        (tmp_path / "new").write_text(json.dumps({"engines": engines}))
        (tmp_path / "new").replace(path)

    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        write(a)
        async with running(engines_file=path) as proxy:
            await until(proxy.fleet.is_ready, 60)
            async with loaded(proxy) as (client, statuses):
                for servers in ([a, b], [b], [b, c], [c, a], [a]):
                    write(*servers)
                    ids = {each.id for each in servers}
                    await until(lambda ids=ids: set(proxy.fleet.engines) == ids, 60)
                    await until(
                        lambda ids=ids: all(state(proxy, each) is EngineState.READY for each in ids), 60
                    )
                    count = len(statuses)
                    await until(lambda count=count: len(statuses) > count + 20, 60)
                path.write_text("[[engines]]")  # not JSON: the engine stays
                source = proxy.engines.sources[str(path)]
                await until(lambda: source.error is not None and "is not JSON" in source.error, 60)
                assert set(proxy.fleet.engines) == {"a"}
                listed = (await client.get("/admin/v1/engines")).json()["sources"]
                assert listed == [{"source": str(path), "engines": ["a"], "error": source.error}]
                assert b'kvpin_source_answers{source="%s"} 0.0' % str(path).encode() in proxy.metrics.render()
                write(a)
                await until(lambda: source.error is None, 60)
            assert set(statuses) == {200}
            assert all(each.seen for each in (a, b, c))


async def test_a_source_that_fails_or_names_what_cannot_be_used_keeps_its_engines(tmp_path):
    one, other = Scripted(), Scripted()
    async with FakeEngine("a") as a, running(engines_file=tmp_path / "none.toml") as proxy:
        found, sources = proxy.engines, proxy.engines.sources
        static = EngineSettings(kind="openai_compatible", url=a.url, id="s")
        found.follow([static], [("one", one), ("other", other)], grace_s=60)
        one.say(engine("a", a.url, headers={"x-to": "a"}), engine("s", "http://127.0.0.1:1"))
        other.say(engine("a", "http://127.0.0.1:1"), engine("b", a.url, headers={"x-to": "b"}))
        await until(lambda: sources["one"].error is None and sources["other"].error is None)
        urls = {each.id: each.adapter.spec.url for each in proxy.fleet.engines.values()}
        assert urls == dict.fromkeys(("s", "a", "b"), a.url)  # who names it first is believed
        one.say("the source is away")
        await until(lambda: sources["one"].error == "the source is away")
        one.say(engine("c", "https://127.0.0.1:1", ca=str(tmp_path / "no.pem")))
        await until(lambda: "ca: " in (sources["one"].error or ""))
        assert set(proxy.fleet.engines) == {"s", "a", "b"}
        assert [each.entry.id for each in sources["one"].found] == ["a", "s"]
        mine = proxy.engines.add(engine("mine", a.url, headers={"x-to": "mine"}).entry)
        found.follow([static], [("one", one)], grace_s=60)  # the other is gone
        await until(lambda: set(proxy.fleet.engines) == {"s", "a", "mine"})
        again = Scripted()
        found.follow([static], [("one", again)], grace_s=60)  # its settings have changed
        assert set(proxy.fleet.engines) == {"s", "a", "mine"}
        again.say(engine("mine", a.url, headers={"x-to": "found"}))
        await until(lambda: set(proxy.fleet.engines) == {"s", "mine"})
        assert found._waiting  # the admin API's engine is not touched
        found.follow([static.model_copy(update={"id": "mine"})], [("one", again)], grace_s=60)
        assert (proxy.fleet.engines["mine"], found._waiting) == (mine, {"mine"})
        await proxy.engines.remove(mine)
        await until(lambda: not found._waiting and "mine" in proxy.fleet.engines)


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


async def test_a_first_start_is_not_told_as_a_change():
    entry = EngineSettings(kind="vllm", id="e", url="http://127.0.0.1:1")
    proxy = Proxy(Settings(reuse=True, engines=(entry,)), HttpTransport())
    proxy.start()
    try:
        with capture_logs() as logs:
            assert proxy.engines.split(proxy.fleet.engine("e"), replace(INFO, ranks=(0, 1)))
            await until(lambda: set(proxy.fleet.engines) == {"e-dp0", "e-dp1"})
            assert not proxy.engines.split(proxy.fleet.engine("e-dp0"), replace(INFO, ranks=(0, 1, 2)))
    finally:
        await proxy.stop()
    events = [each["event"] for each in logs]
    assert [each for each in events if "a server has" in each] == [
        "a server has several ranks or models: each is an engine",
        "a server has other ranks or models than were known: each is an engine",
    ]
    assert not [each for each in events if "engine has left" in each]


async def test_an_engine_that_waits_for_its_turn_drains_when_its_source_says_so(tmp_path):
    source = Scripted()
    async with FakeEngine("a") as a, FakeEngine("b") as b, running(engines_file=tmp_path / "none") as proxy:
        proxy.engines.follow([], [("one", source)], grace_s=60)
        source.say(engine("a", a.url), engine("b", b.url))
        await until(lambda: state(proxy, "a") is state(proxy, "b") is EngineState.READY)
        old = proxy.fleet.engine("a")
        old.leases.add(request := object())
        for is_ready in (True, False):
            changed = engine("b", b.url, is_ready=is_ready, api_key="k")
            source.say(engine("a", a.url, api_key="k"), changed)
        await until(lambda: state(proxy, "b") is EngineState.DRAINING)
        old.leases.discard(request)
        await until(lambda: proxy.fleet.engine("b").adapter.spec.api_key == "k")
        await until(lambda: proxy.fleet.engine("b").info is not None)
        assert state(proxy, "b") is EngineState.DRAINING
