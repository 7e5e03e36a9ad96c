"""How many Python functions kvpin calls for a request: a measure of its cost for a busy machine, too.

Requests are sent one after the other, with the mock engines and the load generator of `router_cost.py`. A
counter in kvpin (`counted_kvpin.py`) notes every call on its event loop. What an idle kvpin calls in the same
time is subtracted. A coroutine counts again whenever it goes on after an await.

    python benchmarks/call_count.py [--router kvpin] [--shapes whole,stream,…] [--requests 100] [--rows 40]
                                    [--before CHECKOUT]

`--before` counts those of another checkout of kvpin, too, which has a `.venv`. Functions come with their own
calls and the calls below them, per request.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from cost_native import MockEngine, NativeError, check_machine, mock_engine, play, write_bodies
from cost_routers import KVPIN, PROGRAMS, SUBJECTS, Place, running
from cost_work import CHUNKS, Chats, Load
from counted_kvpin import Count
from harness import ROOT, some_of
from large_tokenizer import QWEN_ENTRIES, QWEN_TEMPLATE, large_tokenizer
from router_peers import RouterUnavailableError, Start

ENGINES = 2
WARM_UPS = 16
SHORT, LONG = 100, 8000  # tokens
# From chunk to chunk: long enough that kvpin reads each by itself, also on a busy machine.
INTERVAL_US = 20_000
IDLE_S = 10.0
# Between health checks of an engine: what they call depends on how busy the machine is.
HEALTH_S = "600"
# What follows an answer: blocks stay pending for a quarter of a second.
FOLLOWS_S = 0.5
# For kvpin to begin or end a count.
TURN_S = 30.0
POLL_S = 0.02
# Paced streams take long: fewer of them.
PACED_SHARE = 10
COUNTED = Path(__file__).with_name("counted_kvpin.py")

# Called once for each piece that is read from an engine.
PIECE = "Connection.data_received (engine_adapter/http/connection.py)"
# Calls per request of each function: its own, and those below it.
Figures = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests that are counted; `is_next`: the next turns of chats, instead of the chats."""

    title: str
    load: Load
    is_next: bool = False


