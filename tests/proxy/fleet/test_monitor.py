import asyncio
from array import array
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import structlog

from engine_adapter import (
    Capability,
    EngineLoad,
    EngineRejected,
    EngineUnavailable,
    EngineUnhealthy,
    Finding,
    ModelState,
    PromptTable,
    Role,
    Tier,
)
from engine_adapter.vllm.kv_transfer import NixlPull
from proxy.core.audit import Trust
from proxy.fleet import monitor as monitor_module
from proxy.fleet.engine import FALSE_DOUBTS, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.monitor import FAILURES, Monitor
from proxy.prompt import Prompt, RegisteredTables
from proxy.runtime import Supervisor
from tests.fakes import INFO, FakeAdapter
from tests.kv_world import until

INTERVAL_S = 0.02


class World:
    def __init__(self, *, reuse=True, interval_s=INTERVAL_S, timeout_s=1.0, isolated=False):
        self.tasks, self.fleet = Supervisor(), Fleet()
        self.ingest = Ingest(self.fleet, self.tasks) if reuse else None
        self.tables = RegisteredTables(max_bytes=1 << 20)
        times = {"interval_s": interval_s, "timeout_s": timeout_s}
        self.monitor = Monitor(self.fleet, self.tasks, self.ingest, self.tables, isolated=isolated, **times)

    def add(self, engine_id="a", adapter=None, **info):
        adapter = adapter or FakeAdapter(engine_id, info=replace(INFO, **info))
        engine = self.fleet.add(adapter)
        self.monitor.watch(engine)
        return engine, adapter

    async def ready(self, engine_id="a", adapter=None, **info):
        """An engine that has connected."""
        engine, adapter = self.add(engine_id, adapter, **info)
        await self.state(engine, EngineState.READY)
        return engine, adapter

    async def state(self, engine, state):
        await until(lambda: engine.state is state)


@pytest.fixture
async def start(virtual_time):
    """Starts a proxy's watch over engines."""
    worlds = []
    yield lambda **options: worlds.append(World(**options)) or worlds[-1]
    for world in worlds:
        await world.tasks.stop()


@pytest.fixture
def world(start):
    return start()


class TestIsolation:
    """With several tenants, an engine that cannot keep their KV apart is used only where it may share it."""

    @pytest.fixture
    def world(self, start):
        return start(isolated=True)

    async def test_such_an_engine_is_not_used_and_the_log_names_the_setting(self, world):
        with structlog.testing.capture_logs() as logs:
            engine, _ = world.add()
            await world.state(engine, EngineState.REFUSED)
        events = [line["event"] for line in logs]
        assert "engine is not used" in events
        assert "engine is ready" not in events
        assert "share_kv=true" in engine.last_error
        assert any(event.startswith("no engine is used: there are several tenants") for event in events)
        assert world.fleet.pools["m"].ready() == []
        assert not world.fleet.is_ready()
        told = world.fleet.none_ready(world.fleet.pools["m"], None)
        assert "tenants would share their KV" in str(told)
        assert "try again" not in str(told)
        assert told.headers == {}, "no retry-after: an operator has to act"

    async def test_it_is_used_once_it_can(self, world):
        """As a vLLM whose trial of salts is settled later than it joined."""
        able, _ = await world.ready("b", capabilities=frozenset({Capability.CACHE_SALT}))
        engine, adapter = world.add(adapter=ChangingAdapter("a", info=INFO))
        await world.state(engine, EngineState.REFUSED)
        assert world.fleet.pools["m"].ready() == [able]
        adapter.info = replace(INFO, capabilities=frozenset({Capability.CACHE_SALT}))
        adapter.outdated = True
        await world.state(engine, EngineState.READY)


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (EngineUnavailable("connection refused"), "engine is not reachable; kvpin keeps trying"),
        (EngineRejected("it wants a key", status=401), "engine refuses kvpin; kvpin keeps trying"),
    ],
    ids=["unreachable", "refuses"],
)
async def test_one_that_is_down_at_start_is_named_once_in_the_log(world, error, event):
    adapter = FakeAdapter("a")
    adapter.failures = [error] * 3
    with structlog.testing.capture_logs() as logs:
        engine, _ = world.add(adapter=adapter)
        await world.state(engine, EngineState.DOWN)
        assert engine.refuses is isinstance(error, EngineRejected)
        await world.state(engine, EngineState.READY)
    (entry,) = [entry for entry in logs if "keeps trying" in entry["event"]]
    assert (entry["event"], entry["log_level"]) == (event, "warning")
    assert (entry["engine"], entry["url"], entry["error"]) == ("a", adapter.spec.url, str(error))


