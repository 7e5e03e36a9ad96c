"""The engines of the settings join, change and leave; requests in flight end where they began."""

import asyncio
import contextlib
import time

import pytest
import structlog

from engine_adapter import EngineSpec, EngineSpecError, HttpTransport
from engine_adapter.openai_compatible import OpenAICompatibleAdapter
from proxy.fleet.engine import EngineState, order_name
from proxy.fleet.process import managed_engine
from proxy.server.app import Proxy
from proxy.settings import EngineSettings, ManagedSettings, Settings, StartedSettings
from tests.fakes import FakeEngine
from tests.kv_world import until

NOWHERE = "http://127.0.0.1:1"


def named(engine_id, url, **more):
    return EngineSettings(kind="openai_compatible", url=url, id=engine_id, **more)


@contextlib.asynccontextmanager
async def running(*engines):
    """A proxy with these engines, all ready."""
    proxy = Proxy(Settings(engines=engines), HttpTransport())
    proxy.configured.follow(engines, grace_s=60)
    await until(lambda: all(e.state is EngineState.READY for e in proxy.fleet.engines.values()))
    try:
        yield proxy
    finally:
        await proxy.stop()


async def test_an_engine_that_is_no_longer_named_leaves_after_its_requests_and_after_others_were_tried():
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old = proxy.fleet.engine("a")
        old.leases.add(request := object())
        changes = proxy.configured.follow([named("b", server.url)], grace_s=60)
        assert ([e.id for e in changes.added], changes.removed) == (["b"], ("a",))
        assert old.state is EngineState.READY
        await until(lambda: old.state is EngineState.DRAINING)
        assert proxy.fleet.engine("b").state is EngineState.READY
        assert "a" in proxy.fleet.engines
        old.leases.discard(request)
        await until(lambda: list(proxy.fleet.engines) == ["b"])


async def test_an_engine_with_other_settings_is_connected_anew_once_its_requests_have_ended():
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old = proxy.fleet.engine("a")
        old.leases.add(request := object())
        changes = proxy.configured.follow([named("a", server.url, api_key="k")], grace_s=60)
        assert [entry.id for entry in changes.changed] == ["a"]
        new = proxy.fleet.engine("a")
        assert (new is not old, new.state) == (True, EngineState.CONNECTING)
        assert proxy.fleet.pool("m").is_coming_back  # requests wait for it
        old.leases.discard(request)
        await until(lambda: new.state is EngineState.READY)
        assert new.adapter.spec.api_key == "k"


async def test_one_engine_that_cannot_be_used_leaves_all_as_they_are(tmp_path):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        bad = named("c", "https://127.0.0.1:1", ca=str(tmp_path / "none"))
        with pytest.raises(EngineSpecError, match="engine 'c': ca: "):
            proxy.configured.follow([named("b", server.url), bad], grace_s=60)
        assert list(proxy.fleet.engines) == ["a"]
        assert proxy.configured.follow([named("a", server.url)], grace_s=60).removed == ()


async def test_a_process_ends_with_its_engine():
    proxy = Proxy(Settings(engines=(named("a", NOWHERE),)), HttpTransport())
    started = ManagedSettings(kind="openai_compatible", id="p", command="sh -c 'sleep 100 # {port}'")
    try:
        proxy.configured.follow([started], grace_s=60)
        process = proxy.configured.processes["p"]
        await until(lambda: process.status.pid is not None)
        proxy.configured.follow([], grace_s=0.1)
        await until(lambda: process.status.state == "stopped" and process.status.pid is None)
        assert (list(proxy.fleet.engines), proxy.configured.processes) == ([], {})
    finally:
        await proxy.stop()


async def test_engines_of_one_model_get_other_settings_one_after_the_other():
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        running(named("a", a.url), named("b", b.url)) as proxy,
    ):
        old_a, old_b = proxy.fleet.engine("a"), proxy.fleet.engine("b")
        old_a.leases.add(request := object())
        proxy.configured.follow([named("a", a.url, api_key="k"), named("b", b.url, api_key="k")], grace_s=60)
        assert proxy.fleet.engine("a") is not old_a
        await asyncio.sleep(0.2)
        assert proxy.fleet.pool("m").ready() == [old_b]
        old_a.leases.discard(request)
        await until(lambda: proxy.fleet.engine("b") is not old_b)
        assert proxy.fleet.engine("a").state is EngineState.READY
        await until(lambda: proxy.fleet.engine("b").state is EngineState.READY)
        assert proxy.fleet.engine("b").adapter.spec.api_key == "k"


