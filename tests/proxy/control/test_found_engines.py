"""Engines that are found join, drain and leave under load, and a source that fails keeps its engines."""

import asyncio
import contextlib
import json
from functools import partial

import httpx
import pytest

from engine_adapter import EngineSpecError, HttpTransport
from proxy.control import reconciler
from proxy.core.audit import Trust
from proxy.fleet import discovery
from proxy.fleet.discovery import FoundEngine, SourceError
from proxy.fleet.engine import EngineState
from proxy.server.app import Proxy, build_app
from proxy.settings import EngineSettings, HealthSettings, Settings
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.vllm import running_vllm
from tests.fakes import FakeEngine, is_tokenised, serving
from tests.kv_world import until

QUICK_CHECKS = HealthSettings(interval_s=0.05)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(discovery, "PAUSE_S", 0.01)
    monkeypatch.setattr(discovery, "WATCH_PAUSE_S", 0.01)
    monkeypatch.setattr(reconciler, "FIRST_BACKOFF_S", 0.01)


@contextlib.asynccontextmanager
async def running(**settings):
    """A proxy that was told to use these."""
    proxy = Proxy(Settings(**settings), HttpTransport())
    proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


@contextlib.asynccontextmanager
async def served(proxy):
    """A client of the proxy."""
    async with serving(build_app(proxy)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


@contextlib.asynccontextmanager
async def loaded(client):
    """Requests all the time; gives the statuses of what was answered."""
    statuses, over = [], asyncio.Event()

    async def send():
        while not over.is_set():
            statuses.append((await client.post("/v1/chat/completions", json=CHAT)).status_code)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(send())
        try:
            yield statuses
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


def found(engine_id, url, *, is_ready=True, **more):
    return FoundEngine(EngineSettings(kind="openai_compatible", url=url, id=engine_id, **more), is_ready)


async def test_engines_of_a_file_come_and_go_under_load(tmp_path):
    path = tmp_path / "engines.json"

    def write(*servers):
        engines = [{"kind": "openai_compatible", "url": each.url, "id": each.id} for each in servers]
        (tmp_path / "new").write_text(json.dumps({"engines": engines}))
        (tmp_path / "new").replace(path)

    def is_there(*ids):
        return [(each, state(proxy, each)) for each in sorted(proxy.fleet.engines)] == [
            (each, EngineState.READY) for each in sorted(ids)
        ]

    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        write(a)
        async with running(engines_file=path) as proxy, served(proxy) as client:
            await until(proxy.fleet.is_ready, 60)
            async with loaded(client) as statuses:
                for servers in ([a, b], [b], [b, c], [c, a], [a]):
                    write(*servers)
                    await until(lambda servers=servers: is_there(*(each.id for each in servers)), 60)
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


async def test_a_source_that_fails_or_names_what_cannot_be_used_keeps_its_engines(tmp_path, engine):
    one, other = Scripted(), Scripted()
    async with running(engines_file=tmp_path / "none.toml") as proxy:

        def are(*names):
            return set(proxy.fleet.engines) == set(names)

        follow, sources = partial(proxy.engines.follow, grace_s=60), proxy.engines.sources
        static = EngineSettings(kind="openai_compatible", url=engine.url, id="s")
        follow([static], [("one", one), ("other", other)])
        one.say(found("a", engine.url, headers={"x-to": "a"}), found("s", "http://127.0.0.1:1"))
        other.say(found("a", "http://127.0.0.1:1"), found("b", engine.url, headers={"x-to": "b"}))
        await until(lambda: sources["one"].error is None and sources["other"].error is None)
        urls = {each.id: each.adapter.spec.url for each in proxy.fleet.engines.values()}
        assert urls == dict.fromkeys(("s", "a", "b"), engine.url)  # who names it first is believed
        one.say("the source is away")
        await until(lambda: sources["one"].error == "the source is away")
        one.say(found("c", "https://127.0.0.1:1", ca=str(tmp_path / "no.pem")))
        await until(lambda: "ca: " in (sources["one"].error or ""))
        assert are("s", "a", "b")
        assert [each.entry.id for each in sources["one"].found] == ["a", "s"]
        bad = EngineSettings(kind="openai_compatible", url="https://127.0.0.1:1", ca=str(tmp_path / "no.pem"))
        with pytest.raises(EngineSpecError, match="ca: "):
            follow([bad], [("other", other)])
        assert list(sources) == ["one", "other"]  # the first one is still believed
        mine = proxy.engines.add(found("mine", engine.url, headers={"x-to": "mine"}).entry)
        follow([static], [("one", one)])  # the other is gone
        await until(lambda: are("s", "a", "mine"))
        again = Scripted()
        follow([static], [("one", again)])  # its settings have changed
        assert are("s", "a", "mine")
        again.say(found("mine", engine.url, headers={"x-to": "found"}))
        await until(lambda: are("s", "mine"))
        assert proxy.engines._waiting  # the admin API's engine is not touched
        follow([static.model_copy(update={"id": "mine"})], [("one", again)])
        assert (proxy.fleet.engines["mine"], proxy.engines._waiting) == (mine, {"mine"})
        await proxy.engines.remove(mine)
        await until(lambda: not proxy.engines._waiting and "mine" in proxy.fleet.engines)


def followed(proxy):
    """The ready engines whose events are followed."""
    ready = (each for each in proxy.fleet.engines.values() if each.state is EngineState.READY)
    return {each.id for each in ready if each.audit.trust is Trust.PRECISE}


async def complete(client, first):
    body = {"model": "tiny", "prompt": list(range(first, first + 80)), "max_tokens": 2}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvpin-engine"], int(answer.headers["x-kvpin-predicted-tokens"])


@pytest.mark.parametrize(
    ("kind", "server_of", "size"),
    [("vllm", running_vllm, "block_size"), ("sglang", running_sglang, "page_size")],
    ids=["vllm", "sglang"],
)
async def test_one_address_becomes_an_engine_for_each_rank(kind, server_of, size):
    ids = ["e-dp0", "e-dp1", "e-dp2"]
    with server_of(ranks=3, **{size: 16}) as server:
        told = {"engines": (EngineSettings(kind=kind, id="e", url=server.url),), "health": QUICK_CHECKS}
        async with running(reuse=True, **told) as proxy, served(proxy) as client:
            await until(lambda: sorted(followed(proxy)) == sorted(proxy.fleet.engines) == ids, 60)
            await until(lambda: is_tokenised(proxy), 60)
            answered = []
            for first in (100, 300, 500, 100, 300, 500):
                answered.append(await complete(client, first))
                held = 5 * len({engine for engine, _ in answered})
                engines = proxy.fleet.engines.values()
                await until(
                    lambda held=held, engines=engines: sum(e.view.counts.stored for e in engines) >= held, 60
                )
            homes = [engine for engine, _ in answered]
            assert sorted(homes[:3]) == ids
            assert homes[3:] == homes[:3]
            assert [predicted for _, predicted in answered] == [0] * 3 + [64] * 3
            asked = [rank for rank, body in server.fake.seen if body.get("max_tokens") == 2]
            assert [f"e-dp{rank}" for rank in asked] == homes
