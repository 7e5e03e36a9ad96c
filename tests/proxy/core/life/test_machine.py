"""Each life of `playbooks.txt`, and every event in a state that does not take it."""

import re
from pathlib import Path

import pytest

from proxy.core.life import (
    Admitted,
    Answered,
    Answering,
    Began,
    Blame,
    BlameEngine,
    Cause,
    End,
    Ended,
    Entered,
    Failed,
    Interrupt,
    InTurn,
    Leased,
    Left,
    Life,
    Lost,
    NoneLeft,
    Place,
    Placed,
    Prepared,
    Rules,
    Run,
    Sent,
    Tick,
    UnexpectedEvent,
)
from proxy.core.retry_budget import FLOOR, RetryBudget

RULES = Rules(first_byte_s=10, idle_s=8, total_s=100, retries=2, queue_s=5)
RULES_UNDER = {
    "without a total time": Rules(first_byte_s=10, idle_s=8, retries=2, queue_s=5),
    "without retries": Rules(first_byte_s=10, idle_s=8, total_s=100, retries=0),
}


def read(text):
    """The playbooks by heading and name, each as lines."""
    macros = dict(re.findall(r"^(@.*) =\n((?:  .*\n)+)", text, re.MULTILINE))
    heading, books = "", {}
    for block in text.partition("\n# ")[2].split("\n\n"):
        if re.match(r"(# )?[A-Z w][^:]*$", block):
            heading = block.removeprefix("# ").strip()
            continue
        name, _, lines = block.partition(":\n")
        for macro, expanded in macros.items():
            lines = re.sub(rf"^ *{re.escape(macro)}$\n?", expanded, lines, flags=re.MULTILINE)
        books[heading, name.strip()] = [line.strip() for line in lines.splitlines()]
    return books


BOOKS = read((Path(__file__).parent / "playbooks.txt").read_text())


class Error(Exception):
    """The error of a failed step."""


def failed(cause, *how):
    """`by NAME` at the end names the engine, if it is another one."""
    *how, engine = (*how[:-2], how[-1]) if how[-2:-1] == ("by",) else (*how, None)
    return Failed(Cause(cause), Error(cause), bool(how), how == ["goes", "on"], engine)


EVENTS = {
    "prepared": lambda *once: Prepared(can_repeat=not once),
    "placed": Placed,
    "none": lambda _left: NoneLeft(),
    "entered": Entered,
    "sent": Sent,
    "began": lambda *socket: Began(is_socket=bool(socket)),
    "answered": lambda *error: Answered(is_error=bool(error)),
    "failed": failed,
    "lost": lambda received="0": Lost(int(received)),
    "tick": lambda *how: Tick(0, at_client=True) if how == ("at", "client") else Tick(*map(int, how)),
    "left": lambda cause: Left(Cause(cause)),
}


def event_of(words):
    """The event that a script's words mean."""
    name, *arguments = words.split()
    return EVENTS[name](*arguments)


def words_of(command):
    """A command in a script's words."""
    match command:
        case Place(without=without, waits=waits):
            names = f" without {' '.join(sorted(without))}" if without else ""
            return f"place{names}{', may wait' if waits else ''}"
        case Run(turn=turn):
            return f"run {turn.engine}"
        case BlameEngine(attempt=attempt):
            assert attempt.cause.blame is not Blame.NOBODY
            return f"blame {attempt.engine} {attempt.cause.blame.value}"
        case Interrupt(cause=cause):
            return f"interrupt {cause}"
        case End(cause=cause):
            return f"end {cause}"


def play(lines, rules=RULES, budget=None):
    """Plays a script. Returns the life at its end."""
    life = Life(rules, budget or RetryBudget(), 0.0)
    for line in lines:
        happens, arrow, expected = line.partition("->")
        assert arrow, line
        at, words = happens.split(maxsplit=1)
        got = "; ".join(map(words_of, life.take(float(at), event_of(words))))
        assert got == expected.strip(), f"{line!r}: {got}"
    return life


@pytest.mark.parametrize(("heading", "name"), BOOKS)
def test_playbook(heading, name):
    budget = RetryBudget()
    if heading == "with an empty budget of retries":
        for _ in range(int(FLOOR)):
            assert budget.take(0.0)
    play(BOOKS[heading, name], RULES_UNDER.get(heading, RULES), budget)


def test_there_are_enough_of_them():
    assert len(BOOKS) >= 80
    assert sum(any("end" in line for line in lines) for lines in BOOKS.values()) > 40


ON_A = ["0 prepared -> place, may wait", "0 placed a -> run a", "0 entered ->", "0 sent ->"]
START = {
    Admitted: ON_A[:1],
    InTurn: ON_A[:2],
    Leased: ON_A,
    Answering: [*ON_A, "1 began ->"],
    Ended: ["0 left client_left -> end client_left"],
}
TAKEN = {
    Admitted: {"prepared", "placed a", "none left", "answered", "failed bug", "tick", "left client_left"},
    InTurn: {"entered", "failed bug", "tick", "left client_left"},
    Leased: {"sent", "began", "answered", "failed bug", "lost", "tick", "left client_left"},
    Answering: {"answered", "failed bug", "lost", "tick", "left client_left"},
    Ended: set(),
}


@pytest.mark.parametrize("state", START)
@pytest.mark.parametrize("words", sorted(set().union(*TAKEN.values())))
def test_an_event_that_does_not_fit_is_an_error_at_once(state, words):
    life = play(START[state])
    assert isinstance(life.state, state)
    if words in TAKEN[state]:
        life.take(1.0, event_of(words))
        return
    before = life.state
    with pytest.raises(UnexpectedEvent, match=state.__name__):
        life.take(1.0, event_of(words))
    assert life.state is before


def test_a_life_that_is_given_up_has_a_cause():
    life = Life(RULES, RetryBudget(), 0.0)
    assert (life.turn, life.ended(1.0, Cause.STOPPING), life.ended(2.0)) == (None, "stopping", "stopping")
    assert life.deadline == float("inf")
    assert play(START[Leased]).turn is not None
    assert play(START[Answering]).turn is not None