@pytest.mark.parametrize("state", [EngineState.READY, EngineState.DRAINING])
async def test_another_reason_why_it_is_away_is_named_once(world, state):
    engine, adapter = await world.ready()
    engine.state = state
    refused, wants_key = EngineUnavailable("connection refused"), EngineRejected("it wants a key", status=401)
    adapter.failures = [refused] * 3 + [wants_key] * 3
    with structlog.testing.capture_logs() as logs:
        await until(lambda: not adapter.failures and world.fleet.pool_of(engine) is not None)
    assert [(entry["event"], entry["error"]) for entry in logs if "error" in entry] == [
        ("engine is lost", "connection refused"),
        ("engine refuses kvpin; kvpin keeps trying", "it wants a key"),
    ]


async def test_one_that_fails_a_check_leaves_with_all_that_was_known_and_comes_back(world):
    engine, adapter = await world.ready()
    pool = world.fleet.pools["m"]
    pool.learn(engine, (1, 2))
    engine.audit.synced()
    adapter.failures = [EngineUnavailable("gone")] * 2
    await world.state(engine, EngineState.DOWN)
    assert (len(pool.index), len(engine.learned), pool.ready()) == (0, 0, [])
    assert engine.last_error == "gone"
    assert engine.audit.trust is Trust.APPROXIMATE
    await world.state(engine, EngineState.READY)
    assert world.fleet.pools["m"] is pool
    assert engine.last_error is None


async def test_an_engine_that_says_later_that_it_passes_kv_does(world):
    """A vLLM that was busy when kvpin first asked."""
    engine, adapter = await world.ready()
    pool = world.fleet.pool_of(engine)
    assert (pool.passes_kv, pool.has_roles) == (False, False)
    adapter.transfer = NixlPull(30.0)
    adapter.info = replace(adapter.info, role=Role.DECODE)
    engine.suspect(EngineUnavailable("it did not answer"))
    await world.state(engine, EngineState.READY)
    assert pool.passes_kv
    assert pool.has_roles


async def test_an_engine_whose_model_failed_to_load_is_not_ready_until_it_is_loaded(world, monkeypatch):
    state = ModelState.UNLOADED
    monkeypatch.setattr(FakeAdapter, "model_state", property(lambda _adapter: state))
    engine, adapter = await world.ready()
    pool = world.fleet.pools["m"]
    state = ModelState.FAILED
    await world.state(engine, EngineState.SUSPECT)
    assert (pool.ready(), engine.last_error) == ([], "its model failed to load")
    checks = adapter.checks
    await until(lambda: adapter.checks > checks + 4)
    assert engine.state is EngineState.SUSPECT
    assert [each.engine for each in pool.candidates(None)] == ["a"]  # a request tries it again
    state = ModelState.LOADED
    await world.state(engine, EngineState.READY)


PASSING = [EngineUnhealthy("503"), EngineRejected("broken", status=500), TimeoutError()]


@pytest.mark.parametrize("error", PASSING, ids=repr)
async def test_failed_checks_are_repeated_before_the_engine_is_lost(world, error):
    engine, adapter = await world.ready()
    pool = world.fleet.pools["m"]
    pool.learn(engine, (1, 2))
    with structlog.testing.capture_logs() as logs, pool.lease(pool.place(pool.candidates(None), None), None):
        for _ in range(2):
            adapter.failures = [error] * 2
            await world.state(engine, EngineState.SUSPECT)
            await world.state(engine, EngineState.READY)
        assert not any(lease.is_lost for lease in engine.leases)
        assert pool.index.held("a", Tier.GPU) == 2
        assert [log["event"] for log in logs] == ["a health check failed: checking again"] * 2
        adapter.failures = [error] * 3
        await world.state(engine, EngineState.DOWN)
        assert all(lease.is_lost for lease in engine.leases)
    assert len(pool.index) == 0


