"""What slots hold when that is not sure: nobody gets moved KV for exact, or KV of another tenant."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace
from itertools import chain

import httpx
import pytest

from engine_adapter import EngineLost, EngineUnavailable, KvTarget, KvVerb
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.checkpoints import PLAIN
from engine_adapter.llama_server.turns import SlotRequest
from scripts.make_gguf import gguf_path
from tests.engine_adapter.llama_server.scheduler_world import NEVER_SENT, scheduler_world
from tests.engine_adapter.llama_server.slot_world import prompt_of, slot_world

START, GONE, REST = (list(prompt_of(seed, count)) for seed, count in ((1, 60), (2, 100), (3, 300)))
LONG, SHORTER = array("i", START + GONE + REST), array("i", START + REST)


def ids(seed, count):
    return list(prompt_of(seed, count))


async def test_a_slot_whose_predictions_keep_failing_is_not_firm(start_llama, save_dir):
    """The answer that shows it carries the old rules back into its slot."""
    server = start_llama(slots=1, ctx=1024, save_dir=save_dir)
    async with scheduler_world(server) as world:
        world.contents.learn(replace(world.facts, memory=replace(PLAIN, chunk=16)))
        parts = [list(prompt_of(seed, 60)) for seed in range(8)]
        # `ask` sends no n_cache_reuse: as on a server that cannot move KV.
        prompts = [array("i", [*START, *chain.from_iterable(parts[turn:])]) for turn in range(7)]
        leases = [await world.ask(prompt) for prompt in prompts]
        wrong = [lease.answer.cached_tokens < lease.cached_tokens for lease in leases]
        assert wrong == [False, *[True] * 6]
        assert not world.contents.rules.is_sure
        assert [lease.firm for lease in leases] == [*[True] * 4, *[False] * 3]


async def test_several_choices_on_moved_kv_are_not_taken_for_exact(start_llama, save_dir):
    """kvpin itself splits most of them; those whose `n` is 1 it does not."""
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with slot_world(server.url, host_cache_dir=str(save_dir), cache_reuse=16) as world:
        await world.ask(LONG)
        moved, cached, _ = await world.ask(SHORTER, max_tokens=24)
        await world.until(lambda slots: all(slot["operation"] is None for slot in slots))
        async with world.hold(SHORTER, max_tokens=24, n=1, n_cmpl=2) as hold:
            async with await world.sent(hold) as response:
                texts = [choice["text"] for choice in json.loads(await response.read())["choices"]]
            note = hold.note
        await world.until(lambda slots: all(slot["operation"] is None for slot in slots))
        exact, *_ = await world.ask(SHORTER, max_tokens=24, cache_prompt=False)
        assert (moved != exact, cached) == (True, 359), "or the rest would prove nothing"
        assert texts == [exact, exact] or note.startswith("not exact")


async def test_a_restore_without_an_answer_gives_no_tenant_anothers_kv(start_llama, save_dir, monkeypatch):
    """The server restored the file, and the answer was lost (`slot_io._act`: EngineLost)."""
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with scheduler_world(server) as world:
        entry = await world.saved_away(prompt_of(1, 300), "a")
        restore, lost = slot_io.restore, []

        async def once_lost(*args):
            moved = await restore(*args)
            if not lost:
                lost.append(moved)
                raise EngineLost("no answer")
            return moved

        monkeypatch.setattr(slot_io, "restore", once_lost)
        with pytest.raises(EngineLost):
            await world.ask(entry.tokens, "a")
        await world.idle()
        # Another tenant's prompts, one for each slot.
        leases = [asyncio.create_task(world.ask(prompt_of(1, 300), "b")) for _ in world.table]
        assert [(await lease).answer.cached_tokens for lease in leases] == [0, 0]


async def test_a_text_whose_end_is_not_known_leaves_no_tenant_anothers_kv(start_llama, save_dir, monkeypatch):
    """As of `/infill`, whose tokens kvpin does not know: the question what it left there fails."""
    server = start_llama(slots=1, ctx=1024, save_dir=save_dir)
    prompt = prompt_of(1, 300)
    async with scheduler_world(server) as world:
        async with world.scheduler.lease(SlotRequest(array("i"), "a", text=array("i", [1, 2, 3]))) as lease:
            await world.complete(prompt, slot=lease.slot)
            monkeypatch.setattr(world.scheduler, "_count_when_idle", _fails)
        await world.idle()
        monkeypatch.undo()
        lease = await world.ask(prompt, "b")
        assert (lease.may_reuse, lease.answer.cached_tokens) == (False, 0)


async def test_several_choices_whose_end_is_not_known_leave_no_tenant_anothers_kv(
    start_llama, save_dir, monkeypatch
):
    server = start_llama(slots=1, ctx=1024, save_dir=save_dir)
    prompt = prompt_of(1, 300)
    async with scheduler_world(server) as world:
        async with world.scheduler.alone():
            await world.complete(prompt)
            monkeypatch.setattr(world.scheduler, "_count_when_idle", _fails)
        await world.idle()
        monkeypatch.undo()
        lease = await world.ask(prompt, "b")
        assert (lease.may_reuse, lease.answer.cached_tokens) == (False, 0)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_slot_that_somebody_used_while_no_kvpin_looked_is_nobodys(start_llama, save_dir, is_killed):
    """Another client writes no record, nor does a kvpin that sees another directory, or none."""
    server, prompt = start_llama(slots=1, ctx=1024, save_dir=save_dir), prompt_of(2, 300)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(1, 300), "a")
        if is_killed:
            await world.adapter.load()
            await world.adapter.leave()
    async with slot_world(server.url) as world:
        await world.ask(prompt, "b")
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.until(lambda slots: slots[0]["operation"] is None)
        _, cached, _ = await world.ask(prompt, "a")
    assert cached == 0


@pytest.mark.parametrize(
    ("shape", "prompts"),
    [
        # It goes on at a checkpoint of one token, and that one is of another prompt.
        ("swa", [ids(0, 6), ids(0, 1) + ids(1, 300), ids(2, 300), ids(2, 1) + ids(3, 40)]),
        # At 50 and 51 tokens there are states; the second one stays when token 50 changes.
        ("linear", [ids(0, 54), ids(0, 53) + ids(1, 2), ids(0, 50) + ids(2, 1500), ids(0, 50) + ids(2, 250)]),
    ],
)
async def test_nothing_goes_on_behind_a_checkpoint_of_another_prompt(start_llama, shape, prompts):
    """The server keeps it (llama.cpp 0c1e570), and answers wrongly there: `Checkpoint.is_stale`."""
    server = start_llama(model=gguf_path(shape), slots=1, ctx=4096)
    last = prompts[-1] + ids(9, 6)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:
        for prompt in (*prompts[:-1], last):
            alone = (await client.post("/completion", json=direct(prompt, reuse=True))).json()
        right = (await client.post("/completion", json=direct(last, reuse=False))).json()
    assert alone["timings"]["cache_n"] > 0
    assert alone["completion_probabilities"] != right["completion_probabilities"], "or it proves nothing"
    async with slot_world(server.url) as world:
        await world.ask(prompt_of(8, 300))  # computed whole: its checkpoints are known
        for prompt in prompts[:-1]:
            await world.ask(array("i", prompt))
        text, cached, predicted = await world.ask(array("i", last), max_tokens=12)
    assert (text, cached, predicted) == (right["content"], 0, 0)


def direct(prompt, *, reuse):
    """A request as another client of the server sends it."""
    asked = {"prompt": prompt, "n_predict": 12, "temperature": 0, "n_probs": 1, "id_slot": 0}
    return asked | {"cache_prompt": reuse}


async def _fails(_slot_id):
    raise EngineUnavailable("no answer")


async def test_without_a_directory_no_kv_is_moved(start_llama, save_dir):
    """Nothing would write down that the slot holds moved KV: the next kvpin would take it for exact."""
    server, bare = start_llama(slots=1, ctx=1024, save_dir=save_dir), start_llama(slots=1, ctx=1024)
    async with slot_world(bare.url) as world:
        exact, *_ = await world.ask(SHORTER, max_tokens=24)
    async with slot_world(server.url, cache_reuse=16) as world:
        await world.ask(LONG, max_tokens=1)
        text, cached, _ = await world.ask(SHORTER, max_tokens=24)
    assert text == exact
    assert cached < 100


async def test_a_request_that_never_left_gives_nobody_what_was_restored_for_it(start_llama, save_dir):
    """`/slots` tells no tokens of a slot that had no request yet, even after a restore: that is not empty."""
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with scheduler_world(server) as world:
        entry = await world.saved_away(prompt_of(1, 300), "a")
        assert await world.restore(1, entry)
        lease = await world.ask(entry.tokens, "a", chunks=NEVER_SENT)
        assert lease.slot == 1
        leases = [asyncio.create_task(world.ask(prompt_of(1, 300), "b")) for _ in world.table]
        assert [(await lease).answer.cached_tokens for lease in leases] == [0, 0]


async def test_a_request_that_never_left_does_not_own_what_another_tenant_left(
    start_llama, save_dir, monkeypatch
):
    """The length of what lies there was a guess: that another one is found does not show that it ran."""
    server = start_llama(slots=1, ctx=1024, save_dir=save_dir)
    prompt = prompt_of(1, 300)
    async with scheduler_world(server) as world:
        async with world.scheduler.lease(SlotRequest(prompt, "a")) as lease:
            await world.complete(prompt, slot=lease.slot)  # its answer is lost
            monkeypatch.setattr(world.scheduler, "_count_when_idle", _fails)
        await world.idle()
        monkeypatch.undo()
        await world.ask(prompt, "b", chunks=NEVER_SENT)
        lease = await world.ask(prompt, "b")
        assert (lease.may_reuse, lease.answer.cached_tokens) == (False, 0)


async def test_a_refused_request_gives_nobody_what_was_restored_for_it(start_llama, save_dir):
    """The same through the adapter: a tenant's own request that the server refuses (400) is enough."""
    prompt, before = prompt_of(1, 300), start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with slot_world(before.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt, "a")
        await world.do(KvVerb.OFFLOAD)
    before.stop()
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        await world.ask(prompt_of(2, 300), "c")  # on the slot that was probed
        async with world.hold(prompt, "a", grammar="root ::= (") as hold, await world.sent(hold) as response:
            assert response.status == 400
        await world.until(lambda slots: all(slot["operation"] is None for slot in slots))
        cached = [(await world.ask(prompt, "b"))[1] for _ in range(2)]
    assert cached[0] == 0


