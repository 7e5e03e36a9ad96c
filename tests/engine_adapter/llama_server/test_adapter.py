"""llama-server as an engine: what it can do, restarts, sleep, and other kvpins."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from unittest.mock import AsyncMock

import httpx
import pytest

from engine_adapter import (
    Capability,
    EngineTaken,
    EngineUnavailable,
    JsonBody,
    KvTarget,
    KvVerb,
    ModelNotLoaded,
    ModelState,
    NotSupported,
    make_adapter,
)
from engine_adapter.llama_server import saved_files
from engine_adapter.llama_server import session as session_module
from engine_adapter.llama_server.server_files import ServerLock
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.slot_world import WAIT_S, prompt_of, slot_world
from tests.engines import engine_spec
from tests.llama import running_llama_router

PLAIN = {Capability.CACHED_TOKENS, Capability.TOKENIZE}
SLOTS = PLAIN | {Capability.KV_EVENTS, Capability.CACHE_SALT, Capability.PIN}
FILES = SLOTS | {Capability.FLUSH, Capability.OFFLOAD, Capability.RESTORE}


class TestLives:
    async def test_what_lies_in_slots_outlives_adapter_and_server(self, start_llama, save_dir):
        server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            text, *_ = await world.ask(prompt_of(1))
        server.stop()
        again = start_llama(slots=2, ctx=1024, save_dir=save_dir, port=server.port)
        async with slot_world(again.url, host_cache_dir=str(save_dir)) as world:
            assert await world.ask(prompt_of(1)) == (text, 99, 99)

    async def test_other_sizes_in_the_settings_count_from_the_next_connection_on(self, save_dir, world):
        """As for a reload of the settings: the next adapter is made while this one is used, or given up."""

        text, *_ = await world.ask(prompt_of(1))
        await world.do(KvVerb.OFFLOAD)
        await world.adapter.pin(KvTarget(prompt_of(1)), 100)
        (entry,) = world.adapter._registry._entries.values()
        told = {"host_cache_dir": str(save_dir)}
        for sizes in ({}, {"host_cache_bytes": 1 << 20}):
            given_up = make_adapter(engine_spec("llama_server", world.server.url, "one", **told, **sizes))
            await given_up.aclose()
            assert entry.pins
        await world.adapter.aclose()
        async with slot_world(world.server.url, "one", **told, **sizes) as then:
            assert (await then.adapter.stats())["files"]["tiers"]["host"]["cap"] == 1 << 20
            assert await then.ask(prompt_of(1)) == (text, 99, 99)

    async def test_a_restart_between_two_checks_is_noticed(self, start_llama, save_dir, world):
        await world.ask(prompt_of(1))
        before = await world.adapter.connect()
        world.server.kill()
        with pytest.raises(EngineUnavailable):
            await world.adapter.load()
        start_llama(slots=2, ctx=1024, save_dir=save_dir, port=world.server.port)
        with pytest.raises(EngineUnavailable, match="restarted"):
            await world.adapter.load()
        assert (await world.adapter.connect()).instance != before.instance
        _, reported, said = await world.ask(prompt_of(1))
        assert reported == said

    async def test_a_server_that_saves_for_long_is_neither_lost_nor_its_slot(
        self, world, save_dir, monkeypatch
    ):
        """It saves to a pipe that nobody reads: it answers for its health, and no question about slots."""
        pipes, new_name = [], saved_files.new_name

        def first_in_a_pipe(key):
            name = new_name(key)
            if not pipes:
                pipes.append(save_dir / name)
                os.mkfifo(pipes[0])
            return name

        monkeypatch.setattr(saved_files, "new_name", first_in_a_pipe)
        before = await world.adapter.connect()
        text, *_ = await world.ask(prompt_of(1))
        await world.until(lambda slots: any(slot["operation"] == "save" for slot in slots))
        async with asyncio.timeout(WAIT_S):
            await world.adapter.load()
            assert await world.adapter.connect() == before
        with await asyncio.to_thread(pipes[0].open, "rb"):  # the save goes on, and fails: a pipe has no size
            await world.until(lambda slots: all(slot["operation"] is None for slot in slots))
        assert await world.ask(prompt_of(1)) == (text, 99, 99)

    async def test_one_whose_slots_are_not_managed_is_seen_to_sleep_and_to_wake(self, start_llama, save_dir):
        server = start_llama("--sleep-idle-seconds", "1", "--no-slots", save_dir=save_dir)
        async with slot_world(server.url) as world:
            adapter, loads = world.adapter, []

            async def until(state):
                async with asyncio.timeout(20):
                    while adapter.model_state is not state:
                        loads.append(await adapter.load())
                        await asyncio.sleep(0.1)

            await adapter.connect()
            assert await adapter.is_loaded()
            await until(ModelState.SLEEPING)
            loads.append(await adapter.load())
            assert [load.emptied for load in loads if load.emptied] == [True]  # what it held is gone
            assert not await adapter.is_loaded()
            ask = "/v1/completions", JsonBody(b'{"prompt": "x"}')
            async with adapter.hold(*ask, None):  # it wakes it, and it sleeps again
                pass
            assert (await adapter.load()).emptied
            with pytest.raises(ModelNotLoaded):  # it fell asleep in the middle of a check
                await adapter.tokenize_if_loaded(*ask)
            with pytest.raises(ModelNotLoaded):
                async with adapter.kept_loaded(0.01):
                    pass
            assert not await adapter.is_loaded()
            ids = await adapter.tokenize(*ask)
            assert await adapter.is_loaded()
            assert await adapter.tokenize_if_loaded(*ask) == ids
            await until(None)
            # A kvpin that meets it asleep: a request wakes it, and that is seen.
            await until(ModelState.SLEEPING)
            async with slot_world(server.url) as late:
                await late.adapter.connect()
                assert not await late.adapter.is_loaded()
                async with late.adapter.hold("/v1/embeddings", JsonBody(b"{}"), None):
                    assert await late.adapter.is_loaded()

    async def test_what_a_late_probe_told_is_not_all_that_the_next_process_needs(
        self, start_llama, save_dir, monkeypatch
    ):
        """As in router mode: both have the same file and flags. The files of the first have its own key."""
        server = start_llama(slots=2, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            adapter, late = world.adapter, world.adapter._session
            key = late.facts.key
            late.facts = replace(late.facts, continues=(), instance="the first")
            monkeypatch.setattr(adapter, "_alike", lambda _: ("alike",))
            adapter._latest = {("alike",): late}
            await adapter.end_session(farewell=False)
            await adapter.connect()
            assert adapter._session is not late
            assert adapter._session.facts.key == key

    async def test_a_late_probe_takes_one_slot_and_not_all_kv(self, start_llama, save_dir, monkeypatch):
        """Of a server whose slots are not managed, and which was busy when kvpin connected."""
        server = start_llama("-kvu", slots=2, save_dir=save_dir)
        async with slot_world(server.url) as world:
            monkeypatch.setattr(world.adapter._session, "can_be_probed", AsyncMock(return_value=True))
            load = await world.adapter.load()
            assert (load.outdated, load.emptied) == (True, False)
            await world.adapter.connect()
            assert not (await world.adapter.load()).emptied


class TestWhatItCanDo:
    async def test_all_of_it_with_a_save_path_and_its_directory(self, world):
        info = await world.adapter.connect()
        assert info.capabilities == FILES
        assert (info.max_model_len, info.gpu_blocks, info.tokens_per_block) == (1024, 128, 16)
        assert info.vocab_size == 4096
        assert world.adapter.findings() == ()

    @pytest.mark.parametrize(
        ("saves", "is_told", "able", "verb", "remedy"),
        [
            pytest.param(
                True, False, SLOTS | {Capability.FLUSH}, KvVerb.OFFLOAD, "host_cache_dir", id="directory"
            ),
            pytest.param(False, True, SLOTS, KvVerb.FLUSH, "--slot-save-path", id="save path"),
        ],
    )
    async def test_slots_alone_without_one_of_them(
        self, start_llama, save_dir, saves, is_told, able, verb, remedy
    ):
        server = start_llama(slots=2, save_dir=save_dir if saves else None)
        directory = {"host_cache_dir": str(save_dir)} if is_told else {}
        async with slot_world(server.url, **directory) as world:
            assert (await world.adapter.connect()).capabilities == able
            assert remedy in " ".join(map(str, world.adapter.findings()))
            with pytest.raises(NotSupported, match=remedy):
                await world.do(verb)
            assert (await world.ask(prompt_of(1)))[1:] == (0, 0)
            assert (await world.ask(prompt_of(1)))[1:] == (99, 99)

    @pytest.mark.parametrize(("flag", "remedy"), [("-kvu", "-no-kvu -np"), ("--no-slots", "with --slots")])
    async def test_left_to_itself_where_slots_cannot_be_kept(self, start_llama, save_dir, flag, remedy):
        server = start_llama(flag, slots=2, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            assert (await world.adapter.connect()).capabilities == PLAIN
            assert await world.slots() == []
            assert remedy in " ".join(map(str, world.adapter.findings()))
            assert world.adapter.forecast(KvTarget(prompt_of(1))) is None
            async with world.hold(prompt_of(1)) as hold:
                assert hold.body.get("id_slot") is None
                assert (await world.answer(hold))["usage"]["prompt_tokens"] == 100

    async def test_no_word_for_a_server_with_a_cache_of_its_own(self, start_llama, save_dir):
        server = start_llama("--cache-ram", "64", slots=2, save_dir=save_dir)
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            assert (await world.adapter.connect()).capabilities == FILES - {Capability.CACHE_SALT}
            assert "--cache-ram 0" in " ".join(map(str, world.adapter.findings()))
            assert "start the server with --cache-ram 0" in str(
                world.adapter.not_supported(Capability.CACHE_SALT)
            )
            async with world.hold(prompt_of(1)) as hold:
                assert not hold.firm
            assert not world.adapter.forecast(KvTarget(prompt_of(1))).firm
            for salt in ("a", "b", "a"):
                assert (await world.ask(prompt_of(2), salt=salt))[1] == 0


class TestRoutersModel:
    """What a probe has told of a model's process is true of the next one only if that is alike."""

    @pytest.fixture
    def models(self, tmp_path):
        directory = tmp_path / "models"
        directory.mkdir()
        shutil.copy(gguf_path("tiny"), directory / "m.gguf")
        return directory

    async def ended(self, world):
        async with asyncio.timeout(WAIT_S):
            while world.adapter._session is not None:  # noqa: ASYNC110 - the router tells it
                await asyncio.sleep(0.01)

    async def test_another_file_is_another_memory(self, tmp_path, models, save_dir):
        with running_llama_router(tmp_path / "log", models, "--swa-full", save_dir=save_dir) as router:
            async with slot_world(router.url, host_cache_dir=str(save_dir), model="m") as world:
                for shape in ("tiny", "tiny", "swa"):
                    shutil.copy(gguf_path(shape), models / "m.gguf")
                    await world.ask(prompt_of(1), model="m")
                    contents = world.adapter._session.scheduler.contents
                    assert contents.rules.loses_window == (shape == "swa")
                    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
                        await client.post("/models/unload", json={"model": "m"})
                    await self.ended(world)

    @pytest.mark.parametrize("is_found", [False, True])
    async def test_a_plain_server_in_the_place_of_its_router_is_met_as_one_and_the_other_way_round(
        self, tmp_path, models, save_dir, start_llama, is_found
    ):
        """`is_found`: the router told where it saves, not the settings."""
        told, log = {"model": "m"} | ({} if is_found else {"host_cache_dir": str(save_dir)}), tmp_path / "log"
        async with AsyncExitStack() as stack:
            with running_llama_router(log, models, save_dir=save_dir) as router:
                world = await stack.enter_async_context(slot_world(router.url, **told))
                await world.ask(prompt_of(1), model="m")
                met = world.adapter._router
                assert Capability.OFFLOAD in world.adapter._session.capabilities
            plain = start_llama(slots=2, ctx=1024, save_dir=save_dir, port=router.port)
            info = await world.adapter.connect()
            assert (info.models, info.max_model_len) == ({}, 1024)
            assert (Capability.OFFLOAD in info.capabilities) is not is_found
            if not is_found:
                with pytest.raises(EngineTaken):
                    ServerLock(save_dir, plain.url).take()
            await world.ask(prompt_of(1), model="m")
            assert met._follower is None  # it is not asked any more
            plain.stop()
            with running_llama_router(log, models, save_dir=save_dir, port=router.port):
                assert (await world.adapter.connect()).models == {"m": ModelState.UNLOADED}
                await world.ask(prompt_of(1), model="m")

    async def test_other_flags_may_mean_a_cache_that_serves_every_tenant(self, tmp_path, models, save_dir):
        def start(ram, port=0):
            flags = "--cache-ram", ram
            return running_llama_router(tmp_path / "log", models, *flags, save_dir=save_dir, port=port)

        async with AsyncExitStack() as stack:
            world, port = None, 0
            for ram in ("0", "64", "0"):
                with start(ram, port) as router:
                    if world is None:
                        told = {"host_cache_dir": str(save_dir), "model": "m"}
                        world = await stack.enter_async_context(slot_world(router.url, **told))
                        port = router.port
                    await self.ended(world)  # the restart was noticed
                    for _ in range(2):  # before a request has loaded it, and while it is loaded
                        info = await world.adapter.connect()
                        assert (Capability.CACHE_SALT in info.capabilities) == (ram == "0")
                        await world.ask(prompt_of(1), salt="a", model="m")
                    assert world.adapter._session.facts.ram_cache == (ram != "0")

    @pytest.mark.parametrize("flag", ["-kvu", "-no-kvu"])
    async def test_one_that_was_unloaded_has_lost_what_its_answers_showed(
        self, tmp_path, models, save_dir, flag
    ):
        """Where its slots are managed, its events tell that."""
        with running_llama_router(tmp_path / "log", models, flag, save_dir=save_dir) as router:
            async with slot_world(router.url, host_cache_dir=str(save_dir), model="m") as world:
                async with world.hold(prompt_of(1), model="m") as hold:
                    await world.answer(hold)
                assert not (await world.adapter.load()).emptied
                async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
                    await client.post("/models/unload", json={"model": "m"})
                await self.ended(world)
                told = [(await world.adapter.load()).emptied for _ in range(2)]
                assert told == [flag == "-kvu", False]

    async def test_a_client_that_leaves_in_mid_probe_says_nothing_of_its_speed(
        self, tmp_path, models, save_dir, monkeypatch
    ):
        began = asyncio.Event()

        async def never(*_, **__):
            began.set()
            await asyncio.Event().wait()

        with running_llama_router(tmp_path / "log", models, save_dir=save_dir) as router:
            async with slot_world(router.url, host_cache_dir=str(save_dir), model="m") as world:
                with monkeypatch.context() as slowly:
                    slowly.setattr(session_module, "probe", never)
                    leaves = asyncio.create_task(world.ask(prompt_of(1), model="m"))
                    await began.wait()
                    leaves.cancel()
                    await asyncio.wait([leaves])
                await world.ask(prompt_of(1), model="m")
                assert Capability.CACHE_SALT in (await world.adapter.connect()).capabilities
                assert world.adapter.findings() == ()