async def test_an_engine_that_waits_for_its_turn_takes_the_newest_settings():
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        running(named("a", a.url), named("b", b.url)) as proxy,
    ):
        old_a, old_b = proxy.fleet.engine("a"), proxy.fleet.engine("b")
        old_a.leases.add(request := object())
        for key in ("first", "second"):
            entries = [named("a", a.url, api_key="k"), named("b", b.url, api_key=key)]
            proxy.configured.follow(entries, grace_s=60)
        old_a.leases.discard(request)
        await until(lambda: proxy.fleet.engine("b") is not old_b)
        assert proxy.fleet.engine("b").adapter.spec.api_key == "second"
        await until(lambda: proxy.fleet.engine("b").state is EngineState.READY)


async def test_an_engine_that_the_supervisor_starts_is_known_as_one():
    async with FakeEngine("a") as server, FakeEngine("b") as other:
        started = StartedSettings(kind="openai_compatible", url=server.url, id="a")
        async with running(started, named("b", other.url)) as proxy:
            assert [engine.has_supervisor for engine in proxy.fleet.engines.values()] == [True, False]


async def test_an_engine_that_leaves_takes_no_namesake_along_that_joined_meanwhile():
    async with (
        FakeEngine("a") as first,
        FakeEngine("a2") as second,
        running(named("a", first.url)) as proxy,
    ):
        old = proxy.fleet.engine("a")
        old.leases.add(request := object())
        proxy.configured.follow([], grace_s=60)
        await until(lambda: old.state is EngineState.DRAINING)
        await proxy.engines.remove(old)
        namesake = proxy.engines.add(EngineSpec("openai_compatible", second.url, "a"))
        await until(lambda: namesake.state is EngineState.READY)
        with structlog.testing.capture_logs() as logs:
            old.leases.discard(request)
            await until(lambda: not any(name.startswith("leave") for name in proxy.tasks._tasks))
        assert proxy.fleet.engines == {"a": namesake}
        assert proxy.fleet.pool_of(namesake) is not None
        assert [each for each in logs if each["log_level"] == "error"] == []


async def test_an_engine_that_leaves_stops_no_process_of_a_namesake():
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old = proxy.fleet.engine("a")
        old.leases.add(request := object())
        proxy.configured.follow([], grace_s=60)
        await until(lambda: old.state is EngineState.DRAINING)
        await proxy.engines.remove(old)
        started = ManagedSettings(kind="openai_compatible", id="a", command="sh -c 'sleep 100 # {port}'")
        proxy.configured.follow([started], grace_s=60)
        process = proxy.configured.processes["a"]
        old.leases.discard(request)
        await until(lambda: not any(name.startswith("leave") for name in proxy.tasks._tasks))
        assert (proxy.configured.processes, proxy.fleet.engine("a").process) == ({"a": process}, process)


async def test_an_engine_that_the_admin_api_removed_may_change_or_leave_the_settings():
    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        entries = [named("a", a.url), named("b", b.url), named("c", c.url)]
        async with running(*entries) as proxy:
            for engine in list(proxy.fleet.engines.values()):
                await proxy.engines.remove(engine)
            proxy.configured.follow([named("a", a.url, api_key="k"), entries[1]], grace_s=60)
            # Other settings let it join again; the same do not.
            assert list(proxy.fleet.engines) == ["a"]
            assert proxy.fleet.engine("a").adapter.spec.api_key == "k"
            await proxy.engines.remove(proxy.fleet.engine("a"))
            namesake = proxy.engines.add(EngineSpec("openai_compatible", a.url, "a"))
            proxy.configured.follow([], grace_s=60)
            await asyncio.sleep(0.1)
            assert proxy.fleet.engines == {"a": namesake}
            changes = proxy.configured.follow([named("a", a.url, api_key="l")], grace_s=60)
            assert (changes.added, [each.id for each in changes.waiting]) == ((), ["a"])
            assert proxy.fleet.engines == {"a": namesake}


