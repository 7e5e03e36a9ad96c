"""From when kvpin meets a server process until it is gone."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import gguf
import httpx
import numpy as np
import pytest

from engine_adapter import Capability, EngineUnavailable, KvTarget, KvVerb, NotSupported, make_adapter
from engine_adapter.llama_server import session as session_module
from engine_adapter.llama_server.discovery import discover, probe
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.scheduler import SlotRequest
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.session import IDLE_S, ServerSession, dirty_slots, save_all, write_back
from engine_adapter.llama_server.slot_io import read_slots
from engine_adapter.llama_server.slots import SlotOperation
from scripts.make_gguf import SHAPES, gguf_path
from tests.engine_adapter.llama_server.scheduler_world import no_directory, scheduler_world, stopped
from tests.engine_adapter.llama_server.slot_world import blocks_in, prompt_of, slot_world
from tests.engines import engine_spec


@pytest.fixture
def server(start_llama, save_dir):
    return start_llama(slots=2, ctx=1024, save_dir=save_dir)


@pytest.fixture
async def begun(server, save_dir, control_of):
    """Begins sessions with the server; each is ended."""
    sessions = []

    async def begin(*, trying=True):
        control = control_of(server.url)
        spec = engine_spec("llama_server", server.url, host_cache_dir=str(save_dir))
        sessions.append(ServerSession(spec, control, await discover(control, spec)))
        if trying:
            await sessions[-1].begin(None, MirrorEvents())
        return sessions[-1]

    yield begin
    for session in sessions:
        await session.end(farewell=False)


async def test_a_probe_leaves_one_file_at_most_where_kvpin_does_not_know_the_directory(
    server, save_dir, control_of
):
    async def tried_out(**caches):
        control, spec = control_of(server.url), engine_spec("llama_server", server.url, **caches)
        session = ServerSession(spec, control, await discover(control, spec))
        await session.begin(None, MirrorEvents())
        await session.end(farewell=False)
        return "".join(map(str, session.findings))

    await tried_out()
    told = await tried_out()
    (left,) = save_dir.iterdir()
    assert told.endswith(f"until then, a small file stays there, {left.name}")
    await tried_out(host_cache_dir=str(save_dir))
    assert list(save_dir.iterdir()) == []


async def test_a_server_is_tried_out_once(server, save_dir, control_of):
    """A next kvpin knows what the first one found, and no slot loses its content."""
    control, held = control_of(server.url), []
    for _ in range(2):
        async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
            if not held:
                await world.ask(prompt_of(1))
                await world.ask(prompt_of(2))
            session = world.adapter._session
            assert (session.facts.ram_cache, session.facts.is_unified) == (False, False)
            held.append([(slot.id_task, slot.n_tokens) for slot in await read_slots(control)])
    assert held[0] == held[1]
    assert all(tokens for _, tokens in held[0])


async def test_a_model_out_of_reach_costs_the_first_connection_a_slot_and_no_other(
    start_llama, save_dir, tmp_path
):
    """Nor a kvpin that only looks, as `kvpin doctor` does."""
    model = shutil.copy(gguf_path("tiny"), tmp_path / "model.gguf")
    server = start_llama(model=model, slots=1, ctx=1024, save_dir=save_dir)
    model.unlink()  # the server keeps it open
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        before = await world.adapter.connect()
        await world.ask(prompt_of(1))
        assert await world.adapter.connect() == before
        assert (await world.ask(prompt_of(1)))[1:] == (99, 99)
        async with aclosing(make_adapter(engine_spec("llama_server", server.url, "looks"))) as looks:
            looks.may_try = False
            assert (await looks.connect()).model == before.model
        assert (await world.ask(prompt_of(1)))[1:] == (99, 99)


def make_lora(path):
    """Writes an adapter of the tiny model that changes the keys of its first layer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    random, shape = np.random.default_rng(1), SHAPES["tiny"]
    for part, size in (("a", (4, shape.width)), ("b", (shape.kv_heads * shape.head_width, 4))):
        writer.add_tensor(f"blk.0.attn_k.weight.lora_{part}", random.standard_normal(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


async def test_kv_of_other_lora_scales_is_neither_restored_nor_saved(start_llama, save_dir, tmp_path):
    """An operator sets them while the server runs. It keeps its slots."""
    lora = make_lora(tmp_path / "lora.gguf")
    server = start_llama("--lora", str(lora), slots=1, ctx=1024, save_dir=save_dir)

    def scale(to):
        told = [{"id": 0, "scale": to}]
        httpx.post(f"{server.url}/lora-adapters", json=told, trust_env=False).raise_for_status()

    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        right = (await world.ask(prompt_of(1)))[0]
        await world.until(lambda slots: slots[0]["saved"] == slots[0]["tokens"] == 103)
        scale(0.5)
        for seed in (2, 1, 2):
            assert (await world.ask(prompt_of(seed)))[1] == 0
            await world.until_idle()
        assert len(await world.files()) == 1
        with pytest.raises(EngineUnavailable, match="its LoRA adapters have changed"):
            await world.adapter.load()
        await world.adapter.connect()
        assert (await world.ask(prompt_of(1)))[1:] == (0, 0)
        await world.until(lambda slots: slots[0]["saved"] == slots[0]["tokens"] == 103)
        scale(1.0)
        await world.adapter.connect()  # any question shows it
        assert await world.ask(prompt_of(1)) == (right, 99, 99)


async def test_servers_that_share_a_directory_are_tried_out_at_once(start_llama, save_dir):
    servers = [start_llama(slots=2, ctx=1024, save_dir=save_dir) for _ in range(3)]

    async def capabilities(server, name):
        async with slot_world(server.url, name, host_cache_dir=str(save_dir)) as world:
            return (await world.adapter.connect()).capabilities

    for _ in range(3):
        able = await asyncio.gather(*(capabilities(server, str(n)) for n, server in enumerate(servers)))
        assert all(Capability.OFFLOAD in each for each in able)


async def test_a_server_that_saves_elsewhere_is_told_and_not_made_to(server, tmp_path):
    async with slot_world(server.url, host_cache_dir=str(tmp_path)) as world:
        (finding,) = map(str, world.adapter.findings())
        assert "host_cache_dir" in finding
        assert f"--slot-save-path {tmp_path}" in finding
        for seed in range(4):
            await world.ask(prompt_of(seed))
    (_probe,) = server.save_dir.iterdir()  # what told, and nothing else


async def test_a_directory_that_cannot_be_used_is_told(server, tmp_path):
    async with slot_world(server.url, host_cache_dir=str(tmp_path / "missing")) as world:
        (finding,) = map(str, world.adapter.findings())
        assert str(tmp_path / "missing") in finding
        assert (await world.ask(prompt_of(1)))[1:] == (0, 0)


@asynccontextmanager
async def busy(control):
    """While this lasts, the server computes a long answer."""
    body = {"prompt": list(prompt_of(1)), "n_predict": 900, "ignore_eos": True, "id_slot": 1}
    running = asyncio.create_task(control.call("POST", "/completion", json=body))
    while not any(slot.is_processing for slot in await read_slots(control)):  # noqa: ASYNC110 - it starts
        await asyncio.sleep(0)
    yield
    assert not running.done()
    running.cancel()
    while any(slot.is_processing for slot in await read_slots(control)):  # noqa: ASYNC110 - it ends
        await asyncio.sleep(0)


async def test_a_busy_server_is_tried_out_later(begun, control_of, server):
    async with busy(control_of(server.url)):
        session = await begun()
        assert session.facts.ram_cache is None
        assert not session.facts.keeps_none_itself
    await session.scheduler.settled()
    await session.try_out()
    assert session.facts.keeps_none_itself
    assert session.scheduler.contents.table.violations == 0
    await session.try_out()  # again is nothing


async def test_who_only_looks_empties_no_slot(server, control_of):
    control, spec = control_of(server.url), engine_spec("llama_server", server.url)
    session = ServerSession(spec, control, await discover(control, spec, may_try=False), may_try=False)
    async with busy(control):
        await session.begin(None, MirrorEvents())
    await session.scheduler.settled()
    assert (await read_slots(control))[1].n_tokens > 100
    assert all(slot.salt == UNKNOWN_OWNER for slot in session.scheduler.contents.table if not slot.is_empty)
    await session.end(farewell=True)


@pytest.mark.parametrize("saves", [True, False])
async def test_a_pool_that_a_late_probe_finds_is_left_to_the_server(start_llama, save_dir, control_of, saves):
    server = start_llama("-kvu", slots=2, ctx=1024, save_dir=save_dir)
    told, control = {"host_cache_dir": str(save_dir)} if saves else {}, control_of(server.url)
    async with AsyncExitStack() as stack:
        async with busy(control):
            world = await stack.enter_async_context(slot_world(server.url, **told))
            assert Capability.PIN in world.adapter.capabilities
        await world.until_idle()
        with pytest.raises(EngineUnavailable, match="share one KV pool"):
            await world.adapter.load()
        async with busy(control):  # what was found is known
            assert Capability.PIN not in (await world.adapter.connect()).capabilities
        assert "-no-kvu -np 2" in " ".join(map(str, world.adapter.findings()))


async def test_slots_that_may_share_a_pool_are_managed_once_a_late_probe_has_shown_that_they_do_not(
    start_llama, save_dir, control_of, monkeypatch
):
    """Each has the model's whole context, so they look like one pool. A request that comes during
    the probe waits, and then has a slot."""
    began, go = asyncio.Event(), asyncio.Event()

    async def slow(*args, **named):
        began.set()
        await go.wait()
        return await probe(*args, **named)

    async def ask():
        async with world.hold(prompt_of(2)) as hold:
            return hold.slot

    monkeypatch.setattr(session_module, "probe", slow)
    server = start_llama(slots=2, ctx=32768, save_dir=save_dir)
    async with AsyncExitStack() as stack:
        async with busy(control_of(server.url)):
            world = await stack.enter_async_context(slot_world(server.url, host_cache_dir=str(save_dir)))
            assert not (await world.adapter.load()).outdated
            assert Capability.PIN not in world.adapter.capabilities
        assert (await world.adapter.load()).outdated
        check = asyncio.create_task(world.adapter.connect())
        await began.wait()
        request = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        assert not request.done()
        go.set()
        assert {Capability.PIN, Capability.CACHE_SALT} <= (await check).capabilities
        assert await request is not None
        await world.adapter.connect()  # by what the request has learned
        assert not (await world.adapter.load()).outdated


async def test_a_server_that_is_too_slow_for_the_probe_is_used_without(
    server, start_llama, save_dir, monkeypatch
):
    began, probe = asyncio.Event(), session_module.probe

    async def never(*_, **__):
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(session_module, "probe", never)
    adapter = make_adapter(engine_spec("llama_server", server.url, host_cache_dir=str(save_dir)))
    late = asyncio.create_task(adapter.connect())
    await began.wait()
    late.cancel()
    await asyncio.wait([late])
    info = await adapter.connect()
    await adapter.load()
    assert {Capability.KV_EVENTS, Capability.PIN} <= info.capabilities
    assert Capability.CACHE_SALT not in info.capabilities
    assert "raise health.timeout_s" in " ".join(map(str, adapter.findings()))
    monkeypatch.setattr(session_module, "probe", probe)
    server.stop()
    start_llama(slots=2, ctx=1024, save_dir=save_dir, port=server.port)  # another process may be faster
    assert Capability.CACHE_SALT in (await adapter.connect()).capabilities
    assert adapter.findings() == ()
    await adapter.aclose()


async def test_a_beginning_that_fails_leaves_nothing(begun, server):
    session = await begun(trying=False)
    server.kill()
    with pytest.raises(EngineUnavailable):
        await session.begin(None, MirrorEvents())
    assert session.scheduler is None
    assert session.verbs is None


async def test_answers_on_what_was_restored_are_those_of_the_whole_prompt(start_llama, save_dir):
    """A file has the last window only. A server with --swa-full takes it for all."""
    server = start_llama("--swa-full", model=gguf_path("swa"), slots=2, ctx=1024, save_dir=save_dir)
    prompt, end = prompt_of(1, 400), prompt_of(2, 40)
    asked = {"max_tokens": 16, "ignore_eos": True}
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt, **asked)
        for changed in (prompt[:390] + end, prompt, prompt + end):
            right = (await world.ask(changed, salt=str(len(changed)), **asked))[0]
            await world.do(KvVerb.OFFLOAD)
            await world.do(KvVerb.RESTORE, token_ids=prompt)
            text, cached, predicted = await world.ask(changed, **asked)
            assert text == right
            assert cached == predicted


async def test_a_server_that_computes_again_what_is_restored_keeps_its_slots(start_llama, save_dir):
    """Offloading saved the slot to a file that nobody could use, and erased it."""
    server = start_llama(model=gguf_path("swa"), slots=2, ctx=1024, save_dir=save_dir)
    prompt = prompt_of(1, 400)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        assert not {Capability.OFFLOAD, Capability.RESTORE} & world.adapter.capabilities
        await world.ask(prompt)
        for verb, more in ((KvVerb.OFFLOAD, ""), (KvVerb.RESTORE, '.*"fallback": "warm"')):
            with pytest.raises(
                NotSupported, match="restored would be computed again.*with --swa-full" + more
            ):
                await world.do(verb)
        cached, predicted = (await world.ask(prompt + prompt_of(2, 40)))[1:]
        assert cached == predicted >= 400


async def test_a_restored_slot_is_not_taken_for_empty(start_llama, server, save_dir):
    """`/slots` shows nothing of what was restored and never used, and it may be another tenant's."""
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(1), salt="a")
    server.stop()
    again = start_llama(slots=2, ctx=1024, save_dir=save_dir, port=server.port)
    async with slot_world(again.url, host_cache_dir=str(save_dir)) as world:
        assert (await world.do(KvVerb.RESTORE)).done == 6
    async with slot_world(again.url, host_cache_dir=str(save_dir)) as world:
        assert (await world.ask(prompt_of(1), salt="b"))[1:] == (0, 0)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_after_an_end_of_kvpin_the_files_alone_tell_what_was_computed(server, save_dir, is_killed):
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        text, *_ = await world.ask(prompt_of(1), salt="a")
        if is_killed:
            await world.until(lambda slots: any(slot["saved"] == slot["tokens"] == 103 for slot in slots))
            await world.adapter.leave()
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        assert sorted(slot["unknown"] for slot in await world.slots())[1] == 103
        assert (await world.ask(prompt_of(1), salt="b"))[1:] == (0, 0)
        assert await world.ask(prompt_of(1), salt="a") == (text, 99, 99)


