"""After lost events kvpin never predicts a hit that does not happen; at worst it predicts too little.

One real vLLM with a replay buffer of 50 batches; its events pass through a relay.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

import httpx
import pytest

from tests.live.server_world import MODEL, WAIT_S
from tests.vllm_live.relay import Mode, running_link
from tests.vllm_live.vllm_world import BLOCK, VllmOptions, vllm_world

pytestmark = pytest.mark.live

BUFFER = 50
BLOCKS = 100
# How long predictions may be wrong after events stop.
SETTLED_S = 5.0


@pytest.fixture(scope="module")
def links():
    return []


@pytest.fixture(scope="module")
def world(tmp_path_factory, links):
    with ExitStack() as stack:

        def by_relay(server):
            links.append(stack.enter_context(running_link(server)))
            return links[-1].options

        options = VllmOptions(blocks=BLOCKS, buffer_steps=BUFFER)
        directory = tmp_path_factory.mktemp("vllm")
        yield stack.enter_context(vllm_world(directory, options, options_of=by_relay))


@pytest.fixture
def link(world, links):
    """kvpin's path to the events. Each test starts with an open path and a complete view."""
    links[0].set(Mode.PASS, Mode.PASS)
    world.until_exact()
    world.admin("flush", {"all": True})
    world.until_exact()
    return links[0]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request by kvpin: when it was sent, in seconds of the test, and its counts in tokens."""

    at_s: float
    predicted: int
    reported: int

    def __str__(self) -> str:
        return f"{self.at_s:.1f} s: {self.predicted}/{self.reported}"


def prompt(number: int, blocks: int = 6) -> list[int]:
    """Token ids of a prompt that shares nothing with another, a token longer than its full blocks."""
    return [300 + (number * 7919 + 31 * i) % 3600 for i in range(blocks * BLOCK + 1)]


class Clock:
    def __init__(self, world):
        self._world = world
        self._started = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._started

    def ask(self, number: int, **fields) -> Asked:
        at = self.now
        answer = self._world.post("completions", {"prompt": prompt(number), "max_tokens": 1, **fields})
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Asked(at, int(answer.headers["x-kvpin-predicted-tokens"]), cached)


@pytest.fixture
def clock(world):
    return Clock(world)


def behind_its_back(world, numbers, blocks=6):
    """Sends requests past kvpin."""
    for number in numbers:
        body = {"model": MODEL, "prompt": prompt(number, blocks), "max_tokens": 1, "temperature": 0}
        url = f"{world.servers[0].url}/v1/completions"
        httpx.post(url, json=body, timeout=WAIT_S, trust_env=False).raise_for_status()


def words(asked):
    return ", ".join(map(str, asked))


def imagined(asked):
    """Requests that reused less than predicted."""
    return [each for each in asked if each.predicted > each.reported]


def test_an_engine_killed_under_traffic(world, link, clock, tell):
    known = range(10, 16)
    assert [clock.ask(n).reported for n in known] == [0] * len(known)
    with traffic(clock, known) as answered:
        world.until(lambda: len(answered) > 20, "traffic")
        before = len(answered)
        world.restart()
        world.until_exact()
        start = len(answered)
        world.until(lambda: len(answered) > start + 30, "traffic after the restart")
    tell(
        f"{before} answered before the kill, {len(answered) - before} after it; "
        f"predicted hits that did not happen: {words(imagined(answered)) or 0}",
    )
    assert all(each.predicted == each.reported == 6 * BLOCK for each in answered[:before])
    assert imagined(answered) == []
    assert all(each.predicted == each.reported == 6 * BLOCK for each in answered[-10:])


@contextmanager
def traffic(clock, numbers):
    """Requests the prompts in turn, one at a time; single failures are ignored."""
    answered: list[Asked] = []
    end = threading.Event()

    def ask_on():
        while not end.is_set():
            for number in numbers:
                try:
                    answered.append(clock.ask(number))
                except (httpx.HTTPError, AssertionError):  # its only engine died, or is not back yet
                    end.wait(0.05)

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield answered
    finally:
        end.set()
        thread.join()


def test_a_proxy_that_joins_when_history_is_gone(world, link, clock, tell):
    known = range(20, 25)
    for number in known:
        clock.ask(number)
    behind_its_back(world, range(200, 200 + BUFFER + 10), blocks=1)
    world.restart_kvpin()
    asked = [[clock.ask(number) for number in known] for _ in range(3)]
    tell(*(f"round {at}: {words(each)}" for at, each in enumerate(asked)))
    assert [each for each in asked[0] if each.reported != 6 * BLOCK] == []  # there was something to know
    assert imagined([*chain(*asked)]) == []
    assert [each for each in asked[-1] if each.predicted != each.reported] == []


@pytest.mark.parametrize(
    ("events", "replay"),
    [
        (Mode.LOSE, Mode.PASS),
        (Mode.LOSE, Mode.HOLD),
        (Mode.HOLD, Mode.HOLD),
        (Mode.CUT, Mode.PASS),
        (Mode.CUT, Mode.CUT),
    ],
    ids=lambda mode: mode.value,
)
def test_more_batches_are_lost_than_the_engine_keeps(world, link, clock, tell, events, replay):
    known = range(30, 42)
    for number in known:
        clock.ask(number)
    link.set(events, replay)
    behind_its_back(world, range(300, 300 + BUFFER + 30), blocks=2)
    asked, blind_since = [], clock.now
    for number in known:
        asked.append(clock.ask(number))
        time.sleep(1.0)  # what is looked at is how this changes with time
    link.set(Mode.PASS, Mode.PASS)
    world.until_exact()
    again = [[clock.ask(number) for number in known] for _ in range(2)]
    settled = [each for each in asked if each.at_s - blind_since > SETTLED_S]
    tell(
        f"blind since {blind_since:.1f} s: {words(asked)}",
        *(f"once events flow again: {words(each)}" for each in again),
    )
    assert len(settled) > 3
    assert imagined([*settled, *again[0], *again[1]]) == []
    assert [each for each in again[1] if each.predicted != each.reported] == []