async def test_other_settings_replace_an_engine_that_the_admin_api_added_under_the_same_id():
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        await proxy.engines.remove(proxy.fleet.engine("a"))
        namesake = proxy.engines.add(EngineSpec("openai_compatible", server.url, "a"))
        proxy.configured.follow([named("a", server.url)], grace_s=60)
        assert proxy.fleet.engine("a") is namesake  # the settings are what they were
        proxy.configured.follow([named("a", server.url, api_key="k")], grace_s=60)
        engine = proxy.fleet.engine("a")
        await until(lambda: engine.state is EngineState.READY)
        assert engine.adapter.spec.api_key == "k"
        proxy.configured.follow([], grace_s=60)
        await until(lambda: not proxy.fleet.engines)


async def test_a_managed_engine_that_was_drained_is_drained_on_its_next_port(monkeypatch):
    mine = ManagedSettings(kind="openai_compatible", id="mine", command="sleep 60 {port}")
    marks = []
    for port in (49_152, 49_153):
        monkeypatch.setattr(managed_engine, "_free_port", lambda port=port: port)
        proxy = Proxy(Settings(), HttpTransport())
        proxy.fleet.book.merge(marks, now=time.time())  # as those of a state_dir
        proxy.configured.follow([mine], grace_s=0)
        engine = proxy.fleet.engine("mine")
        assert (engine.state is EngineState.DRAINING) == bool(marks)
        if not marks:
            proxy.fleet.book.drain(order_name(engine.adapter.spec), drained=True, now=time.time())
        marks = proxy.fleet.book.marks()
        await proxy.stop()


async def test_a_managed_engine_on_the_port_of_one_that_was_drained_is_not_drained(monkeypatch):
    monkeypatch.setattr(managed_engine, "_free_port", lambda: 49_152)
    mine = ManagedSettings(kind="openai_compatible", id="mine", command="sleep 60 {port}")
    proxy = Proxy(Settings(), HttpTransport())
    before = EngineSettings(kind="openai_compatible", id="other", url="http://127.0.0.1:49152")
    proxy.fleet.book.drain(order_name(before.spec()), drained=True, now=time.time() + 60)
    proxy.configured.follow([mine], grace_s=0)
    assert not proxy.fleet.is_drained(proxy.fleet.engine("mine"))
    await proxy.stop()


@pytest.fixture
def one_adapter(monkeypatch):
    """Engines take one kvpin at a time, as a llama-server does."""
    monkeypatch.setattr(OpenAICompatibleAdapter, "one_owner", True)


async def test_a_server_under_another_name_is_connected_once_the_old_one_has_left(one_adapter):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old = proxy.fleet.engine("a")
        old.leases.add(request := object())
        with structlog.testing.capture_logs() as logs:
            proxy.configured.follow([named("b", server.url)], grace_s=60)
        (line,) = logs
        assert line["event"].startswith("engine waits: its server is still in use under another name")
        new = proxy.fleet.engine("b")
        await until(lambda: old.state is EngineState.DRAINING)
        await asyncio.sleep(0.2)
        assert (new.state, new.info) == (EngineState.CONNECTING, None)
        assert proxy.fleet.pool("m").is_coming_back  # requests wait for it
        old.leases.discard(request)
        await until(lambda: new.state is EngineState.READY)
        assert proxy.fleet.engines == {"b": new}
        assert list(proxy.fleet.pool("m").engines) == ["b"]


async def test_one_that_never_connected_leaves_its_server_to_another_name_without_a_word(one_adapter):
    """As the engine that stands for all models of a router."""
    proxy = Proxy(Settings(), HttpTransport())
    proxy.configured.follow([named("a", NOWHERE)], grace_s=60)
    with structlog.testing.capture_logs() as logs:
        proxy.configured.follow([named("b", NOWHERE)], grace_s=60)
        await until(lambda: list(proxy.fleet.engines) == ["b"])
    assert not [line for line in logs if line["event"].startswith("engine waits")]
    await proxy.stop()


async def test_a_server_under_another_name_is_connected_once_the_old_one_has_saved(one_adapter, monkeypatch):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old, is_saved = proxy.fleet.engine("a"), asyncio.Event()
        aclose = old.adapter.aclose

        async def slow_aclose():
            await is_saved.wait()
            await aclose()

        monkeypatch.setattr(old.adapter, "aclose", slow_aclose)
        proxy.configured.follow([named("b", server.url)], grace_s=60)
        new = proxy.fleet.engine("b")
        await until(lambda: not proxy.fleet.has(old))
        await asyncio.sleep(0.5)
        assert (new.state, new.info) == (EngineState.CONNECTING, None)
        assert proxy.fleet.pool("m").is_coming_back  # requests wait for it
        is_saved.set()
        await until(lambda: new.state is EngineState.READY)


