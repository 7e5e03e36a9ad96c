"""Answers about slots that are odd, late or lost. Those of real servers: test_contents.py."""

import asyncio
import math
from contextlib import suppress

import msgspec
import pytest

from engine_adapter.errors import EngineLost, EngineUnavailable
from engine_adapter.llama_server import slot_io
from engine_adapter.llama_server.slot_io import SlotState, until_all_arrived, when_idle
from tests.fakes import FakeEngine
from tests.kv_world import until

NAME = "kvpin-slot-io.bin"


# --- when a server is done with its slots --------------------------------------------------------------


def slots(*busy, n_tokens=None):
    return [
        {"id": i, "n_ctx": 8, "is_processing": processing, "n_prompt_tokens": n_tokens}
        for i, processing in enumerate(busy)
    ]


async def test_a_slot_is_read_until_it_is_idle(control_of, monkeypatch):
    monkeypatch.setattr(slot_io, "_POLL_S", (0.0, 0.001))
    answers = [slots(True, True), slots(True, False), slots(True, True), slots(False, True, n_tokens=5)]

    async def script(exchange):
        await exchange.send(answers.pop(0))

    async with FakeEngine(script=script) as engine:
        state = await when_idle(control_of(engine.url), 0)
    assert (state.is_processing, state.n_tokens, answers) == (False, 5, [])


async def test_a_question_that_is_not_answered_is_asked_anew(control_of, monkeypatch):
    monkeypatch.setattr(slot_io, "_ASK_S", 0.05)
    asked = []

    async def script(exchange):
        asked.append(exchange.target)
        if len(asked) == 1:
            await asyncio.sleep(math.inf)
        await exchange.send(slots(False))

    async with FakeEngine(script=script) as engine:
        assert [each.id for each in await slot_io.read_slots(control_of(engine.url))] == [0]
    assert asked == ["/slots", "/slots"]


@pytest.mark.live
async def test_a_server_ends_although_it_is_asked_about_its_slots_all_the_time(start_llama, control_of):
    server = start_llama(slots=2)
    control = control_of(server.url)

    async def ask():
        with suppress(EngineUnavailable):
            while True:
                await slot_io.read_slots(control)

    others = [asyncio.create_task(ask()) for _ in range(4)]
    await asyncio.sleep(0.2)
    server.process.terminate()
    assert await asyncio.to_thread(server.process.wait, 30) in (0, -15)
    await asyncio.gather(*others)


async def test_requests_that_were_sent_have_arrived_when_a_question_behind_them_is_answered(control_of):
    answered = asyncio.Event()

    async def script(exchange):
        assert exchange.target == "/lora-adapters"
        answered.set()
        await exchange.send({"error": {"message": "no such route"}}, 404)

    async with FakeEngine(script=script) as engine:
        await until_all_arrived(control_of(engine.url))
        assert answered.is_set()


class TestALostAnswer:
    """The connection of a save is half-open: nothing comes back on it."""

    @pytest.fixture
    async def server(self, monkeypatch):
        """Answers a save after `looks` questions."""
        monkeypatch.setattr(slot_io, "LOOK_S", 0.02)
        monkeypatch.setattr(slot_io, "LATE_S", 0.02)
        async with FakeEngine() as server:
            server.busy, server.knows_the_question, server.looks = False, True, math.inf
            is_over = asyncio.Event()

            async def script(exchange):
                if exchange.target.startswith("/slots/"):
                    await is_over.wait()
                    await exchange.send({"n_saved": 1, "n_written": 2, "timings": {"save_ms": 3}})
                    return
                if len(server.seen) > server.looks:
                    is_over.set()
                if exchange.target == "/slots":
                    await exchange.send([{"id": 0, "n_ctx": 8, "is_processing": server.busy}])
                else:
                    await exchange.send([], status=200 if server.knows_the_question else 404)

            server.script = script
            yield server

    async def test_it_is_noticed_once_the_server_is_done_with_all_it_was_sent(self, server, control_of):
        with pytest.raises(EngineLost, match="slot 0: the answer to 'save' was lost"):
            await slot_io.save(control_of(server.url), 0, NAME)

    @pytest.mark.parametrize(("busy", "knows"), [(True, True), (False, False)])
    async def test_a_save_that_waits_or_cannot_be_looked_after_gets_its_time(
        self, server, control_of, busy, knows
    ):
        server.busy, server.knows_the_question, server.looks = busy, knows, 5
        assert (await slot_io.save(control_of(server.url), 0, NAME)).tokens == 1


async def test_a_server_that_ends_is_not_kept_by_saves_that_wait(
    start_llama, save_dir, control_of, monkeypatch
):
    monkeypatch.setattr(slot_io, "LOOK_S", 0.2)
    server = start_llama(save_dir=save_dir)
    control, begun = control_of(server.url), set()

    async def save_again_and_again(slot):
        while True:
            begun.add(slot)
            await slot_io.save(control, slot, f"{NAME}-{slot}")

    saves = [asyncio.create_task(save_again_and_again(slot)) for slot in range(4)]
    await until(lambda: len(begun) == len(saves))
    server.process.terminate()
    for save in saves:
        with pytest.raises(EngineUnavailable):
            await save
    assert await asyncio.to_thread(server.process.wait, 10) == 0


@pytest.mark.parametrize(
    ("fields", "has_draft"),
    [
        ({}, False),
        ({"speculative": False, "params": {"speculative.types": "none"}}, False),
        ({"speculative": True}, None),
        ({"speculative": True, "params": {"speculative.types": "draft-simple,ngram-mod"}}, True),
        ({"speculative": True, "params": {"speculative.types": "ngram-mod"}}, False),
        ({"speculative": True, "params": {"temperature": 0}}, True),  # older servers have draft models alone
    ],
)
def test_a_slot_says_whether_a_draft_model_proposes_tokens(fields, has_draft):
    state = msgspec.convert({"id": 0, "n_ctx": 512, "is_processing": False, **fields}, SlotState)
    assert state.has_draft is has_draft