async def test_requests_that_fail_meanwhile_do_not_hasten_the_loss(start, virtual_time):
    world = start(interval_s=0.2)
    engine, adapter = await world.ready()
    adapter.failures = [EngineUnhealthy("503")] * 2
    begun, checks = virtual_time.now, adapter.checks
    while adapter.checks < checks + 3:
        engine.suspect(EngineUnavailable("reset"))
        await asyncio.sleep(0.01)
    assert virtual_time.now - begun > 0.39


async def test_engines_are_not_lost_because_kvpin_was_held_up(start, virtual_time):
    """The first answer comes in time, while kvpin is paused for longer than a check may take."""
    world = start(timeout_s=0.2)
    engine, adapter = await world.ready()
    load = adapter.load

    async def load_during_a_pause():
        adapter.load = load
        asyncio.get_running_loop().call_soon(virtual_time.pause, 1.0)
        await asyncio.sleep(0.01)
        return await load()

    adapter.load = load_during_a_pause
    with structlog.testing.capture_logs() as logs:
        await until(lambda: adapter.checks > 4)
    assert engine.state is EngineState.READY
    assert logs == []


async def test_one_that_does_not_answer_in_time_is_down(start):
    world = start(timeout_s=0.03)
    engine, adapter = await world.ready()
    pool, lost = world.fleet.pools["m"], []
    with pool.lease(pool.place(pool.candidates(None), None), None, on_lost=lambda: lost.append(1)):
        adapter.load = adapter.connect = asyncio.Event().wait
        await world.state(engine, EngineState.DOWN)
        assert engine.last_error == "no answer within 0.03 s (health.timeout_s)"
        assert lost


async def test_a_managed_one_that_computes_is_not_suspected(start):
    world = start(timeout_s=0.03)
    engine, adapter = await world.ready()
    engine.process = SimpleNamespace(starting=False, error=None, computing=True)
    adapter.load = adapter.connect = asyncio.Event().wait
    await asyncio.sleep(10 * FAILURES * INTERVAL_S)
    assert engine.state is EngineState.READY
    engine.process.computing = False
    await world.state(engine, EngineState.DOWN)


def held_up(begun, go, answer):
    """What an engine answers once `go` is set."""

    async def call():
        begun.set()
        await go.wait()
        return answer

    return call


class TestSuspicion:
    @pytest.fixture
    def world(self, start):
        return start(interval_s=60)  # nothing is checked unless asked for

    async def test_is_checked_at_once_and_lifted_or_finds_a_restarted_process(self, world):
        engine, adapter = await world.ready()
        pool = world.fleet.pools["m"]
        pool.learn(engine, (1,))
        engine.suspect(EngineUnavailable("reset"))
        assert pool.ready() == []
        await world.state(engine, EngineState.READY)
        assert pool.index.held("a", Tier.GPU) == 1
        adapter.info = replace(INFO, instance="i2")
        engine.suspect(EngineUnavailable("reset"))
        await until(lambda: engine.info.instance == "i2")
        assert len(pool.index) == 0

    async def test_that_comes_during_a_check_is_not_forgotten(self, world):
        engine, adapter = await world.ready()
        begun, go = asyncio.Event(), asyncio.Event()
        adapter.load = held_up(begun, go, EngineLoad(0, 0))
        engine.check_now.set()
        await begun.wait()
        engine.suspect(EngineUnavailable("reset"))
        go.set()
        await world.state(engine, EngineState.READY)


async def test_engines_that_connect_at_once_are_not_checked_at_once(start, virtual_time):
    """All checks in one tick would keep requests waiting for as long as they take together."""
    world, checked = start(interval_s=0.5), []

    async def load():
        checked.append(virtual_time.now)
        return EngineLoad(0, 0)

    for number in range(64):
        _, adapter = world.add(f"engine-{number}")
        adapter.load = load
    await until(lambda: len(checked) >= 128)
    most = max(sum(begun <= each < begun + 0.05 for each in checked) for begun in checked)
    assert most <= 24


