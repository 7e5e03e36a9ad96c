"""When a server is done with its slots; tests/engine_adapter/llama_server/test_keeper.py has real ones."""

import asyncio

from engine_adapter.llama_server import settle
from engine_adapter.llama_server.settle import end_copies, until_all_arrived, when_idle
from tests.fakes import FakeEngine


def slots(*busy, n_tokens=None):
    return [
        {"id": i, "n_ctx": 8, "is_processing": processing, "n_prompt_tokens": n_tokens}
        for i, processing in enumerate(busy)
    ]


async def test_a_slot_is_read_until_it_is_idle(control_of, monkeypatch):
    monkeypatch.setattr(settle, "_POLL_S", (0.0, 0.001))
    answers = [slots(True, True), slots(True, False), slots(True, True), slots(False, True, n_tokens=5)]

    async def script(exchange):
        await exchange.send(answers.pop(0))

    async with FakeEngine(script=script) as engine:
        state = await when_idle(control_of(engine.url), 0)
    assert (state.is_processing, state.n_tokens, answers) == (False, 5, [])


async def test_requests_that_were_sent_have_arrived_when_a_question_behind_them_is_answered(control_of):
    answered = asyncio.Event()

    async def script(exchange):
        assert exchange.target == "/lora-adapters"
        answered.set()
        await exchange.send({"error": {"message": "no such route"}}, 404)

    async with FakeEngine(script=script) as engine:
        await until_all_arrived(control_of(engine.url))
        assert answered.is_set()


async def test_a_step_ends_copies(control_of):
    async def script(exchange):
        assert exchange.target == "/completion"
        assert (exchange.json["id_slot"], exchange.json["cache_prompt"]) == (1, False)
        await exchange.send({})

    async with FakeEngine(script=script) as engine:
        await end_copies(control_of(engine.url), 1)
        assert len(engine.seen) == 1
