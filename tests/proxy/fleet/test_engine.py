from array import array
from dataclasses import replace

import pytest

from engine_adapter import Capability
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.prompt import Prompt
from tests.fakes import INFO, FakeAdapter, add_ready

PROMPT = Prompt(array("i", range(40)))


@pytest.fixture
def fleet():
    return Fleet()


class TestEngine:
    def test_a_failed_request_makes_a_ready_one_suspect(self, fleet):
        engine = add_ready(fleet, "a")
        engine.suspect(RuntimeError("reset"))
        assert (engine.state, engine.last_error, engine.check_now.is_set()) == ("suspect", "reset", True)
        engine.state = EngineState.DRAINING
        engine.suspect(RuntimeError("again"))
        assert engine.state == "draining"

    def test_can_do_what_it_declared_once_connected(self, fleet):
        engine = fleet.add(FakeAdapter("a"))
        assert not engine.can(Capability.PIN)
        fleet.join(engine, replace(INFO, capabilities=frozenset({Capability.PIN})))
        assert engine.can(Capability.PIN)