async def test_a_draining_engine_stays_so_when_it_fails_and_when_it_goes_elsewhere(world):
    engine, adapter = await world.ready()
    engine.state = EngineState.DRAINING
    adapter.failures = [EngineUnavailable("gone")]
    await until(lambda: engine.last_error == "gone")
    await until(lambda: engine.last_error is None)
    assert engine.state is EngineState.DRAINING
    assert world.fleet.pools["m"].ready() == []
    engine.give_to("other:7")
    await until(lambda: world.fleet.pool_of(engine) is None)
    assert engine.state is EngineState.DRAINING


async def test_tables_are_given_before_requests(world):
    table = PromptTable("t", 7, 1, 1, b"data")
    world.tables.list = lambda: [table]
    engine, adapter = world.add(capabilities=frozenset({Capability.PROMPT_TABLES}))
    plain, other = world.add("b")
    await world.state(engine, EngineState.READY)
    await world.state(plain, EngineState.READY)
    assert (adapter.tables, other.tables) == ([table], [])


class TestChanges:
    """What an engine can do changes while it runs: nothing that is known of its cache is lost over it."""

    @staticmethod
    async def change(world, engine, adapter, **info):
        adapter.info = replace(adapter.info, **info)
        adapter.outdated = True
        await until(lambda: not adapter.outdated and engine.info == adapter.info)

    async def test_it_is_asked_again(self, world):
        engine, adapter = await world.ready(adapter=ChangingAdapter("a", info=INFO))
        world.fleet.pools["m"].learn(engine, (1, 2))
        adapter.found = (Finding("no L2 tier", "start it with --l2"),)
        with structlog.testing.capture_logs() as logs:
            await self.change(world, engine, adapter, capabilities=frozenset({Capability.OFFLOAD}))
            await self.change(world, engine, adapter, capabilities=frozenset())
            adapter.found = ()
            await self.change(world, engine, adapter, capabilities=frozenset({Capability.PIN}))
        assert [(log["log_level"], log["finding"]) for log in logs if "finding" in log] == [
            ("warning", "no L2 tier; start it with --l2"),
            ("info", "no L2 tier"),
        ]
        assert engine.can(Capability.PIN)
        assert len(world.fleet.pools["m"].index) == 2
        await self.change(world, engine, adapter, instance="i2")  # another process
        await world.state(engine, EngineState.READY)
        assert len(world.fleet.pools["m"].index) == 0

    async def test_its_events_are_followed_once_it_has_them(self, world):
        """As a llama-server that was too busy to be tried out when it joined."""
        engine, adapter = await world.ready(adapter=ChangingAdapter("a", info=INFO))
        await self.change(world, engine, adapter, capabilities=frozenset({Capability.KV_EVENTS}))
        await until(lambda: adapter.subscriptions == 1)
        await self.change(world, engine, adapter, max_model_len=8)
        assert adapter.subscriptions == 1

    async def test_a_block_size_that_its_events_show_bounds_what_is_predicted(self, world):
        """As of a TensorRT-LLM that does not report it."""
        capabilities = frozenset({Capability.KV_EVENTS})
        info = replace(INFO, capabilities=capabilities, tokens_per_block=32, gpu_blocks=8)
        engine, adapter = await world.ready(adapter=ChangingAdapter("a", info=info))
        pool = world.fleet.pools["m"]
        chain = pool.chain(Prompt(array("i", range(200))))
        pool.index.store("a", Tier.GPU, chain.hashes[:7])
        for size, predicted, room in (32, 96, 9), (64, 64, 25):
            if size != 32:
                await self.change(world, engine, adapter, tokens_per_block=size)
            candidates = pool.candidates(chain)
            assert (candidates[0].room, engine.learned.capacity) == (room, room + 7)
            assert pool.place(candidates, chain).predicted_tokens == predicted
        assert adapter.subscriptions == 1


class ChangingAdapter(FakeAdapter):
    outdated = False
    found = ()

    def findings(self):
        return self.found

    async def connect(self):
        self.outdated = False
        return await super().connect()

    async def load(self):
        return replace(await super().load(), outdated=self.outdated)