@pytest.mark.parametrize("is_written_back", [False, True])
async def test_a_pin_protects_what_comes_back_after_kvpin_was_killed(server, save_dir, is_written_back):
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(1))
        await world.until(lambda slots: any(slot["saved"] == slot["tokens"] == 103 for slot in slots))
        pin = await world.adapter.pin(KvTarget(prompt_of(1)), 100)
        await world.adapter.leave()
    if not is_written_back:
        for path in save_dir.glob("kvpin-*-*.bin"):
            path.unlink()
            path.with_suffix(".json").unlink()
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        assert not [slot for slot in await world.slots() if slot["pinned_s"]]
        assert (await world.ask(prompt_of(1)))[1:] == ((99, 99) if is_written_back else (0, 0))
        await world.adapter.load()
        assert [slot["tokens"] for slot in await world.slots() if slot["pinned_s"]] == [103]
        assert await world.adapter.unpin(pin.pin_id)
        assert not [slot for slot in await world.slots() if slot["pinned_s"]]


async def test_a_crash_of_write_back_takes_nothing_down(begun, monkeypatch, caplog):
    calls = []

    async def crash(_scheduler):
        calls.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr("engine_adapter.llama_server.session.write_back", crash)
    session = await begun()
    while not calls:  # noqa: ASYNC110 - it starts
        await asyncio.sleep(0)
    await session.end(farewell=True)
    assert "writing slots back crashed" in caplog.text


