"""kvpin, sglang-router and Dynamo with users who wait for their answers, before the same simulated engines.

Each user talks, reads the answer, thinks, and asks again: a slow router or engine gets fewer requests. The
rest is as in `routers.py`: four mock engines, real tokens in blocks of 16, one prefill after another, and
requests that the seed alone decides. The router has core 0; the engines and the users share core 1. Dynamo's
engines are the same code as Dynamo workers in Python (`dynamo_engine.py`). They get token ids from Dynamo's
frontend; the others tokenise each prompt again, as vLLM does.

    python benchmarks/live_routers.py [--cells base,memory,…] [--routers kvpin,sglang-cache,dynamo,…]
                                      [--seed 1] [--before CHECKOUT] [--json PATH] [--first]

Prints the mean time to the first token in ms, in brackets the part of it at the engine, and the 99th
percentile. `--before` measures the kvpin of another checkout, too, which has a `.venv`. `small` is the time
that a router adds to a short chat of a single user, by the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import uvloop
from cost_native import OTHER_CORE, ROUTER_CORE, NativeError, check_machine
from harness import some_of
from router_client import CHAT, Answer, ask
from router_peers import (
    DIRECT,
    DYNAMO,
    KVPIN,
    OF_DYNAMO,
    ROUTERS,
    Engine,
    Router,
    RouterUnavailableError,
    dynamo_engine,
    running,
)
from router_result import Reading, Result, summarise
from router_work import MODEL, Mix, Question, make_warm_up, make_work
from routers import MOCK, before_others, engines, told

from engine_adapter import Headers, HttpTransport

THINK_S = 0.4
TOKEN_MS = 2
SETTLE_S = 1.0
# The first of so many parts of a user's questions fills the caches and does not count.
WARM_PART = 4
READY_S = 60.0
SMALL_CHATS = 300
BEFORE = f"{KVPIN}-before"
_JSON = Headers.of([("content-type", "application/json")])


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of the table.

    Attributes:
        title: for the table.
        mix: what is asked; its rate does not count.
        users: how many ask at the same time.
        prefill_rate: tokens a second of an engine.
    """

    title: str
    mix: Mix
    users: int = 96
    prefill_rate: float = 12_000


def _mix(*, chats: int = 288, systems: int = 8, questions: int = 480, kv_tokens: int = 100_000) -> Mix:
    return Mix("", chats, systems, questions, kv_tokens, (30, 90), (8, 16))


SMALL = "small"
CELLS = {
    "base": Cell("base", _mix()),
    "memory": Cell("less memory", _mix(kv_tokens=40_000)),
    "prefix": Cell("one hot prefix", _mix(chats=384, systems=1, questions=0)),
    "prefill": Cell("slow prefill", _mix(), prefill_rate=7_000),
    "users": Cell("144 users", _mix(chats=432, questions=720), users=144),
    SMALL: Cell("small chat added at 1 user", _mix(), users=1),
}


def shares(work: Sequence[Question], users: int) -> list[list[Question]]:
    """What each user asks: whole chats in turn, and questions about documents."""
    chats: dict[str, list[Question]] = {}
    for number, question in enumerate(work):
        is_chat = question.session.startswith("chat")
        chats.setdefault(question.session if is_chat else f"alone-{number}", []).append(question)
    of_users: list[list[Question]] = [[] for _ in range(users)]
    for number, chat in enumerate(chats.values()):
        of_users[number % users] += chat
    return of_users


def small_chats(seed: int) -> list[Question]:
    """Chats of a sentence each, for one user."""
    warm_ups = make_warm_up()
    return [warm_ups[(seed + number) % len(warm_ups)] for number in range(SMALL_CHATS)]


async def talk(url: str, of_users: Sequence[Sequence[Question]], think_s: float, seed: int) -> list[Answer]:
    """All answers that the users get, each asking once it has thought about the answer before."""
    async with aclosing(HttpTransport()) as client:

        async def user(number: int, questions: Sequence[Question]) -> list[Answer]:
            dice, answers = random.Random(f"{seed} {number}"), []  # noqa: S311 - not for secrets
            due = time.monotonic() + 0.5
            for question in questions:
                due += dice.expovariate(1 / think_s) if think_s else 0.0
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                answers.append(await ask(client, f"{url}{CHAT}", _JSON, question, due))
                due = time.monotonic()
            return answers

        of_all = await asyncio.gather(*itertools.starmap(user, enumerate(of_users)))
        return list(itertools.chain.from_iterable(of_all))