class HastyAdapter(FakeAdapter):
    """Takes over what it finds before it has found out everything."""

    looks = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.found, self.go = self.info, asyncio.Event()
        self.go.set()

    async def connect(self):
        self.looks += 1
        self.info = self.found
        await self.go.wait()
        return await super().connect()

    async def load(self):
        return replace(await super().load(), outdated=self.found != self.info)


async def test_one_that_lost_its_kv_is_no_longer_thought_to_hold_what_its_answers_showed(world):
    engine, adapter = await world.ready()
    pool = world.fleet.pools["m"]
    pool.learn(engine, (1,))
    adapter.load = AsyncMock(return_value=EngineLoad(running=0, waiting=0, emptied=True))
    await until(lambda: not pool.index.held("a", Tier.GPU))
    assert len(engine.learned) == 0
    assert engine.connections == 0  # it is the same


async def test_one_that_goes_elsewhere_while_it_is_checked_is_not_ready_again(world):
    engine, adapter = await world.ready()
    begun, go = asyncio.Event(), asyncio.Event()
    adapter.load = held_up(begun, go, EngineLoad(running=0, waiting=0, outdated=True))
    await begun.wait()
    engine.give_to("other:7")
    go.set()
    await until(lambda: world.fleet.pool_of(engine) is None)
    assert engine.state is EngineState.ELSEWHERE


class TestAnotherProcess:
    """An engine closes a connection, and no request has failed."""

    @pytest.fixture
    def world(self, start):
        return start(interval_s=60)  # nothing is checked unless asked for

    async def test_a_restart_is_noticed_by_the_closed_connection_and_one_removed_keeps_nobody_waiting(
        self, world
    ):
        engine, adapter = await world.ready()
        adapter.info = replace(INFO, instance="i2")
        adapter.closes()
        await until(lambda: engine.info.instance == "i2")
        assert engine.connections == 1
        engine.sure.clear()
        world.monitor.forget(engine)
        assert engine.sure.is_set()
        adapter.closes()
        assert engine.sure.is_set()

    async def test_one_that_names_no_process_is_compared_again(self, world):
        engine, adapter = await world.ready(names_process=False)
        adapter.closes()
        await until(engine.sure.is_set)
        assert engine.connections == 1, "what was prepared before is not sent"
        await until(lambda: engine.is_proven)

    async def test_another_model_at_the_address_joins_the_pool_of_its_own(self, world):
        _, adapter = await world.ready(names_process=False, rendering="model m")
        adapter.info = replace(adapter.info, model="other", rendering="model other")
        with structlog.testing.capture_logs() as logs:
            adapter.closes()
            await until(lambda: "other" in world.fleet.pools)
        assert list(world.fleet.pools) == ["other"]
        (line,) = [line for line in logs if line["event"] == "engine has changed"]
        assert line["changed"] == ["model m → other"]


async def test_an_adapter_that_is_asked_for_and_not_known_is_looked_up_once_a_second(world):
    _, adapter = await world.ready(loads_loras=True)
    assert world.fleet.pools["m"].lora_of("ada") is None
    adapter.info = replace(adapter.info, loras=frozenset({"ada"}))
    assert await world.fleet.look_up()
    assert world.fleet.pools["m"].lora_of("ada") == "ada"
    await asyncio.sleep(0.1)
    # One that is loaded within that second is found at its end, and all that ask meanwhile share the look.
    adapter.info = replace(adapter.info, loras=frozenset({"eve"}))
    adapter.connect = AsyncMock(return_value=adapter.info)
    assert await asyncio.gather(*(world.fleet.look_up() for _ in range(5))) == [True] * 5
    assert world.fleet.pools["m"].lora_of("eve") == "eve"
    assert adapter.connect.await_count == 1


