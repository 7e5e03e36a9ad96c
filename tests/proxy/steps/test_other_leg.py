"""Legs beside the one that answers. Over real sockets: tests/live/test_pairs.py and test_halves.py."""

import asyncio
from time import monotonic
from types import SimpleNamespace

import pytest

from engine_adapter import EngineDied, EngineLate, EngineRejected, Handover, Hold
from proxy.core.life import Cause
from proxy.steps import other_leg
from proxy.steps.forward import Forwarded
from proxy.steps.other_leg import FirstLeg, PromptHalf

LEG = dict.fromkeys(("transport", "ready", "lease", "ingest")) | {"engine": SimpleNamespace(id="p")}


def kept_for(seconds: float) -> FirstLeg:
    of_transfer = dict.fromkeys(("transfer", "path", "body"))
    return FirstLeg(**LEG, **of_transfer, is_apart=False, is_checked=True, until=monotonic() + seconds)


async def answered(prefilled, *, begins_after=0.0, takes=0.0) -> Forwarded:
    await asyncio.sleep(begins_after)
    prefilled.begins()
    await asyncio.sleep(takes)
    return Forwarded(200)


class TestKeptKv:
    async def test_an_answer_must_begin_in_time_and_may_then_take_any(self):
        prefilled = kept_for(1.0)
        assert await prefilled.in_time(answered(prefilled, takes=1.1)) == Forwarded(200)
        assert prefilled.is_over

    async def test_one_that_began_while_kvpin_was_paused_is_refused(self):
        prefilled = kept_for(0.0)
        with pytest.raises(EngineLate):
            prefilled.begins()

    async def test_a_time_limit_of_something_else_stays_one(self):
        prefilled = kept_for(5.0)

        async def late():
            raise TimeoutError("of a socket")

        with pytest.raises(TimeoutError, match="of a socket"):
            await prefilled.in_time(late())

    async def test_of_an_answer_that_ended_with_its_first_token_none_is_handed_over(self):
        prefilled, hold = kept_for(5.0), Hold(None)
        prefilled.handover = Handover({}, 0)
        assert not await prefilled.hand_over(prefilled.engine, hold)
        assert hold == Hold(None)

    @pytest.mark.parametrize(("status", "kept"), [(400, 502), (401, 502), (422, 502), (429, 429), (503, 503)])
    async def test_a_refusal_is_about_the_kv_and_no_fault_of_the_client(self, status, kept):
        prefilled = kept_for(5.0)

        async def refused():
            raise EngineRejected("invalid state", status=status, headers={"retry-after": "3"})

        with pytest.raises(EngineRejected, match="invalid state") as caught:
            await prefilled.in_time(refused())
        assert caught.value.status == kept
        assert ("engine 'p' keeps" in str(caught.value)) == (kept != status)
        assert ("retry-after" in caught.value.headers) == (kept == status)


class TestSilence:
    async def test_begins_with_the_request(self):
        before = monotonic()
        with other_leg._Silence() as silence:
            await asyncio.sleep(0)
        assert before <= silence.surely <= monotonic()

    async def test_follows_two_ticks_behind(self, monkeypatch):
        monkeypatch.setattr(other_leg, "TICK_S", 0.02)
        began = monotonic()
        with other_leg._Silence() as silence:
            while silence.surely < began + 0.01:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        assert silence.surely <= silence._last - 0.019

    async def test_a_pause_is_no_silence(self, monkeypatch):
        """What came while kvpin was paused may have come at its beginning."""
        monkeypatch.setattr(other_leg, "TICK_S", 0.02)
        with other_leg._Silence() as silence:
            await asyncio.sleep(0.05)
            paused = monotonic()
            time_sleep(0.1)
            await asyncio.sleep(0)  # the overdue tick
            await asyncio.sleep(0)
        assert silence.surely <= paused


def time_sleep(seconds: float) -> None:
    """Holds the event loop up, as a pause of the process does."""
    end = monotonic() + seconds
    while monotonic() < end:
        pass


@pytest.fixture
def half(monkeypatch):
    """Makes a half whose engine does what `run` says."""

    def make(run, *, is_refused=False) -> PromptHalf:
        made = PromptHalf(**LEG, meeting={}, leg=None, is_refused=lambda: is_refused)
        monkeypatch.setattr(PromptHalf, "_run", lambda _self: run(made))
        return made

    return make


async def computes(half, takes=0.0):
    await asyncio.sleep(takes)
    half.answered, half.cached_tokens = 1.0, 16


class TestHalves:
    async def test_a_bug_in_it_ends_the_answer_too(self, half):
        async def breaks(_half):
            raise KeyError("bug")

        with pytest.raises(KeyError, match="bug"):
            await half(breaks).in_time(asyncio.sleep(60))

    async def test_both_halves_may_fail_in_one_turn(self, half):
        gone, complaints = asyncio.Event(), []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, told: complaints.append(told))

        async def fails(waits_first):
            await asyncio.sleep(0 if waits_first else 0.01)
            await gone.wait()
            raise EngineDied("p")

        answer = asyncio.create_task(half(fails).in_time(fails(None)))
        await asyncio.sleep(0.05)
        gone.set()
        with pytest.raises(EngineDied):
            await answer
        await asyncio.sleep(0)
        assert not complaints

    async def test_a_report_that_does_not_come_is_not_waited_for_long(self, half, monkeypatch):
        monkeypatch.setattr(other_leg, "LAST_S", 0.05)
        one = half(lambda each: computes(each, 60))
        assert await asyncio.wait_for(one.in_time(answered(one)), 30) == Forwarded(200)
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