@contextmanager
def _served(router: str, started: Sequence[Engine]) -> Iterator[str]:
    """The address of a router that answers; that of an engine for none."""
    for engine in started:
        if router != DYNAMO:  # whose engines are new
            httpx.post(f"{engine.url}/mock/restart").raise_for_status()
    if router == DIRECT:
        yield started[0].url
        return
    with (
        tempfile.TemporaryDirectory() as logs,
        running(router, started, Path(logs) / "log", core=ROUTER_CORE) as (url, _),
    ):
        body, deadline = make_warm_up()[0].body, time.monotonic() + READY_S
        while httpx.post(f"{url}{CHAT}", content=body, headers=_JSON.raw).status_code != httpx.codes.OK:
            if time.monotonic() > deadline:
                raise RouterUnavailableError(f"{router} does not serve {MODEL}")
            time.sleep(0.2)
        yield url


def run(name: str, router: str, seed: int, started: Sequence[Engine]) -> Result:
    """One cell of one router.

    Raises:
        RouterUnavailableError: it cannot be installed or started.
    """
    cell = CELLS[name]
    is_small = name == SMALL
    of_users = [small_chats(seed)] if is_small else shares(make_work(cell.mix, seed), cell.users)
    with _served(router, started) as url:
        warm_up = [questions[: len(questions) // WARM_PART] for questions in of_users]
        measured = [questions[len(questions) // WARM_PART :] for questions in of_users]
        think_s = 0.0 if is_small else THINK_S
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(talk(url, warm_up, think_s, seed))
            time.sleep(SETTLE_S)
            before, begun = Reading.now([told(engine) for engine in started], 0), time.monotonic()
            answers = runner.run(talk(url, measured, think_s, seed + 1))
            took_s = time.monotonic() - begun
        after = Reading.now([told(engine) for engine in started], 0)
    return summarise(name, router, seed, took_s, answers, (before, after))


def measure(arguments: argparse.Namespace) -> list[Result]:
    """All cells of all routers; those that Dynamo's engines serve, last."""
    results = []
    for name in arguments.cells:
        cell = CELLS[name]
        names = [*([DIRECT] if name == SMALL else []), *arguments.routers]
        with_http = [router for router in names if router != DYNAMO]
        for group in (with_http, [router for router in names if router == DYNAMO]):
            if not group:
                continue
            try:
                start = dynamo_engine() if DYNAMO in group else MOCK
                with engines(cell.mix, cell.prefill_rate, TOKEN_MS, start=start) as started:
                    for router in group:
                        results.append(run(name, router, arguments.seed, started))
                        print(results[-1].line(), file=sys.stderr)
            except RouterUnavailableError as error:
                print(f"({name}) {', '.join(group)}: not measured: {error}", file=sys.stderr)
    return results


def report(results: Sequence[Result]) -> str:
    """A table in Markdown: a row for each router, a column for each cell."""
    by_cell = {name: {r.router: r for r in results if r.workload == name} for name in CELLS}
    shown = [name for name in CELLS if by_cell[name]]
    lines = ["| | " + " | ".join(CELLS[name].title for name in shown) + " |", "|---|" + "--:|" * len(shown)]
    for router in dict.fromkeys(each.router for each in results if each.router != DIRECT):
        cells = []
        for name in shown:
            result, direct = by_cell[name].get(router), by_cell[name].get(DIRECT)
            if result is None:
                cells.append("–")
            elif name == SMALL:
                added = result.median_ms - (direct.median_ms if direct is not None else 0.0)
                cells.append(f"{added:.2f}")
            else:
                cells.append(f"{result.mean_ms:.1f} [{result.engine_ms:.1f}], {result.p99_ms:.0f}")
        lines.append(f"| {ROUTERS[router].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measures what was asked for and prints the table."""
    arguments = _arguments()
    try:
        check_machine()
    except NativeError as error:
        raise SystemExit(f"live_routers.py cannot measure here: {error}") from error
    os.sched_setaffinity(0, {OTHER_CORE})
    with before_others() if arguments.first else nullcontext(), tempfile.TemporaryDirectory() as names:
        os.environ["DYN_FILE_KV"] = names  # where Dynamo's processes find each other
        results = measure(arguments)
    print(report(results))
    for result in results:
        if result.errors:
            print(f"{result.workload}, {result.router}: {result.errors} failed: {result.first_error}")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def _arguments() -> argparse.Namespace:
    ROUTERS[DYNAMO] = OF_DYNAMO
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=some_of(CELLS), default=list(CELLS), help="of " + ",".join(CELLS))
    parser.add_argument(
        "--routers",
        type=some_of(ROUTERS),
        default=[KVPIN, "sglang-cache", "sglang-tuned", DYNAMO],
        help="of " + ",".join(ROUTERS),
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout, with its .venv")
    parser.add_argument("--json", type=Path, default=None, help="all figures")
    parser.add_argument("--first", action="store_true", help="before other work on this machine; as root")
    arguments = parser.parse_args()
    if arguments.before is not None:
        ROUTERS[BEFORE] = Router("kvpin before", None, checkout=arguments.before.resolve())
        arguments.routers.append(BEFORE)
    return arguments


if __name__ == "__main__":
    main()
