"""Who holds the slots of a real server, and what is said of them: compared with files the server saves."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from unittest.mock import AsyncMock

import msgspec
import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineUnavailable
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.saved import salt_digest
from engine_adapter.llama_server.scheduler import SlotRequest
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slot_io import read_slots, tokenize
from engine_adapter.llama_server.slots import NEVER, SlotOperation
from engine_adapter.types import Retention, ViewCurrent, ViewLost
from tests.engine_adapter.llama_server.scheduler_world import (
    CHAT,
    COMPLETIONS,
    NEVER_SENT,
    SMALL_STEPS,
    WAIT_S,
    no_directory,
    scheduler_world,
    stopped,
)
from tests.engine_adapter.llama_server.slot_world import prompt_of

SAVE, RESTORE, FOREIGN = SlotOperation.SAVE, SlotOperation.RESTORE, SlotOperation.FOREIGN


@pytest.fixture
def world(scheduler):
    return scheduler


@pytest.fixture
async def own_world(start_llama, save_dir):
    """With a server that may die, and whose slots are new."""
    async with scheduler_world(start_llama(*SMALL_STEPS, slots=2, ctx=2048, save_dir=save_dir)) as world:
        yield world


def asking(world, tokens, salt=None, **sending):
    return asyncio.create_task(world.ask(tokens, salt, **sending))


async def fill(world, *seeds):
    return [await world.ask(prompt_of(seed)) for seed in seeds]


async def test_the_slot_that_a_conversation_has_left_is_out_of_date(world):
    held = []
    for seed in (1, 2):
        async with world.scheduler.lease(SlotRequest(prompt_of(seed), session=7)) as lease:
            await world.send(lease)
        await world.idle(lease.slot)
        held.append(world.table[lease.slot])
    assert held[0] is not held[1]
    assert [(slot.session, slot.is_outdated) for slot in held] == [(7, True), (7, False)]
    await world.check()


async def test_a_restore_that_was_planned_takes_what_replaced_its_file(world):
    first = await world.ask(prompt_of(1))
    await world.save(first.slot)
    (old,) = world.entries()
    longer = await world.ask(world.table[first.slot].tokens + prompt_of(2, 20))
    await world.save(longer.slot)
    (new,) = world.entries()
    async with world.contents.keeping(old) as kept:
        assert kept is new
    world.contents.rules = replace(world.contents.rules, window=8)  # its files cannot be cut
    async with world.contents.keeping(old) as kept:
        assert kept is old


class TestForecast:
    async def test_is_what_happens(self, world):
        """Of new prompts, and ones that slots and files hold in part or whole."""
        await world.saved_away(prompt_of(7))
        rng = Random(5)  # noqa: S311 - the same prompts each time
        for _ in range(12):
            tokens = prompt_of(rng.randrange(4, 9), rng.choice([60, 100, 140]), head=40)
            forecast = world.scheduler.forecast(SlotRequest(tokens))
            lease = await world.ask(tokens)
            assert forecast.firm
            assert lease.answer.cached_tokens == lease.cached_tokens == forecast.cached_tokens
        assert world.contents.counts.restores > 0
        await world.check()

    async def test_is_not_firm_where_more_may_be_there(self, world):
        """The end of an answer that was cut short is not known, and can be reused for all that."""
        lease = await world.ask(prompt_of(1), chunks=8, max_tokens=200, ignore_eos=True)
        slot = world.table[lease.slot]
        assert slot.unknown > 0
        tokens = await world.truth(slot.id)
        forecast = world.scheduler.forecast(SlotRequest(tokens))
        assert (forecast.cached_tokens, forecast.firm) == (100, False)
        again = await world.ask(tokens)
        assert again.answer.cached_tokens == len(tokens) - 1
        assert not again.firm

    async def test_the_slot_of_its_conversation_may_be_worth_a_wait(self, world):
        first = await world.ask(prompt_of(1, 800))
        world.contents.rates.hold_s = 0.01  # requests are over soon
        second_turn = world.table[first.slot].tokens + prompt_of(2, 20)
        with stopped(world.server):
            running = asking(world, second_turn)
            await world.until(lambda: world.scheduler.streams == 1)
            forecast = world.scheduler.forecast(SlotRequest(second_turn + prompt_of(3, 20)))
        assert 0 < forecast.wait_s < forecast.total_s < forecast.idle_s < math.inf
        assert forecast.cached_tokens == len(second_turn)
        await running

    async def test_counts_those_who_wait(self, world):
        with stopped(world.server):
            running = [asking(world, prompt_of(seed)) for seed in range(2)]
            await world.until(lambda: world.scheduler.streams == 2)
            alone = world.scheduler.forecast(SlotRequest(prompt_of(9)))
            assert alone.idle_s == math.inf
            waiting = [asking(world, prompt_of(seed)) for seed in (2, 3)]
            await world.until(lambda: world.scheduler.waiting == 2)
            behind = world.scheduler.forecast(SlotRequest(prompt_of(9)))
            assert behind.wait_s > alone.wait_s > 0
            assert 0 < behind.idle_s < math.inf, "those may never end: it joins them after a while"
        await asyncio.gather(*running, *waiting)
        assert (world.scheduler.streams, world.scheduler.waiting) == (0, 0)


class TestRetention:
    HOUR = Retention(1, 3600.0, "acme")

    async def test_what_a_request_wants_kept_its_slot_and_its_file_are(self, world):
        lease = await world.ask(prompt_of(1), retention=self.HOUR)
        slot = world.table[lease.slot]
        assert slot.kept_until == pytest.approx(world.clock() + 3600, abs=WAIT_S)
        assert await world.save(slot.id)
        (entry,) = world.entries()
        assert entry.kept_until == pytest.approx(time.time() + 3600, abs=WAIT_S)
        assert entry.kept_for == slot.kept_for == salt_digest("acme")

    async def test_a_file_of_what_is_in_the_slot_is_kept_from_then_on(self, world):
        lease = await world.ask(prompt_of(1))
        assert await world.save(lease.slot)
        (entry,) = world.entries()
        assert entry.kept_until == 0
        again = await world.ask(world.table[lease.slot].tokens + prompt_of(2, 20), retention=self.HOUR)
        assert again.slot == lease.slot
        assert entry.kept_until == pytest.approx(time.time() + 3600, abs=WAIT_S)

    @pytest.mark.parametrize("retention", [None, Retention(owner="acme")])
    async def test_what_nobody_wants_kept_is_not(self, world, retention):
        lease = await world.ask(prompt_of(1), retention=retention)
        assert world.table[lease.slot].kept_until == NEVER
        assert await world.save(lease.slot)
        assert world.entries()[0].kept_until == 0


class TestToolCalls:
    @pytest.mark.parametrize(("reason", "waits"), [("tool_calls", True), ("stop", False)])
    async def test_the_slot_of_a_tool_call_waits_for_its_result(self, world, reason, waits):
        async with world.scheduler.lease(SlotRequest(prompt_of(1))) as lease:
            await world.send(lease)
            lease.answer.finish_reason = reason
        await world.idle(lease.slot)
        assert (world.table[lease.slot].due_until > world.clock()) == waits


class TestPrepared:
    """A slot is saved or restored for a request that leaves meanwhile, or whose server does."""

    @asynccontextmanager
    async def held(self, world, operation):
        """A request in the middle of `operation`, the server standing still."""
        entry = await world.saved_away(prompt_of(7))
        if operation is SAVE:
            await fill(world, 1, 2)
        with stopped(world.server):
            asks = asyncio.create_task(self.ask(world, entry.tokens))
            await world.until(lambda: operation in world.operations())
            yield asks

    async def ask(self, world, tokens):
        async with world.scheduler.lease(SlotRequest(tokens)) as lease:
            return lease

    @pytest.mark.parametrize("operation", [SAVE, RESTORE])
    async def test_who_leaves_meanwhile(self, world, operation):
        async with self.held(world, operation) as asks:
            asks.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asks
            assert operation in world.operations(), "it goes on to its end"
        await world.idle()
        assert world.contents.counts.saves == 1 + (operation is SAVE)
        assert world.contents.counts.restores == 1
        await world.check()
        assert (await world.ask(prompt_of(7))).answer.cached_tokens == 99

    @pytest.mark.parametrize("operation", [SAVE, RESTORE])
    async def test_a_server_that_dies_meanwhile(self, own_world, operation):
        world = own_world
        async with self.held(world, operation) as asks:
            chosen = world.operations().index(operation)
            world.server.process.kill()
        with pytest.raises(EngineUnavailable):
            await asks
        assert world.operations() == [None, None]
        assert not world.table[chosen].tokens, "nobody knows what it holds"
        with pytest.raises(EngineUnavailable):
            await world.erase(chosen)
        assert world.operations() == [None, None]

    @pytest.mark.parametrize("operation", [SAVE, RESTORE])
    async def test_a_scheduler_that_is_closed_meanwhile(self, world, operation):
        async with self.held(world, operation) as asks:
            await world.scheduler.aclose()
            with pytest.raises(EngineUnavailable, match="lost"):
                await asks

    async def test_who_leaves_in_the_moment_it_is_ready(self, world):
        """Cancelled at each of the loop's turns between the grant and the lease."""
        for turns in range(12):
            await world.saved_away(prompt_of(20 + turns))
            asks = asyncio.create_task(self.ask(world, prompt_of(20 + turns)))
            await world.until(lambda: RESTORE in world.operations(), 0)
            await world.until(lambda: RESTORE not in world.operations(), 0)
            for _ in range(turns):
                await asyncio.sleep(0)
            asks.cancel()
            with suppress(asyncio.CancelledError):
                await asks
            await world.idle()
        await world.check()

    async def test_the_save_before_does_not_drive_out_the_file_to_restore(self, two_slots):
        """The host tier is full, and that file the one unused for longest."""
        async with scheduler_world(two_slots) as world:
            size = (await world.saved_away(prompt_of(7))).size
        async with scheduler_world(two_slots, host_bytes=size * 5 // 2) as world:
            for seed in (7, 8):
                await world.saved_away(prompt_of(seed))
            await fill(world, 1, 2)
            assert (await world.ask(prompt_of(7))).answer.cached_tokens == 99
            assert world.contents.counts.saves == 3
            assert [entry.tokens[:100] for entry in world.entries()] == [prompt_of(7), prompt_of(1)]

    async def test_a_save_that_fails_stops_no_request(self, world):
        await world.saved_away(prompt_of(7))
        await fill(world, 1, 2)
        with no_directory(world.server):
            lease = await world.ask(prompt_of(7))
        assert (lease.answer.is_complete, lease.answer.cached_tokens) == (True, 0)
        assert (world.contents.counts.saves, world.contents.counts.failed_saves) == (1, 1)
        await world.check()


class TestLeft:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": 1}, {"logit_bias": [[2, 100]]}])
    async def test_an_answer_of_next_to_nothing(self, world, path, fields):
        messages = [{"role": "user", "content": "Hello there"}]
        body = JsonBody(msgspec.json.encode({"messages": messages, "prompt": "Hello there"}))
        tokens = await tokenize(world.control, path, body)
        for _ in range(2):
            lease = await world.ask(tokens, path=path, messages=messages, **fields)
            assert lease.answer.is_complete
            assert not world.table[lease.slot].is_empty
            await world.check()

    async def test_a_prompt_that_the_server_counts_otherwise(self, world):
        lease = await world.ask(prompt_of(1), prompt=list(prompt_of(2, 120)))
        assert (world.table[lease.slot].salt, world.table[lease.slot].unknown) == (UNKNOWN_OWNER, 123)
        await world.check()

    async def test_a_server_that_dies_before_it_is_asked(self, own_world):
        async with own_world.scheduler.lease(SlotRequest(prompt_of(1))) as lease:
            await own_world.send(lease)
            own_world.server.kill()
        assert own_world.operations() == [None, None]
        assert (own_world.table[lease.slot].tokens, own_world.table[lease.slot].salt) == (
            array("i"),
            UNKNOWN_OWNER,
        )

    async def test_a_stranger_whose_server_dies(self, own_world):
        other = asyncio.create_task(own_world.complete(prompt_of(1, 1500), 0))
        await own_world.until_processing(0)
        own_world.scheduler.adopt(await read_slots(own_world.control))
        own_world.server.kill()
        with pytest.raises(EngineUnavailable):
            await other
        await own_world.idle()
        assert own_world.table[0].salt == UNKNOWN_OWNER

    async def test_cut_in_mid_prefill(self, world):
        await world.ask(prompt_of(1, 200, head=100))
        lease = await world.ask(prompt_of(2, 2000, head=100), chunks=2, return_progress=True)
        slot = world.table[lease.slot]
        assert 100 < slot.length < 2000, "it had begun and was not through"
        assert (slot.unknown, slot.tokens) == (0, prompt_of(2, 2000, head=100)[: slot.length])
        await world.check()

    async def test_who_never_sent_anything_changed_nothing_of_his_own(self, world):
        """The slot still holds what it held, and no other tenant's prompt is taken for it."""
        await world.ask(prompt_of(1), "a")
        await world.ask(prompt_of(2), "a")
        for _ in range(4):
            await world.ask(prompt_of(1), "b", chunks=NEVER_SENT)
        await world.check()
        assert {slot.salt for slot in world.table} <= {"a", UNKNOWN_OWNER}
        assert (await world.ask(prompt_of(1), "b")).answer.cached_tokens == 0

    async def test_a_server_is_not_new_because_a_request_never_reached_it(self, own_world):
        for _ in range(2):
            await own_world.ask(prompt_of(1), chunks=NEVER_SENT)
            await own_world.ask(prompt_of(1, 5000))  # refused
        await own_world.scheduler.reconcile()
        assert not own_world.scheduler.is_lost

    async def test_a_prompt_too_long_leaves_what_was_there(self, world):
        await fill(world, 1, 2)
        lease = await world.ask(prompt_of(1, 3000))
        assert not lease.answer.is_complete
        await world.check()

    async def test_one_that_starts_late_is_waited_for(self, start_llama, save_dir):
        """Its client left while it waited behind a long step, in which the server shows its slot idle."""
        server = start_llama("-b", "2048", "-ub", "2048", slots=2, ctx=2048, save_dir=save_dir)
        async with scheduler_world(server) as world:
            long = asking(world, prompt_of(1, 2000))

            await world.until(lambda: world.scheduler.streams == 1)
            await world.until_processing(next(slot.id for slot in world.table if not slot.is_idle))
            late = asking(world, prompt_of(2, 1500))
            await world.until(lambda: world.scheduler.streams == 2)
            await asyncio.sleep(0.05)
            late.cancel()
            await asyncio.wait([late, long])
            await world.idle()
            await world.check()

    async def test_vain_restores_are_those_of_who_wanted_reuse(self, world):
        for seed in (7, 8, 9):
            await world.saved_away(prompt_of(seed))
            async with world.scheduler.lease(SlotRequest(prompt_of(seed))) as lease:
                assert lease.restored
                lease.may_reuse = False
                await world.send(lease)
            assert lease.answer.cached_tokens == 0
        assert world.contents.can_restore
        assert world.contents.findings == []


async def test_another_process_gets_no_request(world, monkeypatch):
    """It is found when the request asks whether the server sleeps. A restore may be planned then."""
    await world.ask(prompt_of(1))
    monkeypatch.setattr(slot_io, "read_pulse", AsyncMock(return_value=slot_io.Pulse("another")))
    world.clock.ahead += 2
    with pytest.raises(EngineUnavailable, match="has changed"):
        await world.ask(prompt_of(1))
    assert world.scheduler.is_lost
    assert (world.scheduler.waiting, world.table.in_flight) == (0, 0)


class TestTake:
    async def test_what_it_raises_is_raised_and_the_slot_released(self, world):
        async def fails(slot):
            raise LookupError(slot.id)

        with pytest.raises(LookupError):
            await world.scheduler.take(1, SAVE, fails)
        assert world.operations() == [None, None]

    async def test_brought_into_full_slots_saves_the_one_unused_for_longest(self, world):
        entry = await world.saved_away(prompt_of(7))
        first, last = await fill(world, 1, 2)
        assert await world.scheduler.bring(entry)
        assert world.table[first.slot].tokens == entry.tokens
        assert world.table[last.slot].tokens[:100] == prompt_of(2)
        assert len(world.entries()) == 2
        await world.check()

    async def test_a_server_that_a_restore_woke_and_that_sleeps_again_holds_nothing(
        self, start_llama, save_dir
    ):
        server = start_llama("--sleep-idle-seconds", "1", slots=2, ctx=1024, save_dir=save_dir)
        async with scheduler_world(server) as world:
            entry = await world.saved_away(prompt_of(7))
            await world.until_asleep()
            assert await world.scheduler.look()
            assert await world.scheduler.bring(entry)
            assert any(slot.tokens == entry.tokens for slot in world.table)
            await world.until_asleep()
            assert await world.scheduler.look()
            assert all(slot.is_empty for slot in world.table)

    async def test_nothing_is_brought_over_pins(self, world):
        entry = await world.saved_away(prompt_of(7))
        for lease in await fill(world, 1, 2):
            world.table.pin(lease.slot, 100, world.clock() + 60)
        assert not await world.scheduler.bring(entry)
        world.clock.ahead = 61
        assert await world.scheduler.bring(entry)


class TestOthers:
    @pytest.mark.parametrize("word", ["adopt", "reconcile"])
    async def test_a_slot_somebody_else_works_on_is_left_to_him(self, world, word):
        other = asyncio.create_task(world.complete(prompt_of(1, 600), 0, n_predict=100))
        await world.until_processing(0)
        if word == "adopt":
            world.scheduler.adopt(await read_slots(world.control))
        else:
            await world.scheduler.reconcile()
        assert world.operations() == [FOREIGN, None]
        assert (await world.ask(prompt_of(2))).slot == 1
        await other
        await world.idle()
        # One token: what ends copies of KV the other may have left pending.
        assert (world.table[0].unknown, world.table[0].salt) == (1, UNKNOWN_OWNER)
        assert world.contents.counts.strangers == (word == "reconcile")
        await world.check()

    async def test_what_somebody_changed_is_not_known_any_more(self, world):
        one, other = await fill(world, 1, 2)
        await world.complete(prompt_of(3, 50), one.slot)
        await world.scheduler.reconcile()
        assert world.table[one.slot].salt == UNKNOWN_OWNER
        assert world.table[other.slot].tokens[:100] == prompt_of(2)
        assert world.contents.counts.strangers == 1
        await world.check()
        await world.scheduler.reconcile()
        assert world.contents.counts.strangers == 1

    async def test_what_happens_meanwhile_is_nobody_elses(self, world):
        """Slots in use, and ones used since the question was sent, are not held against the answer."""
        await fill(world, 1, 2)
        world.contents.rates.prefill_s = lambda tokens: 0.0  # so no slot is saved first
        with stopped(world.server):
            question = asyncio.create_task(world.scheduler.reconcile())
            await asyncio.sleep(0)
            running = [asking(world, prompt_of(seed, 300)) for seed in (1, 2)]
            await world.until(lambda: world.scheduler.streams == 2)
        await asyncio.gather(question, *running)
        assert world.contents.counts.strangers == 0
        await world.check()


class TestClose:
    async def test_who_waits_is_told(self, world):
        with stopped(world.server):
            running = [asking(world, prompt_of(seed)) for seed in range(2)]
            await world.until(lambda: world.scheduler.streams == 2)
            waits = [asking(world, prompt_of(seed)) for seed in (2, 3)]
            await world.until(lambda: world.scheduler.waiting == 2)
            await world.scheduler.aclose()
            for waiting in waits:
                with pytest.raises(EngineUnavailable, match="lost"):
                    await waiting
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        for late in (world.ask(prompt_of(3)), world.save(0)):
            with pytest.raises(EngineUnavailable, match="lost"):
                await late

    async def test_who_asks_meanwhile_whether_the_server_sleeps_is_told(self, world):
        """None takes a slot: nobody would release it for the others."""
        world.clock.ahead += 2
        with stopped(world.server):
            asks = [asking(world, prompt_of(seed)) for seed in range(3)]
            await world.until(lambda: world.scheduler.waiting == 3)
            await world.scheduler.aclose()
            for late in asks:
                with pytest.raises(EngineUnavailable, match="lost"):
                    async with asyncio.timeout(WAIT_S):
                        await late
        assert world.operations() == [None, None]

    async def test_what_still_runs_tells_nothing_any_more(self, world):
        """The slots, by then, may be another scheduler's, who tells the same mirror."""
        async with world.scheduler.lease(SlotRequest(prompt_of(1))) as lease:
            await world.send(lease)
            await world.scheduler.aclose()
        events = world.mirror.follow()
        assert [type(await anext(events)) for _ in range(2)] == [ViewLost, ViewCurrent]
        await events.aclose()

    @pytest.mark.parametrize("turns", range(5))
    async def test_a_turn_that_comes_in_the_last_moment_is_none(self, world, turns):
        """The slots are released, and the scheduler is closed so many turns of the loop later."""
        scheduler, over = world.scheduler, asyncio.Event()
        works = [asyncio.create_task(scheduler.take(slot, SAVE, lambda _: over.wait())) for slot in (0, 1)]

        async def start():
            async with scheduler.lease(SlotRequest(prompt_of(1))):
                assert not over.is_closed, "it started on a server that may be another scheduler's"

        over.is_closed = False
        waits = asyncio.create_task(start())
        await world.until(lambda: scheduler.waiting == 1)
        over.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        over.is_closed = True
        await scheduler.aclose()
        with suppress(EngineUnavailable):
            await waits
        await asyncio.wait(works)


class TestRandom:
    """Whatever happens on three slots, nothing is said of one that is not so."""

    MESSAGES = ("Hello there", "What is a cache?", "zażółć 🙂", "one two three four five")

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_what_is_said_of_slots_is_so(self, start_llama, save_dir, seed):
        rng = Random(seed)  # noqa: S311 - the same acts each time
        server = start_llama(*SMALL_STEPS, slots=3, ctx=1024, save_dir=save_dir)
        async with scheduler_world(server, host_bytes=3 << 20) as world:
            for _ in range(30):
                act = rng.choice([self.ask, self.ask, self.chat, self.several, self.file, self.bring])
                await act(world, rng)
                await world.idle()
                await world.check()
            counts = world.contents.counts
            assert min(counts.saves, counts.restores) > 0
            # A file may be replaced or evicted between the plan and its restore: then there is none.
            assert (counts.strangers, counts.failed_saves) == (0, 0)
            await world.scheduler.reconcile()

    def sending(self, rng):
        """Fields of a request, and when its client leaves: half of them stay."""
        fields = {"max_tokens": rng.choice([1, 8, 40]), "temperature": rng.choice([0, 1.5]), "seed": 1}
        if rng.random() < 0.3:
            fields["stop"] = ["e", " the"]
        if rng.random() < 0.3:
            fields["return_progress"] = True
        return fields | {"chunks": rng.choice([None, None, None, None, NEVER_SENT, 0, 1, 3])}

    async def ask(self, world, rng, salts=("a", "a", None)):
        tokens = prompt_of(rng.randrange(5), rng.choice([20, 90, 300]), head=rng.choice([0, 64]))
        await world.ask(tokens, rng.choice(salts), **self.sending(rng))

    async def chat(self, world, rng):
        messages = [{"role": "user", "content": text} for text in rng.sample(self.MESSAGES, 2)]
        tokens = await tokenize(world.control, CHAT, JsonBody(msgspec.json.encode({"messages": messages})))
        await world.ask(tokens, path=CHAT, messages=messages, **self.sending(rng))

    async def several(self, world, rng):
        """Five at once, one of which is cancelled somewhere."""
        asks = [asyncio.create_task(self.ask(world, rng)) for _ in range(5)]
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        asks[rng.randrange(5)].cancel()
        await asyncio.wait(asks)

    async def file(self, world, rng):
        """A slot is saved, or emptied, or gets any file of them."""
        slot = rng.randrange(3)
        act = rng.choice([world.save, world.save, world.erase, None])
        if act is not None:
            await act(slot)
        elif world.entries():
            await world.restore(slot, rng.choice(world.entries()))

    async def bring(self, world, rng):
        if world.entries():
            await world.scheduler.bring(rng.choice(world.entries()))