@pytest.mark.parametrize("after_s", [0, 0.1])
async def test_a_session_whose_end_is_cut_short_has_ended(server, save_dir, after_s):
    """While it waits for the end of write-back, or saves the slots."""
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(1))
        scheduler = world.adapter._session.scheduler
        with stopped(server):
            ends = asyncio.create_task(world.adapter.end_session(farewell=True))
            await asyncio.sleep(after_s)
            ends.cancel()
            await asyncio.wait([ends])
        assert ends.cancelled()
        assert scheduler.is_closed
        assert await blocks_in(world.adapter._mirror.follow()) == {}


SAVE = SlotOperation.SAVE


@pytest.fixture
def world(scheduler):
    # A prefill of 1,000 tokens is worth a second, whatever this machine needs for it.
    scheduler.contents.rates.prefill_s = lambda tokens: tokens / 1000
    return scheduler


@asynccontextmanager
async def writing_back(world):
    task = asyncio.create_task(write_back(world.scheduler))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


class TestWriteBack:
    async def test_idle_slots_are_saved_the_one_unused_for_longest_first(self, world):
        for seed in (1, 2):
            await world.ask(prompt_of(seed))
        async with writing_back(world):
            await world.until(lambda: world.contents.counts.saves == 2)
        await world.idle()
        assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(1), prompt_of(2)]
        assert (world.contents.counts.write_backs, world.contents.counts.saves) == (2, 2)
        await world.check()

    async def test_not_what_nobody_here_knows(self, world):
        await world.complete(prompt_of(1, 500), 0)
        world.scheduler.adopt(await read_slots(world.control))
        world.table[0].saved = 0
        async with writing_back(world):
            await world.ask(prompt_of(2))
            await world.until(lambda: world.entries() != [])
        assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(2)]
        assert world.table[0].salt == UNKNOWN_OWNER
        assert dirty_slots(world.scheduler) == []

    async def test_each_content_is_saved_once_where_not_all_have_room(self, two_slots):
        """Each file drives out the one before."""
        async with scheduler_world(two_slots) as world:
            size = (await world.saved_away(prompt_of(7))).size
        async with scheduler_world(two_slots, host_bytes=size * 3 // 2) as world:
            world.contents.rates.prefill_s = lambda tokens: tokens / 1000
            for seed in (1, 2):
                await world.ask(prompt_of(seed))
            async with writing_back(world):
                await world.until(lambda: world.contents.counts.saves == 2)
                await asyncio.sleep(10 * IDLE_S)
                assert world.contents.counts.write_backs == 2
                await world.ask(prompt_of(3))
                await world.until(lambda: [e.tokens[:100] for e in world.entries()] == [prompt_of(3)])

    async def test_a_request_may_come_while_the_server_is_asked_whether_it_sleeps(self, world, monkeypatch):
        asked = asyncio.Event()

        async def is_asleep():
            if not asked.is_set():
                asked.set()
                world.table.begin(slot, SlotOperation.REQUEST, world.clock())
            return False

        slot = (await world.ask(prompt_of(1))).slot
        monkeypatch.setattr(world.scheduler, "is_asleep", is_asleep)
        async with writing_back(world):
            await asked.wait()
            await asyncio.sleep(0)
            world.scheduler._release(slot)
            await world.until(lambda: world.contents.counts.saves == 1)

    async def test_a_failure_pauses_it(self, world):
        counts = world.contents.counts
        async with writing_back(world):
            with no_directory(world.server):
                await world.ask(prompt_of(1))
                await world.until(lambda: counts.failed_saves == 1)
                assert not world.contents.can_save
            # It looks again, and there is still nothing to be done.
            world.scheduler.changed.set()
            await world.until(lambda: not world.scheduler.changed.is_set())
            assert (counts.write_backs, len(dirty_slots(world.scheduler))) == (1, 1)
            world.clock.ahead += 60
            await world.until(lambda: counts.saves == 1)
        assert (counts.write_backs, counts.saves, counts.failed_saves) == (2, 1, 1)


class TestSaveAll:
    async def test_everything_is_saved(self, world):
        """What is worth little, what is being saved already, and what a request is just leaving, too."""
        first = await world.ask(prompt_of(1, 3))
        async with world.scheduler.lease(SlotRequest(prompt_of(2))) as second:
            await world.send(second)
            with stopped(world.server):
                saving = asyncio.create_task(world.save(first.slot))
                await world.until(lambda: SAVE in world.operations())
                ends = asyncio.create_task(save_all(world.scheduler))
                await asyncio.sleep(0)
        await asyncio.gather(saving, ends)
        assert sorted(len(entry.tokens) for entry in world.entries()) == [6, 103]
        assert dirty_slots(world.scheduler) == []

    async def test_what_a_request_takes_meanwhile_is_left_to_it(self, world):
        first, second = [await world.ask(prompt_of(seed)) for seed in (1, 2)]
        turn = world.table[second.slot].tokens + prompt_of(3, 10)
        async with AsyncExitStack() as stack:
            with stopped(world.server):
                ends = asyncio.create_task(save_all(world.scheduler))
                await world.until(lambda: world.table[first.slot].operation is SAVE)
                lease = await stack.enter_async_context(world.scheduler.lease(SlotRequest(turn)))
                assert lease.slot == second.slot
            await ends
            assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(1)]

    async def test_a_place_that_takes_nothing_is_tried_once_or_twice(self, world):
        for seed in (1, 2):
            await world.ask(prompt_of(seed))
        with no_directory(world.server):
            await save_all(world.scheduler)
        assert 1 <= world.contents.counts.failed_saves <= 2
        assert len(dirty_slots(world.scheduler)) == 2
