import io
import sys

import pytest

from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.startup_bar import summary, waiting_bar
from tests.fakes import FakeAdapter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def fleet_of(*states):
    fleet = Fleet()
    for number, state in enumerate(states):
        fleet.add(FakeAdapter(f"e{number}")).state = state
    return fleet


@pytest.mark.parametrize(
    ("states", "has_joined", "said"),
    [
        ((), True, (0, "engines ready")),
        ((EngineState.READY, EngineState.CONNECTING), True, (1, "engines ready, e1 connecting")),
        (
            (EngineState.DOWN, *[EngineState.CONNECTING] * 4),
            True,
            (0, "engines ready, e0 down, e1 connecting, e2 connecting, 2 more"),
        ),
        ((EngineState.READY,), False, (1, "engines ready, asking other kvpins what they know")),
    ],
)
def test_what_it_says(states, has_joined, said):
    assert summary(fleet_of(*states), has_joined=has_joined) == said


def test_on_a_terminal_lines_appear_above_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    fleet = fleet_of(EngineState.READY, EngineState.CONNECTING)
    with waiting_bar(fleet, lambda: True) as draw:
        draw()
        print("a line of the text")  # noqa: T201
        print("a line of the log", file=sys.stderr)  # noqa: T201
    written = out.getvalue()
    assert "1/2 engines ready, e1 connecting" in written
    assert written.index("a line of the text") < written.index("a line of the log") < written.rindex("1/2")
    assert err.getvalue() == ""
    assert sys.stderr is err


@pytest.mark.parametrize("of", ["stdout", "stderr"])
def test_nothing_where_one_of_both_goes_elsewhere(monkeypatch, of):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, of, io.StringIO())
    with waiting_bar(fleet_of(EngineState.CONNECTING), lambda: True) as draw:
        draw()
    assert out.getvalue() == err.getvalue() == ""
