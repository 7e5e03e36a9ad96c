"""Operators' orders about engines: given here, at another kvpin, or before the start."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine_adapter import HttpTransport
from proxy.errors import Conflict
from proxy.fleet.engine import DrainReason, EngineState, order_name, place_of
from proxy.fleet.process.managed_engine import ManagedEngine
from proxy.server.app import Proxy
from proxy.settings import EngineSettings, ManagedSettings, Settings, engine_as_json
from tests.fakes import FakeEngine
from tests.kv_world import KvFake, until
from tests.proxy.control.test_discovered import Scripted, state
from tests.proxy.control.test_discovered import engine as found


def named(engine_id, url, **more):
    return EngineSettings(
        kind="openai_compatible", url=url, **({"id": engine_id} if engine_id else {}), **more
    )


@asynccontextmanager
async def running(*engines, **settings):
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


def tell(proxy, *others):
    """What one kvpin knows, the others hear."""
    for other in others:
        other.fleet.book.merge(proxy.fleet.book.marks(), now=time.time())


async def test_a_drain_outlasts_its_engine_and_its_source(world, pair):
    def state():
        return world.fleet.engine("a").state

    world.orders.start()
    engine = world.orders.drain(world.fleet.engine("a"), undo=False)
    world.engine_set.drain(
        engine, DrainReason.NOT_READY, undo=True
    )  # as a source does when its engine is ready again
    assert state() is EngineState.DRAINING
    world.fleet.replace(engine, engine.adapter)  # as new settings do
    assert state() is EngineState.DRAINING
    world.orders.drain(world.fleet.engine("a"), undo=True)
    assert state() is EngineState.DOWN  # until it has connected


async def test_an_engine_that_comes_back_is_still_drained_but_not_one_that_was_removed(world, pair):
    engine = world.orders.drain(world.fleet.engine("a"), undo=False)
    await world.engine_set.remove(engine)  # as a source does whose engine is gone
    engine = world.fleet.add(KvFake("a"))
    assert engine.state is EngineState.DRAINING
    await world.orders.remove(engine)
    assert world.fleet.add(KvFake("a")).state is EngineState.CONNECTING


async def test_drains_ordered_at_other_kvpins_are_followed(world, pair):
    world.orders.start()
    name = order_name(world.engines["a"].adapter.spec)
    for drained, then in ((True, EngineState.DRAINING), (False, EngineState.SUSPECT)):
        world.fleet.book.drain(name, drained=drained, now=1.0)
        assert world.engines["a"].state is then


async def test_an_engine_kvpin_runs_is_not_removed(world, pair):
    a, b = (world.engines[name] for name in "ab")
    a.process, b.has_supervisor = ManagedEngine(ManagedSettings(kind="embedded", id="a")), True
    world.orders.start()
    for engine in (a, b):
        with pytest.raises(Conflict, match="itself"):
            await world.orders.remove(engine)
        world.fleet.book.remove(order_name(engine.adapter.spec), now=1.0)
    await asyncio.sleep(0.05)
    assert ids(world) == ["a", "b"]


async def test_an_engine_added_at_one_kvpin_joins_the_others_and_leaves_with_it():
    async with FakeEngine("a") as server, running() as one, running() as two:
        added = one.orders.add(named("", server.url, headers={"x-to": "a"}))
        assert added.id == "openai_compatible-0"
        tell(one, two)
        await until(lambda: two.fleet.engine(added.id).state is EngineState.READY)
        assert two.fleet.engine(added.id).adapter.spec == added.adapter.spec
        one.orders.drain(added, undo=False)
        tell(one, two)
        await one.orders.remove(added)
        tell(one, two)
        await until(lambda: not ids(two))
        assert [(each.engine, each.named) for each in two.orders.removed()] == [
            (place_of(order_name(added.adapter.spec)), False)
        ]
        one.orders.add(named("again", server.url))
        tell(one, two)
        await until(lambda: two.fleet.engine("again").state is EngineState.READY)


async def test_other_settings_of_an_added_engine_reach_a_kvpin_that_missed_its_removal():
    async with FakeEngine("a") as server, running() as one, running() as two:
        added = one.orders.add(named("a", server.url, api_key="old"))
        tell(one, two)
        await one.orders.remove(added)
        one.orders.add(named("a", server.url, api_key="new"))
        tell(one, two)
        await until(lambda: [each.adapter.spec.api_key for each in two.fleet.engines.values()] == ["new"])
        engine = two.fleet.engine("a")
        one.orders.drain(one.fleet.engine("a"), undo=False)
        tell(one, two)
        assert two.fleet.engines == {"a": engine}
        assert engine.state is EngineState.DRAINING


async def test_a_configured_engine_that_was_drained_removed_and_added_elsewhere_serves_again():
    async with FakeEngine("a") as server:
        entry = named("a", server.url)
        async with running(entry) as one, running(entry) as two, running(entry) as late:
            await until(lambda: two.fleet.engine("a").state is EngineState.READY)
            one.orders.drain(one.fleet.engine("a"), undo=False)
            tell(one, two, late)
            assert two.fleet.engine("a").state is EngineState.DRAINING
            await one.orders.remove(one.fleet.engine("a"))
            tell(one, two)
            await until(lambda: not ids(two))
            one.orders.add(entry)
            tell(one, two, late)
            await until(lambda: {*map(tuple, map(ids, (one, two, late)))} == {("a",)})
            for each in (one, two, late):
                await until(lambda each=each: each.fleet.engine("a").state is EngineState.READY)


async def test_orders_outlive_a_restart(tmp_path):
    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        engines, state_dir = [named("a", a.url), named("b", b.url)], tmp_path / "state"
        async with running(*engines, state_dir=state_dir) as proxy:
            proxy.orders.add(named("c", c.url, api_key="secret"))
            await proxy.orders.remove(proxy.fleet.engine("b"))
        async with running(*engines, state_dir=state_dir) as proxy:
            assert ids(proxy) == ["a", "c"]
            assert proxy.fleet.engine("c").adapter.spec.api_key == "secret"
            (removed,) = proxy.orders.removed()
            said = f"{b.url} on {socket.gethostname()}, the machine of its kvpin"
            assert (removed.engine, removed.named) == (said, True)
            assert removed.undo == f"kvpin engines add openai_compatible={b.url}"
            proxy.reload(proxy.settings)
            assert ids(proxy) == ["a", "c"]
            back = proxy.orders.add(named("other", b.url))
            assert (back.id, proxy.orders.removed()) == ("b", [])
        async with running(*engines, state_dir=state_dir) as proxy:
            assert ids(proxy) == ["a", "b", "c"]


async def test_removed_engines_are_listed_while_that_may_matter():
    entry = named("a", "http://127.0.0.1:1", model="m", headers={"x-key": "secret"})
    ranked = EngineSettings(kind="vllm", id="b", url="http://gpu:8000", dp_rank=1)
    async with running(entry, ranked) as proxy:
        book, now = proxy.fleet.book, time.time()
        book.remove("http://long-ago", now=now - 90_000)
        book.remove("http://today", now=now - 80_000)
        for age_s, each in enumerate((entry, ranked)):
            book.remove(order_name(each.spec()), now=now - 100_000 - age_s)
        assert [(each.named, each.undo) for each in proxy.orders.removed()] == [
            (False, "kvpin engines add KIND=URL"),
            (True, "kvpin engines add openai_compatible=http://127.0.0.1:1,model=m,headers=…"),
            (True, "kvpin engines add vllm=http://gpu:8000,dp_rank=1"),
        ]


async def test_settings_that_name_an_added_engine_count_from_the_next_start(tmp_path):
    state_dir = tmp_path / "state"
    async with FakeEngine("a") as server:
        async with running(state_dir=state_dir) as proxy:
            added = proxy.orders.add(named("mine", server.url))
            entry = named("theirs", server.url)
            proxy.reload(proxy.settings.model_copy(update={"engines": (entry,)}))
            assert proxy.fleet.engines == {"mine": added}
        async with running(entry, state_dir=state_dir) as proxy:
            assert ids(proxy) == ["theirs"]
            proxy.reload(proxy.settings)
            assert ids(proxy) == ["theirs"]


@pytest.mark.parametrize("key", [None, "another"])
async def test_an_added_engine_stays_when_the_settings_no_longer_name_it(tmp_path, key):
    async with FakeEngine("a") as server, FakeEngine("b") as other:
        async with running(state_dir=tmp_path / "state") as proxy:
            proxy.orders.add(named("mine", server.url))
        entries = named("theirs", server.url, api_key=key), named("b", other.url)
        async with running(*entries, state_dir=tmp_path / "state") as proxy:
            engine = proxy.fleet.engine("theirs")
            proxy.reload(proxy.settings.model_copy(update={"engines": entries[1:]}))
            if key is None:  # as the operator has ordered it, but for its name
                assert engine.state is not EngineState.DRAINING
                await asyncio.sleep(0.3)
                assert sorted(ids(proxy)) == ["b", "theirs"]
                assert proxy.fleet.engine("theirs") is engine
            else:
                await until(lambda: sorted(ids(proxy)) == ["b", "mine"])
                assert proxy.fleet.engine("mine").adapter.spec.api_key is None


async def test_an_id_that_is_taken_keeps_a_removed_engine_out():
    async with FakeEngine("a") as a, FakeEngine("b") as b, running(named("a", a.url)) as proxy:
        await proxy.orders.remove(proxy.fleet.engine("a"))
        proxy.orders.add(named("a", b.url))
        with pytest.raises(Conflict, match="under an id that is taken: it joins when that is free"):
            proxy.orders.add(named("other", a.url))
        assert proxy.fleet.engine("a").adapter.spec.url == b.url
        await proxy.orders.remove(proxy.fleet.engine("a"))
        await until(lambda: "a" in ids(proxy) and proxy.fleet.engine("a").adapter.spec.url == a.url)


async def test_settings_may_name_an_id_that_an_added_engine_has():
    async with (
        FakeEngine("a") as server,
        FakeEngine("b") as other,
        running(named("a", server.url, headers={"x-team": "old"})) as proxy,
    ):
        await proxy.orders.remove(proxy.fleet.engine("a"))
        added = proxy.orders.add(named("a", server.url))
        changed = named("a", server.url, headers={"x-team": "new"})
        engines = (changed, named("b", other.url))
        proxy.reload(proxy.settings.model_copy(update={"engines": engines}))
        assert proxy.fleet.engine("a") is added  # what an operator added stays
        assert ids(proxy) == ["a", "b"]  # and holds up nothing
        await proxy.orders.remove(added)
        await until(lambda: sorted(ids(proxy)) == ["a", "b"])
        assert proxy.fleet.engine("a").adapter.spec.headers == {"x-team": "new"}


async def test_settings_may_name_an_engine_again_while_it_leaves():
    entries = [named("a", "http://127.0.0.1:9"), named("b", "http://127.0.0.1:19")]
    async with running(*entries) as proxy:
        old, before = proxy.fleet.engine("a"), proxy.settings
        old.leases.add(request := object())
        proxy.reload(before.model_copy(update={"engines": tuple(entries[1:])}))
        await until(lambda: old.state is EngineState.DRAINING)
        changed = (named("a", "http://127.0.0.1:9", api_key="k"), entries[1])
        proxy.reload(before.model_copy(update={"engines": changed}))
        assert proxy.fleet.engine("a") is old
        old.leases.discard(request)
        await until(lambda: sorted(ids(proxy)) == ["a", "b"] and proxy.fleet.engine("a") is not old)


async def test_engines_stay_until_one_that_waits_for_its_id_was_tried():
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        FakeEngine("c") as c,
        running(named("a", a.url)) as proxy,
    ):

        def reload(entry):
            proxy.reload(proxy.settings.model_copy(update={"engines": (entry,)}))

        old = proxy.fleet.engine("a")
        await until(lambda: old.state is EngineState.READY)
        old.leases.add(request := object())
        reload(named("b", b.url))
        await until(
            lambda: (state(proxy, "a"), state(proxy, "b")) == (EngineState.DRAINING, EngineState.READY)
        )
        reload(named("a", c.url))  # a request holds the id: without b, all others would fail
        await asyncio.sleep(0.2)
        assert state(proxy, "b") is EngineState.READY
        old.leases.discard(request)
        await until(lambda: ids(proxy) == ["a"])
        assert (state(proxy, "a"), proxy.fleet.engine("a").adapter.spec.url) == (EngineState.READY, c.url)


async def test_an_engine_that_is_named_again_as_it_was_while_it_leaves_stays():
    """An operator takes back wrong settings: requests would wait until the last one of before has ended."""
    async with FakeEngine("a") as a, running(named("a", a.url)) as proxy:
        old, before = proxy.fleet.engine("a"), proxy.settings
        await until(lambda: old.state is EngineState.READY)
        old.leases.add(request := object())
        proxy.reload(before.model_copy(update={"engines": (named("b", "http://127.0.0.1:9"),)}))
        await until(lambda: old.state is EngineState.DRAINING)
        proxy.reload(before)
        await until(lambda: old.state is EngineState.READY)
        old.leases.discard(request)
        await until(lambda: ids(proxy) == ["a"])
        await asyncio.sleep(0.2)
        assert proxy.fleet.engines == {"a": old}


async def test_an_engine_without_an_id_is_no_newcomer_while_the_one_that_had_its_number_leaves():
    async with (
        FakeEngine("b") as b,
        FakeEngine("c") as c,
        running(named("", "http://127.0.0.1:9"), named("", b.url)) as proxy,
    ):

        def reload(*urls):
            engines = Settings(engines=[named("", url) for url in urls]).engines
            return proxy.reload(proxy.settings.model_copy(update={"engines": engines}))

        old, kept = (proxy.fleet.engine(f"openai_compatible-{number}") for number in (0, 1))
        await until(lambda: kept.state is EngineState.READY)
        old.leases.add(request := object())
        for _ in range(2):  # the settings number it 0 now, and 0 still leaves
            reload(b.url)
        assert reload(b.url, c.url).added == ()  # c is the first that has no number of its own: it waits
        assert proxy.configured.engine(kept.id) is kept
        old.leases.discard(request)
        await until(lambda: sorted(ids(proxy)) == [old.id, kept.id] and not proxy.fleet.has(old))
        assert proxy.fleet.has(kept)


async def test_an_entry_that_waits_for_its_turn_joins_although_its_old_engine_is_removed():
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        FakeEngine("c") as c,
        running(named("a", a.url), named("b", b.url)) as proxy,
    ):
        old = [proxy.fleet.engine(name) for name in "ab"]
        await until(lambda: all(each.state is EngineState.READY for each in old))
        old[0].leases.add(request := object())
        engines = (named("a", a.url, api_key="k"), named("b", c.url))
        proxy.reload(proxy.settings.model_copy(update={"engines": engines}))
        await proxy.orders.remove(old[1])
        await until(lambda: state(proxy, "b") is EngineState.READY)
        assert proxy.fleet.engine("b").adapter.spec.url == c.url
        old[0].leases.discard(request)
        await until(lambda: state(proxy, "a") is EngineState.READY)


async def test_an_engine_that_is_removed_and_added_again_at_once_stays():
    async with FakeEngine("a") as a, running(named("a", a.url)) as proxy:
        engine, book = proxy.fleet.engine("a"), proxy.fleet.book
        await until(lambda: engine.state is EngineState.READY)
        name = order_name(engine.adapter.spec)
        book.remove(name, now=1.0)
        book.readmit(name, now=2.0)
        await asyncio.sleep(0.1)
        assert proxy.fleet.engines == {"a": engine}


async def test_an_engine_that_an_operator_adds_again_still_drains_if_its_source_says_so(tmp_path):
    source = Scripted()
    async with FakeEngine("a") as a, running(engines_file=tmp_path / "none.toml") as proxy:
        proxy.discovered.follow([], [("one", source)], grace_s=60)
        source.say(found("a", a.url))
        await until(lambda: state(proxy, "a") is EngineState.READY)
        source.say(found("a", a.url, is_ready=False))
        await until(lambda: state(proxy, "a") is EngineState.DRAINING)
        old = proxy.fleet.engine("a")
        await proxy.orders.remove(old)
        await until(lambda: proxy.configured.entry("a") is None)
        proxy.orders.add(named("a", a.url))
        await until(lambda: proxy.fleet.engine("a").info is not None)
        assert proxy.fleet.engine("a") is not old
        assert state(proxy, "a") is EngineState.DRAINING
        source.say(found("a", a.url))
        await until(lambda: state(proxy, "a") is EngineState.READY)


async def test_a_removed_engine_comes_back_after_its_source_has_forgotten_it(tmp_path):
    source = Scripted()
    async with FakeEngine("a") as a, running(engines_file=tmp_path / "none.toml") as proxy:
        proxy.discovered.follow([], [("one", source)], grace_s=60)
        source.say(found("a", a.url))
        await until(lambda: ids(proxy) == ["a"])
        await proxy.orders.remove(proxy.fleet.engine("a"))
        source.say(found("a", a.url, is_ready=False))
        source.say(found("a", a.url))
        await until(source.said.empty)
        assert (ids(proxy), len(proxy.orders.removed())) == ([], 1)
        source.say()
        source.say(found("a", a.url))
        await until(lambda: ids(proxy) == ["a"])


async def test_an_added_engine_that_does_not_fit_here_is_told_without_its_key(tmp_path):
    async with running(named("a", "http://127.0.0.1:1")) as proxy:
        book = proxy.fleet.book
        with capture_logs() as logs:
            other = named("a", "http://127.0.0.1:2")
            book.add(order_name(other.spec()), engine_as_json(other), now=1.0)
            no_ca = named("c", "https://127.0.0.1:3", ca=str(tmp_path / "none.pem"))
            book.add(order_name(no_ca.spec()), engine_as_json(no_ca), now=1.0)
            book.add("x", b'{"kind": "vllm", "api_key": "secret"}', now=1.0)
            elsewhere = named("e", "http://127.0.0.1:4")
            book.add("host9 http://127.0.0.1:4", engine_as_json(elsewhere), now=1.0)
        assert ids(proxy) == ["a"]
        told = [each["error"] for each in logs if "cannot be used here" in each["event"]]
        assert "exists" in told[0]
        assert "none.pem" in told[1]
        assert told[2:] == ["its settings cannot be read"]
        assert "secret" not in str(logs)
