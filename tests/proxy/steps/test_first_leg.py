"""The time in which KV is surely kept. The legs themselves, over real sockets: tests/live/test_pairs.py."""

import asyncio
from time import monotonic

import pytest

from engine_adapter import EngineLate, EngineRejected, Handover
from proxy.steps import first_leg
from proxy.steps.first_leg import Prefilled
from proxy.steps.forward import Forwarded

NOTHING = Handover({}, 0)


def kept_for(seconds: float, *, is_checked: bool = True) -> Prefilled:
    return Prefilled("p", NOTHING, monotonic() + seconds, is_checked)


async def answered(prefilled, *, begins_after=0.0, takes=0.0) -> Forwarded:
    await asyncio.sleep(begins_after)
    prefilled.begins()
    await asyncio.sleep(takes)
    return Forwarded(200)


class TestPrefilled:
    async def test_an_answer_must_begin_in_time_and_may_then_take_any(self):
        prefilled = kept_for(0.2)
        assert await prefilled.in_time(answered(prefilled, takes=0.4)) == Forwarded(200)
        assert prefilled.is_over

    async def test_one_that_has_not_begun_by_then_is_cancelled(self):
        prefilled, cancelled = kept_for(0.05), False

        async def silent():
            nonlocal cancelled
            try:
                await asyncio.sleep(5)
            finally:
                cancelled = True

        with pytest.raises(EngineLate, match="no answer while engine 'p' surely kept the prompt's KV for it"):
            await prefilled.in_time(silent())
        assert cancelled

    async def test_one_that_began_while_kvpin_was_paused_is_refused(self):
        prefilled = kept_for(0.0)
        with pytest.raises(EngineLate):
            prefilled.begins()

    async def test_after_that_nothing_is_sent(self):
        prefilled, sent = kept_for(-1.0), []

        async def send():
            sent.append(1)

        with pytest.raises(EngineLate):
            await prefilled.in_time(send())
        assert sent == []

    async def test_a_time_limit_of_something_else_stays_one(self):
        prefilled = kept_for(5.0)

        async def late():
            raise TimeoutError("of a socket")

        with pytest.raises(TimeoutError, match="of a socket"):
            await prefilled.in_time(late())

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
        with first_leg._Silence() as silence:
            await asyncio.sleep(0)
        assert before <= silence.surely <= monotonic()

    async def test_follows_two_ticks_behind(self, monkeypatch):
        monkeypatch.setattr(first_leg, "TICK_S", 0.02)
        began = monotonic()
        with first_leg._Silence() as silence:
            await asyncio.sleep(0.3)
        assert began + 0.1 < silence.surely < monotonic() - 0.01

    async def test_a_pause_is_no_silence(self, monkeypatch):
        """What came while kvpin was paused may have come at its beginning."""
        monkeypatch.setattr(first_leg, "TICK_S", 0.02)
        with first_leg._Silence() as silence:
            await asyncio.sleep(0.1)
            paused = monotonic()
            time_sleep(0.3)
            await asyncio.sleep(0)  # the overdue tick
            await asyncio.sleep(0)
        assert silence.surely <= paused


def time_sleep(seconds: float) -> None:
    """Holds the event loop up, as a pause of the process does."""
    end = monotonic() + seconds
    while monotonic() < end:
        pass