async def test_a_server_that_was_removed_is_connected_again_once_the_old_adapter_has_saved(
    one_adapter, monkeypatch
):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old, is_saved = proxy.fleet.engine("a"), asyncio.Event()
        monkeypatch.setattr(old.adapter, "aclose", is_saved.wait)
        removal = asyncio.create_task(proxy.orders.remove(old))
        await until(lambda: not proxy.fleet.has(old))
        new = proxy.orders.add(named("b", server.url)) or proxy.fleet.engine("a")
        await asyncio.sleep(0.5)
        assert (new.state, new.info) == (EngineState.CONNECTING, None)
        is_saved.set()
        await removal
        await until(lambda: new.state is EngineState.READY)


@pytest.mark.parametrize("settings", [{"api_key": "k"}, None], ids=["replaced", "left"])
async def test_an_engine_that_fails_to_close_holds_up_nothing(one_adapter, monkeypatch, settings):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old, gone = proxy.fleet.engine("a"), []
        proxy.configured.left.append(gone.append)

        async def broken():
            raise OSError("the disk is full")

        monkeypatch.setattr(old.adapter, "aclose", broken)
        entries = [named("a", server.url, **settings)] if settings else []
        proxy.configured.follow(entries, grace_s=60)
        if settings:
            new = proxy.fleet.engine("a")
        else:
            await until(lambda: gone == [old])
            new = proxy.engines.add(EngineSpec("openai_compatible", server.url, "b"))
        await until(lambda: new.state is EngineState.READY)
        assert new is not old


async def test_servers_that_swap_their_names_are_each_used_by_one_adapter(one_adapter):
    async with (
        FakeEngine("a") as one,
        FakeEngine("b") as two,
        running(named("a", one.url), named("b", two.url)) as proxy,
    ):
        old = proxy.fleet.engine("b")
        old.leases.add(request := object())
        proxy.configured.follow([named("a", two.url), named("b", one.url)], grace_s=60)
        await until(lambda: not proxy.fleet.has(old))  # `a` waits for its server: it is not waited for
        await asyncio.sleep(0.2)
        assert [proxy.fleet.engine(name).info for name in "ab"] == [None, None]
        old.leases.discard(request)
        await until(lambda: all(proxy.fleet.engine(name).state is EngineState.READY for name in "ab"))
        assert [proxy.fleet.engine(name).adapter.spec.url for name in "ab"] == [two.url, one.url]


async def test_a_new_name_that_is_taken_back_leaves_the_engine_as_it_was(one_adapter):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old = proxy.fleet.engine("a")
        old.leases.add(object())
        for name in "ba":
            proxy.configured.follow([named(name, server.url)], grace_s=60)
        await until(lambda: proxy.fleet.engines == {"a": old} and old.state is EngineState.READY)


@pytest.mark.parametrize("settings", [{"api_key": "k"}, None], ids=["replaced", "removed"])
async def test_a_stop_lets_an_adapter_that_leaves_save_and_connects_no_other(
    one_adapter, monkeypatch, settings
):
    async with FakeEngine("a") as server, running(named("a", server.url)) as proxy:
        old, saved = proxy.fleet.engine("a"), []
        aclose = old.adapter.aclose

        async def slow_aclose():
            await asyncio.sleep(0.3)
            saved.append(old.id)
            await aclose()

        monkeypatch.setattr(old.adapter, "aclose", slow_aclose)
        if settings:
            proxy.configured.follow([named("a", server.url, **settings)], grace_s=60)
        else:
            proxy.configured.follow([], grace_s=60)
            await until(lambda: not proxy.fleet.has(old))
            proxy.engines.add(EngineSpec("openai_compatible", server.url, "a"))
        new = proxy.fleet.engine("a")
        await asyncio.sleep(0.1)
        await proxy.stop()
        assert saved == ["a"]
        assert (new.state, new.info, proxy.tasks._tasks) == (EngineState.CONNECTING, None, {})
