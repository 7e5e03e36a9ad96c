"""Engines that are found join, drain and leave under load, and a source that fails keeps its engines."""

import asyncio
import contextlib
import json

import httpx
import pytest
import trustme

from engine_adapter import EngineSpec, HttpTransport
from proxy.control import discovered
from proxy.fleet.discovery import FoundEngine, SourceError, engines_file, kubernetes
from proxy.fleet.discovery.kubernetes import KubernetesFinder
from proxy.fleet.engine import EngineState
from proxy.server.app import Proxy, build_app
from proxy.settings import DiscoverySettings, EngineSettings, Settings
from tests import kubernetes_api
from tests.fakes import FakeEngine, serving
from tests.kv_world import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engines_file, "PAUSE_S", 0.01)
    monkeypatch.setattr(kubernetes, "PAUSE_S", 0.01)
    monkeypatch.setattr(discovered, "FIRST_BACKOFF_S", 0.01)


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
                source = proxy.discovered.sources[str(path)]
                await until(lambda: source.error is not None and "is not JSON" in source.error, 60)
                assert set(proxy.fleet.engines) == {"a"}
                listed = (await client.get("/admin/v1/engines")).json()["sources"]
                assert listed == [{"source": str(path), "engines": ["a"], "error": source.error}]
                assert b'kvpin_source_answers{source="%s"} 0.0' % str(path).encode() in proxy.metrics.render()
                write(a)
                await until(lambda: source.error is None, 60)
            assert set(statuses) == {200}
            assert all(each.seen for each in (a, b, c))


async def test_a_pod_that_is_not_ready_drains_and_one_that_is_gone_leaves_under_load(tmp_path):
    async with (
        kubernetes_api.kubernetes(tmp_path, trustme.CA()) as (api, cluster),
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        running(engines_file=tmp_path / "none.toml") as proxy,
    ):
        settings = DiscoverySettings(source="kubernetes://llm/vllm", kind="openai_compatible")
        finder = KubernetesFinder(settings, settings.place, cluster)

        def put(name, server, *, ready=True):
            api.put(f"slice-{name}", (name, "127.0.0.1", ready), port=server.port)

        put("a", a)
        put("b", b, ready=False)
        proxy.discovered.follow([], [(settings.source, finder)], grace_s=60)
        await until(lambda: state(proxy, "a.llm") is EngineState.READY, 60)
        assert state(proxy, "b.llm") is None  # it starts
        async with loaded(proxy) as (_, statuses):
            put("b", b)
            await until(lambda: state(proxy, "b.llm") is EngineState.READY, 60)
            source = proxy.discovered.sources[settings.source]
            api.bookmark()
            api.status = 503
            api.fail(500, "broken")  # the watch ends, and the server is gone: its engines stay
            await until(lambda: source.error is not None, 60)
            (tmp_path / "token").write_text("rotated")
            count = len(statuses)
            await until(lambda: len(statuses) > count + 20, 60)
            assert state(proxy, "a.llm") is state(proxy, "b.llm") is EngineState.READY
            api.status = 0
            await until(lambda: source.error is None, 60)
            assert api.tokens[-1] == "Bearer rotated"
            put("a", a, ready=False)
            await until(lambda: state(proxy, "a.llm") is EngineState.DRAINING, 60)
            put("a", a)
            await until(lambda: state(proxy, "a.llm") is EngineState.READY, 60)
            put("b", b, ready=False)
            await until(lambda: state(proxy, "b.llm") is EngineState.DRAINING, 60)
            old = proxy.fleet.engine("b.llm")
            old.leases.add(request := object())
            api.delete("slice-b")
            api.fail(410, "expired")
            await until(lambda: proxy.configured.entry("b.llm") is None, 60)
            put("b", b)  # it is back before its last request has ended: it joins after that
            await until(lambda: proxy.discovered._waits, 60)
            assert proxy.fleet.engine("b.llm") is old
            old.leases.discard(request)
            await until(lambda: state(proxy, "b.llm") is EngineState.READY, 60)
            assert proxy.fleet.engine("b.llm") is not old
        assert set(statuses) == {200}


async def test_a_source_that_fails_or_names_what_cannot_be_used_keeps_its_engines(tmp_path):
    one, other = Scripted(), Scripted()
    async with FakeEngine("a") as a, running(engines_file=tmp_path / "none.toml") as proxy:
        found, sources = proxy.discovered, proxy.discovered.sources
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
        proxy.engines.add(EngineSpec("openai_compatible", a.url, "mine", headers={"x-to": "mine"}))
        found.follow([static], [("one", one)], grace_s=60)  # the other is gone
        await until(lambda: set(proxy.fleet.engines) == {"s", "a", "mine"})
        again = Scripted()
        found.follow([static], [("one", again)], grace_s=60)  # its settings have changed
        assert set(proxy.fleet.engines) == {"s", "a", "mine"}
        again.say(engine("mine", a.url, headers={"x-to": "found"}))
        await until(lambda: set(proxy.fleet.engines) == {"s", "mine"})
        assert found._waits  # the admin API's engine is not touched
        with pytest.raises(Exception, match="'mine' exists"):
            found.follow([static.model_copy(update={"id": "mine"})], [], grace_s=60)
        assert list(sources) == ["one"]


async def test_an_engine_that_is_found_where_another_is_named_counts_once(tmp_path):
    path = tmp_path / "engines.json"
    async with FakeEngine("a") as a, FakeEngine("b") as b:
        found = [{"kind": "openai_compatible", "url": each.url, "id": f"found-{each.id}"} for each in (a, b)]
        path.write_text(json.dumps({"engines": found}))
        named = {"kind": "openai_compatible", "url": a.url.replace("127.0.0.1", "localhost"), "id": "a"}
        async with running(engines=[named], engines_file=path) as proxy:
            await until(lambda: set(proxy.fleet.engines) == {"a", "found-b"}, 60)
            assert len(proxy.discovered.sources[str(path)].found) == 2


async def test_an_engine_that_the_admin_api_removed_may_stop_being_ready_at_its_source(tmp_path):
    source = Scripted()
    async with FakeEngine("a") as a, running(engines_file=tmp_path / "none.toml") as proxy:
        proxy.discovered.follow([], [("one", source)], grace_s=60)
        source.say(engine("a", a.url))
        await until(lambda: state(proxy, "a") is EngineState.READY)
        await proxy.engines.remove(proxy.fleet.engine("a"))
        source.say(engine("a", a.url, is_ready=False))
        await until(lambda: not proxy.discovered.sources["one"].found[0].is_ready)
        namesake = proxy.engines.add(EngineSpec("openai_compatible", a.url, "a"))
        await until(lambda: namesake.state is EngineState.READY)
        source.say()
        await until(lambda: not proxy.discovered.sources["one"].found)
        assert proxy.fleet.engines == {"a": namesake}
        assert namesake.state is EngineState.READY
