"""Each life of `playbooks.txt`, and everything that may not happen in a phase."""

import re
from pathlib import Path

import pytest

from proxy.core.life import (
    MOST_RETRIES,
    RETRIES_PER_S,
    RETRY_FLOOR,
    Blame,
    Cause,
    Life,
    Phase,
    RetryBudget,
    Rules,
    WrongPhase,
)

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


def failed(life, now, cause, *how):
    """`by NAME` at the end names the engine, if it is another one."""
    *how, engine = (*how[:-2], how[-1]) if how[-2:-1] == ("by",) else (*how, None)
    goes_on = how == ["goes", "on"]
    return life.failed(now, Cause(cause), Error(cause), has_begun=bool(how), can_go_on=goes_on, engine=engine)


HAPPENS = {
    "prepared": lambda life, _, *once: life.prepared(can_repeat=not once),
    "placed": lambda life, _, engine: life.placed(engine),
    "none": lambda life, _, _left: life.none_left(),
    "entered": lambda life, now: life.entered(now),
    "sent": lambda life, _: life.sent(),
    "began": lambda life, now, *socket: life.began(now, is_socket=bool(socket)),
    "answered": lambda life, _, *error: life.answered(is_error=bool(error)),
    "failed": failed,
    "lost": lambda life, now, received="0": life.lost(now, int(received)),
    "tick": lambda life, now, *how: (
        life.look(now, at_client=True) if how == ("at", "client") else life.look(now, *map(int, how))
    ),
    "left": lambda life, _, cause: life.ended(Cause(cause)) and None,
}
# What the caller does next, if the request goes on.
NEXT = {"prepared": "place, may wait", "failed": "place without {tried}", "placed": "run {engine}"}


def happens(life, at, words):
    """Lets something happen. Returns what follows, in a script's words."""
    name, *arguments = words.split()
    follows = HAPPENS[name](life, float(at), *arguments)
    if isinstance(follows, Cause):
        return f"interrupt {follows}"
    told = []
    for attempt in follows or ():
        assert attempt.cause.blame is not Blame.NOBODY
        told.append(f"blame {attempt.engine} {attempt.cause.blame.value}")
    if life.phase is Phase.ENDED:
        told.append(f"end {life.cause}")
    elif name in NEXT:
        told.append(NEXT[name].format(tried=" ".join(sorted(life.tried)), engine=life.engine).rstrip())
    return "; ".join(told)


def play(lines, rules=RULES, budget=None):
    """Plays a script. Returns the life at its end."""
    life = Life(rules, budget or RetryBudget(), 0.0)
    for line in lines:
        before, arrow, expected = line.partition("->")
        assert arrow, line
        got = happens(life, *before.split(maxsplit=1))
        assert got == expected.strip(), f"{line!r}: {got}"
    return life


@pytest.mark.parametrize(("heading", "name"), BOOKS)
def test_playbook(heading, name):
    budget = RetryBudget()
    if heading == "with an empty budget of retries":
        for _ in range(int(RETRY_FLOOR)):
            assert budget.take(0.0)
    play(BOOKS[heading, name], RULES_UNDER.get(heading, RULES), budget)


def test_there_are_enough_of_them():
    assert len(BOOKS) > 50


ON_A = ["0 prepared -> place, may wait", "0 placed a -> run a", "0 entered ->", "0 sent ->"]


@pytest.mark.parametrize(
    ("cause", "follows"),
    [
        ("engine_died", "blame a suspect; place without a"),
        ("engine_garbled", "blame a suspect; place without a"),
        ("engine_late", "blame a suspect; place without a"),
        ("engine_lacks", "blame a lacks; place without a"),
        ("engine_refused", "place without a"),
        ("engine_lost", "place without a"),
        ("engine_busy", "place without a"),
        ("engine_changed", "place without"),  # another process, which did not get the request
        ("engine_rejected", "end engine_rejected"),
        ("invalid", "end invalid"),
        ("bug", "end bug"),
    ],
)
def test_which_failures_before_an_answer_another_engine_may_mend(cause, follows):
    play([*ON_A, f"1 failed {cause} -> {follows}"])


START = {
    Phase.ADMITTED: ON_A[:1],
    Phase.IN_TURN: ON_A[:2],
    Phase.LEASED: ON_A,
    Phase.ANSWERING: [*ON_A, "1 began ->"],
    Phase.ENDED: ["0 left client_left -> end client_left"],
}
TAKEN = {
    Phase.ADMITTED: {"prepared", "placed a", "none left", "answered", "failed bug", "tick"},
    Phase.IN_TURN: {"entered", "failed bug", "tick"},
    Phase.LEASED: {"sent", "began", "answered", "failed bug", "lost", "tick"},
    Phase.ANSWERING: {"answered", "failed bug", "lost", "tick"},
    Phase.ENDED: set(),
}


@pytest.mark.parametrize("phase", START)
@pytest.mark.parametrize("words", sorted(set().union(*TAKEN.values())))
def test_what_cannot_be_now_is_an_error_at_once(phase, words):
    life = play(START[phase])
    assert life.phase is phase
    if words in TAKEN[phase]:
        happens(life, 1.0, words)
        return
    with pytest.raises(WrongPhase, match=phase.value):
        happens(life, 1.0, words)
    assert (life.phase, life.attempts) == (phase, ())


def test_a_life_that_is_given_up_has_a_cause():
    life = Life(RULES, RetryBudget(), 0.0)
    assert (life.is_on_engine, life.ended(Cause.STOPPING), life.ended()) == (False, "stopping", "stopping")
    assert life.deadline == float("inf")
    assert play(START[Phase.LEASED]).is_on_engine
    assert play(START[Phase.ANSWERING]).is_on_engine


def taken(budget, now):
    count = 0
    while budget.take(now):
        count += 1
    return count


def test_a_few_retries_are_always_there():
    budget = RetryBudget()
    assert taken(budget, 0.0) == RETRY_FLOOR
    assert taken(budget, 3 / RETRIES_PER_S) == 3
    assert taken(budget, 1e6) == RETRY_FLOOR


def test_each_request_adds_a_fifth():
    budget = RetryBudget()
    taken(budget, 0.0)
    for _ in range(50):
        budget.requested()
    assert taken(budget, 0.0) in (9, 10)  # of binary fractions
    for _ in range(10_000):
        budget.requested()
    assert MOST_RETRIES <= taken(budget, 0.0) <= MOST_RETRIES + 1