async def test_the_end_of_a_pin_leaves_the_pin_of_another_engine_on_the_same_file(start_llama, save_dir):
    """Two servers share a directory, and so its saved prefixes."""
    servers = [start_llama(slots=1, ctx=1024, save_dir=save_dir) for _ in range(2)]
    prompt = prompt_of(1, 300)
    async with (
        slot_world(servers[0].url, "one", host_cache_dir=str(save_dir)) as one,
        slot_world(servers[1].url, "two", host_cache_dir=str(save_dir)) as two,
    ):
        await one.ask(prompt)
        await one.do(KvVerb.OFFLOAD)
        mine = await one.adapter.pin(KvTarget(prompt), 100)
        await two.adapter.pin(KvTarget(prompt), 100)
        await one.adapter.unpin(mine.pin_id)
        done = await two.do(KvVerb.FLUSH, token_ids=prompt)
        assert done.left.get("pinned"), done


async def test_a_request_on_all_slots_that_never_ran_gives_nobody_what_was_restored(
    start_llama, save_dir, monkeypatch
):
    """The question what the slots hold failed before it, and afterwards they tell of no request."""
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with scheduler_world(server) as world:
        entry = await world.saved_away(prompt_of(1, 300), "a")
        assert await world.restore(1, entry)
        read, failed = slot_io.read_slots, []

        async def fails_once(control):
            if not failed:
                failed.append(1)
                raise EngineUnavailable("no answer")
            return await read(control)

        monkeypatch.setattr("engine_adapter.llama_server.scheduler.read_slots", fails_once)
        with pytest.raises(EngineUnavailable):
            async with world.scheduler.alone():
                pass
        await world.idle()
        leases = [asyncio.create_task(world.ask(prompt_of(1, 300), "b")) for _ in world.table]
        assert [(await lease).answer.cached_tokens for lease in leases] == [0, 0]