def shapes(requests: int) -> dict[str, Shape]:
    """All shapes by name."""

    def load(tokens: int, chunks: int = 0, interval_us: int = 0) -> Load:
        count = max(requests // PACED_SHARE, 2) if interval_us else requests
        return Load("", tokens, 1, count, count, chunks, interval_us)

    return {
        "whole": Shape("small, whole answer", load(SHORT)),
        "stream": Shape("small, stream of one chunk", load(SHORT, 1)),
        "paced": Shape(f"small, paced stream of {CHUNKS}, as it was read", load(SHORT, CHUNKS, INTERVAL_US)),
        "long": Shape("long, whole answer", load(LONG)),
        "next": Shape("its next turn", load(LONG), is_next=True),
    }


class Subject:
    """A kvpin that counts its calls, and writes each count to `file`."""

    def __init__(self, port: int, pid: int, file: Path) -> None:
        self._port, self._pid, self._file = port, pid, file
        self._idle = self._counted(lambda: time.sleep(IDLE_S))

    def play(self, bodies: Path, count: int) -> None:
        """Sends requests. Raises NativeError if one fails."""
        play_all(self._port, bodies, count)

    def per_request(self, bodies: Path, count: int) -> Figures:
        """Sends requests and counts. Raises NativeError if one fails."""

        def work() -> None:
            self.play(bodies, count)
            time.sleep(FOLLOWS_S)

        return net(self._counted(work), self._idle, count)

    def _counted(self, work: Callable[[], object]) -> Count:
        self._file.unlink(missing_ok=True)
        self._turn(self._file.exists)
        work()
        self._turn(lambda: self._file.stat().st_size > 0)
        return msgspec.json.decode(self._file.read_bytes(), type=Count)

    def _turn(self, is_done: Callable[[], bool]) -> None:
        """Begins or ends a count."""
        os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + TURN_S
        while not is_done():
            if time.monotonic() > deadline:
                raise NativeError(f"kvpin took no notice of SIGUSR1 within {TURN_S:g} s")
            time.sleep(POLL_S)


def play_all(port: int, bodies: Path, count: int) -> None:
    """Sends requests, one after the other. Raises NativeError if one fails."""
    played = play(port, 1, count, bodies)
    if played.failed:
        raise NativeError(f"{played.failed} of {count} requests failed: {played.errors[0]}")


def net(busy: Count, idle: Count, requests: int) -> Figures:
    """Calls per request, without those of an idle kvpin in the same time."""
    found: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for count, share in ((busy, 1 / requests), (idle, -busy.seconds / idle.seconds / requests)):
        for each in count.functions:
            found[each.name] += each.own * share
            below[each.name] += each.below * share
    return {name: (found[name], below[name]) for name in found}


def table(figures: Figures, before: Figures, rows: int) -> str:
    """The functions with the most calls, and all of them together."""
    lines = ["| function | own calls | with those below |" + (" before |" if before else "")]
    lines.append("|---|---:|---:|" + ("---:|" if before else ""))
    names = sorted(
        figures.keys() | before.keys(), key=lambda name: -max(_own(figures, name), _own(before, name))
    )
    for name in names[:rows]:
        own, below = figures.get(name, (0.0, 0.0))
        line = f"| `{name}` | {own:,.2f} | {below:,.1f} |"
        lines.append(line + (f" {_own(before, name):,.2f} |" if before else ""))
    return "\n".join(lines)


def total(figures: Figures) -> float:
    """All calls per request."""
    return sum(own for own, _ in figures.values())


def per_piece(paced: Figures, stream: Figures) -> float:
    """Calls for each further piece of a stream, by how often the two shapes' engines were read."""
    pieces = _own(paced, PIECE) - _own(stream, PIECE)
    return (total(paced) - total(stream)) / pieces


def _own(figures: Figures, name: str) -> float:
    return figures.get(name, (0.0, 0.0))[0]


def main() -> None:
    """Counts and prints."""
    arguments = _arguments()
    wanted = {name: shape for name, shape in shapes(arguments.requests).items() if name in arguments.shapes}
    checkouts = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    found: dict[str, dict[str, Figures]] = {}
    try:
        check_machine()
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engines = [stack.enter_context(mock_engine()) for _ in range(ENGINES)]
            tokenizer = large_tokenizer(QWEN_ENTRIES, QWEN_TEMPLATE)
            for name, checkout in checkouts.items():
                found[name] = _counts(arguments.router, checkout, wanted, engines, tokenizer, directory)
    except (NativeError, RouterUnavailableError) as error:
        raise SystemExit(f"call_count.py cannot count here: {error}") from error
    print(f"Calls of Python functions per request, {SUBJECTS[arguments.router].title}\n")
    print("| shape | " + " | ".join(found) + " |\n|---|" + "---:|" * len(found))
    for name, shape in wanted.items():
        print(
            f"| {shape.title} | " + " | ".join(f"{total(each[name]):,.0f}" for each in found.values()) + " |"
        )
    if {"paced", "stream"} <= wanted.keys():
        pieces = [per_piece(figures["paced"], figures["stream"]) for figures in found.values()]
        print("| each further piece of a stream | " + " | ".join(f"{each:,.1f}" for each in pieces) + " |")
    for name, shape in wanted.items() if arguments.rows else ():
        print(f"\n{shape.title}\n")
        print(table(found["now"][name], found.get("before", {}).get(name, {}), arguments.rows))


def _counts(
    router: str,
    checkout: Path,
    wanted: Mapping[str, Shape],
    engines: Sequence[MockEngine],
    tokenizer: Path,
    directory: Path,
) -> dict[str, Figures]:
    """The calls of each shape, in a kvpin of that checkout."""
    file = directory / "count.json"
    name = f"{router}-counted"
    SUBJECTS[name] = replace(SUBJECTS[router], start=lambda place: _start(router, place, checkout, file))
    found = {}
    with running(name, engines, tokenizer, directory) as (port, pid):
        subject = Subject(port, pid, file)
        for seed, (shape, asked) in enumerate(wanted.items()):
            chats, load = Chats(tokenizer, seed), asked.load
            for engine in engines:
                engine.pace(load.interval_us)
            warm = next(chats.waves(replace(load, requests=WARM_UPS, wave=WARM_UPS)))
            bodies, (first, follow) = directory / shape, (warm.first, warm.next)
            for each in (first, follow) if asked.is_next else (first,):
                write_bodies(bodies, each)
                subject.play(bodies, len(each))
            wave = next(chats.waves(load))
            write_bodies(bodies, wave.first)
            if asked.is_next:
                subject.play(bodies, load.wave)
                write_bodies(bodies, wave.next)
            found[shape] = subject.per_request(bodies, load.wave)
            print(f"{checkout}, {shape}: {total(found[shape]):,.1f}", file=sys.stderr)
    return found


def _start(router: str, place: Place, checkout: Path, file: Path) -> Start:
    """The router's start, with the counter before it."""
    start = SUBJECTS[router].start(place)
    python = checkout / PROGRAMS.relative_to(ROOT) / "python"
    return replace(
        start,
        command=[python, COUNTED, file, *start.command[1:]],
        environment={
            **start.environment,
            "KVPIN_HEALTH__INTERVAL_S": HEALTH_S,
            "PYTHONPATH": str(checkout),
        },
    )


def _arguments() -> argparse.Namespace:
    kvpins = [name for name in SUBJECTS if name.startswith(KVPIN)]
    names = list(shapes(1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", choices=kvpins, default=KVPIN)
    parser.add_argument("--shapes", type=some_of(names), default=names, help="some of " + ",".join(names))
    parser.add_argument("--requests", type=int, default=100, help="of each shape (100); paced: a tenth")
    parser.add_argument("--rows", type=int, default=40, help="functions of each shape (40)")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout of kvpin, with its .venv"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
