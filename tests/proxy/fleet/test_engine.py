import asyncio
import contextlib

import pytest
import structlog

from engine_adapter import EngineChanged
from proxy.fleet.engine import FALSE_DOUBTS, EngineState
from tests.fakes import add_ready


class TestEngine:
    def test_a_failed_request_makes_a_ready_one_suspect(self, fleet):
        engine = add_ready(fleet, "a")
        engine.suspect(RuntimeError("reset"))
        assert (engine.state, engine.last_error, engine.check_now.is_set()) == ("suspect", "reset", True)
        for state in (EngineState.DRAINING, EngineState.ELSEWHERE):
            engine.state = state
            engine.suspect(RuntimeError("again"))
            assert engine.state is state

    async def test_a_loss_is_logged_once_with_the_number_of_its_requests(self, fleet):
        engine = add_ready(fleet, "a")
        pool = fleet.pools["m"]
        placement = pool.place(pool.candidates(None), None)
        with structlog.testing.capture_logs() as logs, pool.lease(placement, None):
            for _ in range(5):
                engine.suspect(RuntimeError("reset"))
            engine.state = EngineState.DOWN
            engine.abandon()
            engine.suspect(RuntimeError("a stream that the loss ended"))
            engine.abandon()  # at the next attempt to connect
        assert [(log["event"], log.get("requests")) for log in logs] == [
            ("a request failed: checking its engine", None),
            ("requests failed because their engine was lost", 6),
        ]
        assert engine.last_error == "reset"


class TestDoubts:
    """An engine closed a connection: another process may answer from now on."""

    @pytest.mark.parametrize("is_same", [True, False])
    async def test_a_request_waits_for_the_check_and_is_not_sent_to_another_process(self, fleet, is_same):
        engine = add_ready(fleet, "a")
        prepared_for = engine.connections
        engine.doubt()
        assert engine.check_now.is_set()
        waiting = asyncio.create_task(engine.confirm(prepared_for))
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.is_same(engine.doubts) if is_same else engine.has_gone()
        with contextlib.nullcontext() if is_same else pytest.raises(EngineChanged):
            await asyncio.wait_for(waiting, 1)

    def test_a_doubt_during_the_check_needs_another_check(self, fleet):
        engine = add_ready(fleet, "a")
        engine.doubt()
        doubts = engine.doubts
        engine.doubt()
        engine.is_same(doubts)
        assert not engine.sure.is_set()

    def test_closing_by_habit_says_nothing(self, fleet):
        engine = add_ready(fleet, "a")
        for _ in range(FALSE_DOUBTS):
            engine.doubt()
            engine.is_same(engine.doubts)
        engine.check_now.clear()
        engine.doubt()
        assert (engine.sure.is_set(), engine.check_now.is_set()) == (True, False)