class TestLooks:
    """Adapters that are asked for and not known: who waits, and how long."""

    @pytest.fixture
    def world(self, start):
        return start(interval_s=30.0)

    async def test_those_that_wait_for_a_look_that_was_not_done_look_themselves(self, world):
        _, adapter = await world.ready(loads_loras=True)
        assert await world.fleet.look_up()  # within the next second, all that come wait for the next look
        now = replace(adapter.info, loras=frozenset({"ada"}))
        begun, go = asyncio.Event(), asyncio.Event()
        adapter.connect = held_up(begun, go, now)
        first = asyncio.create_task(world.fleet.look_up())
        await asyncio.sleep(0.02)
        second = asyncio.create_task(world.fleet.look_up())
        await begun.wait()  # the look answers both
        first.cancel()
        go.set()
        assert await second
        assert world.fleet.pools["m"].lora_of("ada") == "ada"  # else it is a 404

    @pytest.mark.parametrize("is_check", [False, True])
    async def test_what_a_look_took_over_before_it_was_cut_short_is_told_by_the_next_check(
        self, world, is_check
    ):
        """Its adapter compares what it finds later with that: nothing is outdated there."""
        engine, adapter = await world.ready(adapter=HastyAdapter("a", info=replace(INFO, loads_loras=True)))
        adapter.found = moved = replace(adapter.info, lora_paths={"ada": "/b"})
        adapter.go.clear()
        if is_check:  # a managed engine computes, and the time is over
            engine.process = SimpleNamespace(computing=True)
            engine.check_now.set()
            await asyncio.sleep(world.monitor.timeout_s + 0.1)
        else:  # the client that asked leaves
            look = asyncio.create_task(world.fleet.look_up())
            await until(lambda: adapter.info is moved)
            look.cancel()
        adapter.go.set()
        for _ in range(2):
            engine.check_now.set()
            await asyncio.sleep(0.1)
        assert engine.info == moved
        assert adapter.looks == 3, "it is asked once more"

    @pytest.mark.parametrize("fails", [True, False])
    async def test_one_of_an_engine_that_is_removed_meanwhile_changes_nothing(self, world, fails):
        """Its requests go on to their end: nobody would tell them any more which process answers."""
        engine, adapter = await world.ready(loads_loras=True)
        begun, go = asyncio.Event(), asyncio.Event()
        adapter.connect = held_up(
            begun, go, replace(adapter.info, instance="i2" if fails else INFO.instance, gpu_blocks=9)
        )
        look = asyncio.create_task(world.fleet.look_up())
        await begun.wait()
        world.monitor.forget(engine)
        world.fleet.remove(engine)
        go.set()
        assert await look
        assert engine.sure.is_set()
        assert not world.fleet.pools

    async def test_one_that_finds_another_process_has_it_joined_anew(self, world):
        """Also where closed connections say nothing, as the engine keeps closing them."""
        engine, adapter = await world.ready(loads_loras=True)
        for _ in range(FALSE_DOUBTS):
            engine.is_same(engine.doubts)
        adapter.info = replace(adapter.info, instance="i2")
        assert await world.fleet.look_up()
        await until(lambda: engine.info.instance == "i2")

    async def test_an_engine_that_hangs_holds_up_a_look_no_longer_than_its_limit(self, world, virtual_time):
        """Those that ask in the middle of a look wait not for its end, the pause, and their own as well."""
        _, adapter = await world.ready(loads_loras=True)
        adapter.connect = asyncio.Event().wait
        first = asyncio.create_task(world.fleet.look_up())
        await asyncio.sleep(0.1)
        began = virtual_time.now
        await world.fleet.look_up()
        await first
        assert virtual_time.now - began < world.monitor.timeout_s + monitor_module.LOOK_UP_S + 0.2


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({}, {}, []),
        ({"max_model_len": 2048}, {"max_model_len": 8192}, ["context 2048 → 8192"]),
        ({"max_model_len": None}, {"max_model_len": 8192}, []),
        ({"rendering": "model a\ntemplate 1"}, {"rendering": "model a\ntemplate 2"}, ["its chat template"]),
        ({"rendering": "model a\ntemplate 1"}, {"rendering": "model b\ntemplate 1"}, ["its model's files"]),
        ({"rendering": ""}, {"rendering": "model b"}, []),
        ({"loras": frozenset("a")}, {"loras": frozenset("b")},
         ["LoRA adapter b loaded", "LoRA adapter a unloaded"]),
        ({"lora_paths": {"a": "1"}}, {"lora_paths": {"a": "2"}}, ["LoRA adapter a loaded from another path"]),
    ],
)  # fmt: skip
def test_what_changed_is_told_in_words(before, now, changes):
    assert monitor_module.changes_of(replace(INFO, **before), replace(INFO, **now)) == changes
