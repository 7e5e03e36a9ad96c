"""The half of a request beside the answer. Both halves, over real sockets: tests/live/test_halves.py."""

import asyncio
from types import SimpleNamespace

import pytest

from engine_adapter import EngineRejected
from proxy.core.life import Cause
from proxy.steps import prompt_half
from proxy.steps.prompt_half import PromptHalf


@pytest.fixture
def half(monkeypatch):
    """Makes a half whose engine does what `run` says."""

    def make(run, *, is_refused=False) -> PromptHalf:
        made = PromptHalf(
            transport=None,
            ready=None,
            engine=SimpleNamespace(id="p"),
            lease=None,
            meeting={},
            leg=None,
            is_refused=lambda: is_refused,
            ingest=None,
        )
        monkeypatch.setattr(PromptHalf, "_run", lambda _self: run(made))
        return made

    return make


async def computes(half, takes=0.0):
    await asyncio.sleep(takes)
    half.answered, half.cached_tokens = 1.0, 16


async def refuses(_half):
    raise EngineRejected("no", status=503)


async def answered(half, *, begins_after=0.0, takes=0.0):
    await asyncio.sleep(begins_after)
    half.begins()
    await asyncio.sleep(takes)
    return "the answer"


class TestInTime:
    async def test_both_run_at_once(self, half):
        one = half(lambda each: computes(each, 0.1))
        assert await one.in_time(answered(one, begins_after=0.05)) == "the answer"
        assert one.cached_tokens == 16, "it was waited for"

    async def test_a_half_that_fails_ends_the_answer(self, half):
        one, ended = half(refuses), False

        async def hangs():
            nonlocal ended
            try:
                await asyncio.sleep(60)
            finally:
                ended = True

        with pytest.raises(EngineRejected, match="no"):
            await one.in_time(hangs())
        assert ended
        assert one.is_to_blame(Cause.ENGINE_REFUSED)

    async def test_but_not_one_that_has_begun(self, half):
        async def fails(each):
            await asyncio.sleep(0.05)
            await refuses(each)

        one = half(fails)
        assert await one.in_time(answered(one, takes=0.2)) == "the answer"
        assert not one.is_to_blame(Cause.ENGINE_REFUSED)

    async def test_nor_an_error_that_the_client_gets(self, half):
        async def refused():
            await asyncio.sleep(0.1)
            return "an error"

        assert await half(refuses, is_refused=True).in_time(refused()) == "an error"

    async def test_a_bug_in_it_ends_the_answer_too(self, half):
        async def breaks(_half):
            raise KeyError("bug")

        with pytest.raises(KeyError, match="bug"):
            await half(breaks).in_time(asyncio.sleep(60))

    async def test_an_answer_that_fails_ends_the_half(self, half):
        one, ended = half(lambda each: computes(each, 60)), asyncio.Event()

        async def fails():
            await asyncio.sleep(0.01)
            (task,) = [each for each in asyncio.all_tasks() if each.get_name() == "prompt half"]
            task.add_done_callback(lambda _: ended.set())
            raise EngineRejected("full", status=503)

        with pytest.raises(EngineRejected, match="full"):
            await one.in_time(fails())
        assert not one.is_to_blame(Cause.ENGINE_REFUSED)
        assert one.is_to_blame(Cause.ENGINE_LATE), "the other one waited for it"
        await asyncio.wait_for(ended.wait(), 1)

    async def test_a_report_that_does_not_come_is_not_waited_for_long(self, half, monkeypatch):
        monkeypatch.setattr(prompt_half, "LAST_S", 0.05)
        one = half(lambda each: computes(each, 60))
        assert await asyncio.wait_for(one.in_time(answered(one)), 5) == "the answer"
        assert one.cached_tokens is None

    async def test_a_time_limit_of_something_else_stays_one(self, half):
        async def late():
            raise TimeoutError("of a socket")

        with pytest.raises(TimeoutError, match="of a socket"):
            await half(computes).in_time(late())


async def test_the_kv_moves_once_the_prompt_is_computed(half):
    one = half(computes)
    assert one.moves_since(5.0) == 5.0
    one.answered = 7.0
    assert one.moves_since(5.0) == 7.0
    assert not one.is_to_blame(Cause.ENGINE_LATE)
