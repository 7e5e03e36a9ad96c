"""Engines join, change and leave; requests in flight end where they began; operators' orders are followed."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from engine_adapter import EngineSpecError, HttpTransport
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from proxy import runtime
from proxy.control.engines import place_of
from proxy.errors import Conflict, NoEngine
from proxy.fleet import managed_engine
from proxy.fleet.engine import EngineState, order_name
from proxy.fleet.managed_engine import ManagedEngine
from proxy.server.app import Proxy
from proxy.settings import EngineSettings, ManagedSettings, Settings, StartedSettings, engine_as_json
from tests.fakes import INFO, FakeEngine
from tests.kv_world import until

NOWHERE = "http://127.0.0.1:1"


def named(engine_id, url, **more):
    """An engine; one without an id has none of the settings."""
    name = {"id": engine_id} if engine_id else {}
    return EngineSettings(kind="openai_compatible", url=url, **name, **more)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runtime, "_POLL_S", 0.005)


@contextlib.asynccontextmanager
async def running(*engines):
    """A proxy with these engines, all ready."""
    proxy = Proxy(Settings(engines=engines), HttpTransport())
    proxy.engines.follow(engines, grace_s=60)
    await until(lambda: all(e.state is EngineState.READY for e in proxy.fleet.engines.values()))
    try:
        yield proxy
    finally:
        await proxy.stop()


@pytest.fixture
async def proxy(engine):
    """A proxy whose only engine, "a", is ready."""
    async with running(named("a", engine.url)) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def started(*engines, **settings):
    if not engines:
        settings.setdefault("engines_file", Path("/none.toml"))  # else kvpin would start some
    proxy = Proxy(Settings(engines=engines, **settings), HttpTransport())
    proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def ids(proxy):
    return list(proxy.fleet.engines)


def state(proxy, engine_id):
    engine = proxy.fleet.engines.get(engine_id)
    return engine and engine.state


def tell(proxy, *others):
    """What one kvpin knows, the others hear."""
    for other in others:
        other.fleet.book.merge(proxy.fleet.book.marks(), now=time.time())


async def test_an_engine_that_is_no_longer_named_leaves_after_its_requests_and_after_others_were_tried(
    engine, proxy
):
    old = proxy.fleet.engine("a")
    old.leases.add(request := object())
    changes = proxy.engines.follow([named("b", engine.url)], grace_s=60)
    assert ([e.id for e in changes.added], changes.removed) == (["b"], ("a",))
    assert old.state is EngineState.READY
    await until(lambda: old.state is EngineState.DRAINING)
    assert state(proxy, "b") is EngineState.READY
    assert "a" in proxy.fleet.engines
    old.leases.discard(request)
    await until(lambda: ids(proxy) == ["b"])


async def test_a_changed_engine_is_used_until_its_requests_have_ended_and_then_connected_anew(
    engine, other, proxy
):
    """The supervisor of the workers asks who uses it: then it ends the old process."""
    old = proxy.fleet.engine("a")
    old.leases.add(request := object())
    changes = proxy.engines.follow([named("a", other.url, api_key="k")], grace_s=60)
    assert [entry.id for entry in changes.changed] == ["a"]
    new = proxy.fleet.engine("a")
    assert (new is not old, new.state) == (True, EngineState.CONNECTING)
    assert proxy.fleet.pool("m").is_coming_back  # requests wait for it
    assert await proxy.engines.told_uses(engine.url.encode())
    old.leases.discard(request)
    await until(lambda: new.state is EngineState.READY)
    assert new.adapter.spec.api_key == "k"
    assert await proxy.engines.told_uses(engine.url.encode()) == b""
    assert await proxy.engines.told_uses(other.url.encode())


async def test_one_engine_that_cannot_be_used_leaves_all_as_they_are(engine, proxy, tmp_path, monkeypatch):
    closed = []

    async def aclose(adapter):
        closed.append((adapter.spec.id, adapter.spec.api_key))

    monkeypatch.setattr(OpenAICompatibleAdapter, "aclose", aclose)
    bad = named("c", "https://127.0.0.1:1", ca=str(tmp_path / "none"))
    with pytest.raises(EngineSpecError, match="engine 'c': ca: "):
        proxy.engines.follow([named("b", engine.url), named("a", engine.url, api_key="k"), bad], grace_s=60)
    assert ids(proxy) == ["a"]
    await until(lambda: closed == [("b", None), ("a", "k")])
    assert proxy.engines.follow([named("a", engine.url)], grace_s=60).removed == ()


async def test_another_engine_at_a_routers_address_says_nothing_of_its_models(engine, proxy):
    proxy.engines._parts.learn(engine.url, ("m", "n"))
    assert not proxy.engines.split(proxy.fleet.engine("a"), INFO)
    assert engine.url in proxy.engines._parts


async def test_a_process_ends_with_its_engine():
    proxy = Proxy(Settings(engines=(named("a", NOWHERE),)), HttpTransport())
    started = ManagedSettings(kind="openai_compatible", id="p", command="sh -c 'sleep 100 # {port}'")
    try:
        proxy.engines.follow([started], grace_s=60)
        process = proxy.fleet.engine("p").process
        await until(lambda: process.pid is not None)
        proxy.engines.follow([], grace_s=0.1)
        await until(lambda: process.state == "stopped" and process.pid is None)
        assert (list(proxy.fleet.engines), proxy.engines.processes) == ([], [])
    finally:
        await proxy.stop()


@pytest.mark.parametrize("then", ["changed", "unnamed"])
async def test_a_process_starts_once_those_that_had_its_id_have_ended(monkeypatch, then):
    stop, may_end = ManagedEngine.stop, asyncio.Event()

    async def slow_stop(process):
        await may_end.wait()
        await stop(process)

    monkeypatch.setattr(ManagedEngine, "stop", slow_stop)
    first, second, third = (
        ManagedSettings(kind="openai_compatible", id="p", command=f"sh -c 'sleep 10{n} # {{port}}'")
        for n in range(3)
    )
    async with started() as proxy:
        proxy.engines.follow([first], grace_s=60)
        old = proxy.fleet.engine("p")
        await until(lambda: old.process.pid is not None)
        proxy.engines.follow([second] if then == "changed" else [], grace_s=60)
        await until(lambda: not proxy.fleet.has(old))
        proxy.engines.follow([third], grace_s=60)
        await asyncio.sleep(0.2)
        running = [each for each in proxy.engines.processes if each.pid is not None]
        may_end.set()
        assert running == [old.process]
        await until(lambda: (new := proxy.fleet.engine("p").process) is not None and new.pid is not None)
        assert old.process.pid is None


async def test_others_of_its_model_serve_while_a_process_waits_for_the_one_before_it(
    engine, other, monkeypatch
):
    monkeypatch.setattr(managed_engine, "_free_port", lambda: other.port)
    async with running(named("b", engine.url)) as proxy:
        old_b = proxy.fleet.engine("b")

        def follow(number, **more):
            command = f"sh -c 'sleep 10{number} # {{port}}'"
            mine = ManagedSettings(kind="openai_compatible", id="p", command=command)
            proxy.engines.follow([mine, named("b", engine.url, **more)], grace_s=60)

        follow(0)
        await until(lambda: state(proxy, "p") is EngineState.READY)
        old = proxy.fleet.engine("p")
        old.leases.add(request := object())
        follow(1)
        follow(2, api_key="k")
        await asyncio.sleep(0.1)
        assert proxy.fleet.engine("b") is old_b
        old.leases.discard(request)
        await until(lambda: proxy.fleet.engine("b") is not old_b)
        assert state(proxy, "p") is EngineState.READY


async def test_engines_of_one_model_get_the_newest_settings_one_after_the_other(engine, other):
    async with running(named("a", engine.url), named("b", other.url)) as proxy:
        old_a, old_b = proxy.fleet.engines.values()
        old_a.leases.add(request := object())
        for key in ("first", "second"):
            entries = [named("a", engine.url, api_key="k"), named("b", other.url, api_key=key)]
            proxy.engines.follow(entries, grace_s=60)
        assert proxy.fleet.engine("a") is not old_a
        await asyncio.sleep(0.1)
        assert proxy.fleet.pool("m").ready() == [old_b]
        old_a.leases.discard(request)
        await until(lambda: proxy.fleet.engine("b") is not old_b)
        assert state(proxy, "a") is EngineState.READY
        assert proxy.fleet.engine("b").adapter.spec.api_key == "second"
        await until(lambda: state(proxy, "b") is EngineState.READY)


async def test_a_managed_engine_that_was_drained_is_drained_on_its_next_port_and_no_other_is(monkeypatch):
    mine = ManagedSettings(kind="openai_compatible", id="mine", command="sleep 60 {port}")
    before = EngineSettings(kind="openai_compatible", id="other", url="http://127.0.0.1:49152")
    marks = []
    for port in (49_152, 49_153):
        monkeypatch.setattr(managed_engine, "_free_port", lambda port=port: port)
        proxy = Proxy(Settings(), HttpTransport())
        proxy.fleet.book.drain(order_name(before.spec()), drained=True, now=time.time() + 60)
        proxy.fleet.book.merge(marks, now=time.time())  # as those of a state_dir
        proxy.engines.follow([mine], grace_s=0)
        engine = proxy.fleet.engine("mine")
        assert (engine.state is EngineState.DRAINING) == proxy.fleet.is_drained(engine) == bool(marks)
        if not marks:
            proxy.fleet.book.drain(order_name(engine.adapter.spec), drained=True, now=time.time())
        marks = proxy.fleet.book.marks()
        await proxy.stop()


@pytest.fixture
def one_adapter(monkeypatch):
    """Engines take one kvpin at a time, as a llama-server does."""
    monkeypatch.setattr(OpenAICompatibleAdapter, "one_owner", True)


async def test_a_server_under_another_name_is_connected_once_the_old_one_has_left_and_saved(
    one_adapter, engine, proxy, monkeypatch
):
    old, is_saved = proxy.fleet.engine("a"), asyncio.Event()
    aclose = old.adapter.aclose

    async def slow_aclose():
        await is_saved.wait()
        await aclose()

    monkeypatch.setattr(old.adapter, "aclose", slow_aclose)
    old.leases.add(request := object())
    with capture_logs() as logs:
        proxy.engines.follow([named("b", engine.url)], grace_s=60)
    (line,) = logs
    assert line["event"].startswith("engine waits: its server is still in use under another name")
    new = proxy.fleet.engine("b")

    async def check_that_it_waits():
        await asyncio.sleep(0.1)
        assert (new.state, new.info) == (EngineState.CONNECTING, None)
        assert proxy.fleet.pool("m").is_coming_back  # requests wait for it

    await until(lambda: old.state is EngineState.DRAINING)
    await check_that_it_waits()
    old.leases.discard(request)
    await until(lambda: not proxy.fleet.has(old))
    await check_that_it_waits()
    is_saved.set()
    await until(lambda: new.state is EngineState.READY)
    assert proxy.fleet.engines == {"b": new}
    assert list(proxy.fleet.pool("m").engines) == ["b"]


@pytest.mark.parametrize("settings", [{"api_key": "k"}, None], ids=["replaced", "left"])
async def test_an_engine_that_fails_to_close_holds_up_nothing(
    one_adapter, engine, proxy, monkeypatch, settings
):
    old = proxy.fleet.engine("a")
    monkeypatch.setattr(old.adapter, "aclose", AsyncMock(side_effect=OSError("the disk is full")))
    proxy.engines.follow([named("a", engine.url, **settings)] if settings else [], grace_s=60)
    if settings:
        new = proxy.fleet.engine("a")
    else:
        await until(lambda: not proxy.fleet.engines)
        new = proxy.engines.add(named("b", engine.url))
    await until(lambda: new.state is EngineState.READY)
    assert new is not old


async def test_a_new_name_that_is_taken_back_leaves_the_engine_as_it_was(one_adapter, engine, proxy):
    old = proxy.fleet.engine("a")
    old.leases.add(object())
    for name in "ba":
        proxy.engines.follow([named(name, engine.url)], grace_s=60)
    await until(lambda: proxy.fleet.engines == {"a": old} and old.state is EngineState.READY)


@pytest.mark.parametrize("settings", [{"api_key": "k"}, None], ids=["replaced", "removed"])
async def test_a_stop_lets_an_adapter_that_leaves_save_and_connects_no_other(
    one_adapter, engine, proxy, monkeypatch, settings
):
    old, saved = proxy.fleet.engine("a"), []
    aclose = old.adapter.aclose

    closing, may_save = asyncio.Event(), asyncio.Event()

    async def slow_aclose():
        closing.set()
        await may_save.wait()
        saved.append(old.id)
        await aclose()

    monkeypatch.setattr(old.adapter, "aclose", slow_aclose)
    proxy.engines.follow([named("a", engine.url, **settings)] if settings else [], grace_s=60)
    if not settings:
        await until(lambda: not proxy.fleet.has(old))
        proxy.engines.add(named("a", engine.url))
    new = proxy.fleet.engine("a")
    await closing.wait()
    stopping = asyncio.create_task(proxy.stop())
    await asyncio.sleep(0.02)
    may_save.set()
    await stopping
    assert saved == ["a"]
    assert (new.state, new.info, proxy.tasks._tasks) == (EngineState.CONNECTING, None, {})


async def test_an_engine_kvpin_runs_is_not_removed(world, pair):
    a, b = (world.engines[name] for name in "ab")
    a.process = ManagedEngine(ManagedSettings(kind="embedded", id="a"))
    b.starting_file = Path("/not/there")
    world.proxy.engines.follow((), grace_s=60)
    for engine in (a, b):
        with pytest.raises(Conflict, match="itself"):
            await world.proxy.engines.remove(engine)
        world.fleet.book.remove(order_name(engine.adapter.spec), now=1.0)
    await asyncio.sleep(0.05)
    assert ids(world) == ["a", "b"]


async def test_an_engine_added_at_one_kvpin_joins_the_others_and_leaves_with_it(engine):
    async with started() as one, started() as two:
        added = one.engines.add(named("", engine.url, headers={"x-to": "a"}))
        assert added.id == "openai_compatible-0"
        tell(one, two)
        await until(lambda: state(two, added.id) is EngineState.READY)
        assert two.fleet.engine(added.id).adapter.spec == added.adapter.spec
        for undo, then in ((False, EngineState.DRAINING), (True, EngineState.SUSPECT)):
            one.engines.drain(added, undo=undo)
            tell(one, two)
            assert state(two, added.id) is then
        await one.engines.remove(added)
        tell(one, two)
        await until(lambda: not ids(two))
        assert [(each.engine, each.named) for each in two.engines.removed()] == [
            (place_of(order_name(added.adapter.spec)), False)
        ]
        one.engines.add(named("again", engine.url))
        tell(one, two)
        await until(lambda: state(two, "again") is EngineState.READY)


async def test_orders_outlive_a_restart(tmp_path):
    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        engines, state_dir = [named("a", a.url), named("b", b.url)], tmp_path / "state"
        async with started(*engines, state_dir=state_dir) as proxy:
            proxy.engines.add(named("c", c.url, api_key="secret"))
            await proxy.engines.remove(proxy.fleet.engine("b"))
        async with started(*engines, state_dir=state_dir) as proxy:
            assert ids(proxy) == ["a", "c"]
            assert proxy.fleet.engine("c").adapter.spec.api_key == "secret"
            (removed,) = proxy.engines.removed()
            said = f"{b.url} on {socket.gethostname()}, the machine of its kvpin"
            assert (removed.engine, removed.named) == (said, True)
            assert removed.undo == f"kvpin engines add openai_compatible={b.url}"
            with capture_logs() as logs:
                proxy.reload(proxy.settings)
            told = [each for each in logs if each["log_level"] == "warning"]
            assert [(each["engine"], each["undo"]) for each in told] == [("b", removed.undo)]
            assert ids(proxy) == ["a", "c"]
            back = proxy.engines.add(named("other", b.url))
            assert (back.id, proxy.engines.removed()) == ("b", [])
        async with started(*engines, state_dir=state_dir) as proxy:
            assert ids(proxy) == ["a", "b", "c"]


async def test_removed_engines_are_listed_while_that_may_matter():
    entry = named("a", "http://127.0.0.1:1", model="m", headers={"x-key": "secret"})
    ranked = EngineSettings(kind="vllm", id="b", url="http://gpu:8000", dp_rank=1)
    async with started(entry, ranked) as proxy:
        book, now = proxy.fleet.book, time.time()
        book.remove("http://long-ago", now=now - 90_000)
        book.remove("http://today", now=now - 80_000)
        for age_s, each in enumerate((entry, ranked)):
            book.remove(order_name(each.spec()), now=now - 100_000 - age_s)
        assert [(each.named, each.undo) for each in proxy.engines.removed()] == [
            (False, "kvpin engines add KIND=URL"),
            (True, "kvpin engines add openai_compatible=http://127.0.0.1:1,model=m,headers=…"),
            (True, "kvpin engines add vllm=http://gpu:8000,dp_rank=1"),
        ]


async def test_engines_stay_until_one_that_waits_for_its_id_was_tried(engine, other):
    def reload(entry):
        proxy.reload(proxy.settings.model_copy(update={"engines": (entry,)}))

    async with FakeEngine("c") as third, started(named("a", engine.url)) as proxy:
        old = proxy.fleet.engine("a")
        await until(lambda: old.state is EngineState.READY)
        old.leases.add(request := object())
        reload(named("b", other.url))
        await until(
            lambda: (state(proxy, "a"), state(proxy, "b")) == (EngineState.DRAINING, EngineState.READY)
        )
        reload(named("a", third.url))  # a request holds the id: without b, all others would fail
        await asyncio.sleep(0.1)
        assert state(proxy, "b") is EngineState.READY
        old.leases.discard(request)
        await until(lambda: ids(proxy) == ["a"])
        assert (state(proxy, "a"), proxy.fleet.engine("a").adapter.spec.url) == (EngineState.READY, third.url)


async def test_an_engine_stays_while_the_supervisor_starts_the_one_that_comes_in_its_place(
    other, proxy, tmp_path
):
    await other.stop()
    file = tmp_path / "starting"
    file.touch()
    own = {"kind": "openai_compatible", "url": other.url, "id": "b", "starting_file": file}
    proxy.engines.follow([StartedSettings(**own)], grace_s=60)
    await until(lambda: proxy.fleet.engine("b").last_error is not None)
    await asyncio.sleep(0.1)
    assert (state(proxy, "a"), state(proxy, "b")) == (EngineState.READY, EngineState.CONNECTING)
    with pytest.raises(NoEngine, match="engine 'b' is still connecting"):
        proxy.fleet.find("the-model-of-b")  # not what a takes in its place
    file.unlink()  # it has ended
    proxy.fleet.engine("b").check_now.set()
    await until(lambda: ids(proxy) == ["b"])
    assert state(proxy, "b") is EngineState.DOWN


async def test_an_engine_without_an_id_is_no_newcomer_while_the_one_that_had_its_number_leaves(engine, other):
    def reload(*urls):
        engines = Settings(engines=[named("", url) for url in urls]).engines
        return proxy.reload(proxy.settings.model_copy(update={"engines": engines}))

    async with started(named("", "http://127.0.0.1:9"), named("", engine.url)) as proxy:
        old, kept = (proxy.fleet.engine(f"openai_compatible-{number}") for number in (0, 1))
        await until(lambda: kept.state is EngineState.READY)
        old.leases.add(request := object())
        for _ in range(2):  # the settings number it 0 now, and 0 still leaves
            reload(engine.url)
        # The other one is the first that has no number of its own: it waits.
        assert reload(engine.url, other.url).added == ()
        assert proxy.fleet.engine(kept.id) is kept
        old.leases.discard(request)
        await until(lambda: sorted(ids(proxy)) == [old.id, kept.id] and not proxy.fleet.has(old))
        assert proxy.fleet.has(kept)


async def test_an_engine_that_is_removed_and_added_again_at_once_stays(proxy):
    engine, book = proxy.fleet.engine("a"), proxy.fleet.book
    name = order_name(engine.adapter.spec)
    book.remove(name, now=1.0)
    book.readmit(name, now=2.0)
    await asyncio.sleep(0.05)
    assert proxy.fleet.engines == {"a": engine}


async def test_an_added_engine_that_does_not_fit_here_is_told_without_its_key(tmp_path):
    async with started(named("a", "http://127.0.0.1:1")) as proxy:
        book = proxy.fleet.book
        with capture_logs() as logs:
            other = named("a", "http://127.0.0.1:2")
            book.add(order_name(other.spec()), engine_as_json(other), now=1.0)
            no_ca = named("c", "https://127.0.0.1:3", ca=str(tmp_path / "none.pem"))
            book.add(order_name(no_ca.spec()), engine_as_json(no_ca), now=1.0)
            book.add("x", b'{"kind": "vllm", "api_key": "secret"}', now=1.0)
            elsewhere = named("e", "http://127.0.0.1:4")
            book.add("host9 http://127.0.0.1:4", engine_as_json(elsewhere), now=1.0)
            await asyncio.sleep(0.01)
        assert ids(proxy) == ["a"]
        told = sorted(each["error"] for each in logs if "cannot be used here" in each["event"])
        assert (told[0], told[2]) == ("an engine with id 'a' exists", "its settings cannot be read")
        assert "none.pem" in told[1]
        assert "secret" not in str(logs)
