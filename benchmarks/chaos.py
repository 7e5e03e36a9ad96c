"""Does kvpin keep its word while everything around it breaks, a random fault every few seconds?

Mock vLLMs with real caches (`mock_engine.py`), embedded engines and a llama-server serve many clients. They
send chats of several turns, as streams and as whole answers. Some leave in mid-stream, some read slowly.
Faults hit engines (`FAULTS`), KV events, kvpin's clock, and the disk. Every answer is compared with the right
one.

libfaketime sets the clock of kvpin alone (Debian has a package). Without it, the clock does not jump. A disk
is full by RLIMIT_FSIZE, which needs no rights.

    python benchmarks/chaos.py [--minutes 30] [--seed 1] [--clients 100] [--fault-every 5]

Prints tables in Markdown, and faults and errors in order on stderr. Ends with status 1 if an invariant does
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import httpx
from chaos_engines import (
    EMBEDDED,
    LLAMA,
    Engine,
    embedded_engine,
    limit_files,
    llama_engine,
    mock_engine,
    open_sockets,
    resident_mb,
)
from chaos_relay import HOST, Spoil
from chaos_work import Answer, Clients, Talks
from harness import host_cache, kvpin
from hot_path import listener_of

LONGEST_FAULT = 2.0
"""The longest fault, in times from one fault to the next. The shortest takes 0.5 s."""
QUIET_S = 60.0
RECOVERY_S = 10.0
"""Clients go on for this long after the last fault."""
CLOCK_JUMP_S = 7200
HELD_UP_S = 1.0
"""If this process is held up for longer, by a busy machine, that counts as a fault of all engines."""
GROWTH = 0.1
"""Memory may grow by this share from the first third of the run to its end, and by `GROWTH_MB`."""
GROWTH_MB = 20.0
_FAKETIME = "faketime/libfaketimeMT.so.1"
_BUGS = re.compile(r"Traceback|this is a bug in kvpin")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        begin, end: what happens then to the engine.
        hurts: requests may fail of it.
        fits: which engines it can hit.
    """

    name: str
    begin: Callable[[Engine], None]
    end: Callable[[Engine], Awaitable[None]]
    hurts: bool = True
    fits: Callable[[Engine], bool] = lambda _: True


async def _start_again(engine: Engine) -> None:
    engine.start()
    await engine.until_healthy()


async def _continue(engine: Engine) -> None:
    engine.process.send_signal(SIGCONT)


async def _heal(engine: Engine) -> None:
    engine.relay.heal()


def _spoil_events(engine: Engine, *, spoils: bool = True) -> None:
    if engine.events is not None:
        engine.events.spoils = spoils


async def _heal_events(engine: Engine) -> None:
    _spoil_events(engine, spoils=False)


FAULTS = (
    Kind("kill -9 and restart", Engine.kill, _start_again),
    Kind("SIGSTOP and SIGCONT", lambda engine: engine.process.send_signal(SIGSTOP), _continue),
    *(Kind(how.value, lambda engine, how=how: engine.relay.spoil(how), _heal) for how in Spoil),
    Kind(
        "KV events lost, doubled, swapped",
        _spoil_events,
        _heal_events,
        hurts=False,
        fits=lambda engine: engine.events is not None,
    ),
)


@dataclass(slots=True)
class Fault:
    """One fault: where and when. `healed` is when kvpin used the engine again."""

    kind: Kind
    engine: Engine
    began: float
    healed: float = float("inf")


@dataclass(slots=True)
class Books:
    """Resources that kvpin holds: sockets, tasks, requests and slots in use, MB of memory."""

    sockets: int
    tasks: int
    in_use: int
    mb: float


@dataclass(slots=True)
class Trial:
    """One run.

    Attributes:
        url, pid: of kvpin.
        clock: the file that sets kvpin's clock; None where it cannot be set.
        memory: of kvpin, in MB, each second.
        others: faults that hit no engine.
        longest_s: how long a fault may last.
        unready: engines that kvpin did not use again.
        held_up: from when to when this process was.
    """

    url: str
    pid: int
    engines: Sequence[Engine]
    clients: Clients
    dice: random.Random
    clock: Path | None
    faults: list[Fault] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    longest_s: float = 10.0
    unready: list[str] = field(default_factory=list)
    held_up: list[tuple[float, float]] = field(default_factory=list)

    async def run(self, seconds: float, every: float, clients: int) -> tuple[Books, Books, float]:
        """Returns what kvpin held before and after, and when the last fault was over."""
        self.longest_s = LONGEST_FAULT * every
        await self._chat(min(10.0, seconds / 2), clients)
        before = await self.books()
        stop, healed_at = asyncio.Event(), 0.0
        async with asyncio.TaskGroup() as group:
            chatting = group.create_task(self.clients.run(clients, stop))
            sampling = group.create_task(self._sample())
            async with asyncio.TaskGroup() as faults:
                await self._break(faults, time.monotonic() + seconds, every)
            healed_at = time.monotonic()
            await asyncio.sleep(min(RECOVERY_S, seconds))
            stop.set()
            await chatting
            sampling.cancel()
        return before, await self.books(before), healed_at

    async def _chat(self, seconds: float, clients: int) -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, stop.set)
        await self.clients.run(clients, stop)

    async def _sample(self) -> None:
        """Reads kvpin's memory each second. Notes when this process had no CPU: relays then hold all up."""
        while True:
            self.memory.append(resident_mb(self.pid))
            began = time.monotonic()
            await asyncio.sleep(1)
            if (now := time.monotonic()) - began > 1 + HELD_UP_S:
                self.held_up.append((began, now))

    # --- faults -------------------------------------------------------------------------------------------

    async def _break(self, group: asyncio.TaskGroup, until: float, every: float) -> None:
        """Draws kinds from a deck, so that all of them come in a short run."""
        deck: list[Kind | Callable[[], Awaitable[None]]] = []
        while time.monotonic() < until:
            if not deck:
                deck = [*FAULTS, self._fill_disks]
                if self.clock is not None:
                    deck.append(partial(self._jump, self.clock))
                self.dice.shuffle(deck)
            card = deck.pop()
            if not isinstance(card, Kind):
                group.create_task(card())
            else:
                hit = {fault.engine.id for fault in self.faults if fault.healed == float("inf")}
                well = [engine for engine in self.engines if engine.id not in hit and card.fits(engine)]
                if well:
                    group.create_task(self._one_fault(card, self.dice.choice(well)))
            await asyncio.sleep(every)

    async def _one_fault(self, kind: Kind, engine: Engine) -> None:
        fault = Fault(kind, engine, time.monotonic())
        self.faults.append(fault)
        kind.begin(engine)
        await asyncio.sleep(self.dice.uniform(0.5, self.longest_s))
        await kind.end(engine)
        await self._until_used(engine)
        fault.healed = time.monotonic()

    async def _until_used(self, engine: Engine) -> None:
        """Returns once kvpin has called the engine ready for two checks."""
        ready, deadline = 0, time.monotonic() + QUIET_S
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            while ready < 4:
                if time.monotonic() > deadline:
                    self.unready.append(engine.id)
                    return
                await asyncio.sleep(0.5)
                states = (await client.get("/health/ready")).json()["engines"]
                ready = ready + 1 if states[engine.id] == "ready" else 0

    async def _fill_disks(self) -> None:
        """Neither kvpin nor the engines can write a file."""
        pids = [self.pid, *(engine.process.pid for engine in self.engines)]
        self.others["full disk"] += 1
        for full in (True, False):
            for pid in pids:
                with suppress(ProcessLookupError):
                    limit_files(pid, full=full)
            await asyncio.sleep(self.dice.uniform(0.5, self.longest_s))

    async def _jump(self, clock: Path) -> None:
        """Sets kvpin's clock forward or back, and right again."""
        self.others["clock jump"] += 1
        by = self.dice.choice((-1, 1)) * self.dice.randint(60, CLOCK_JUMP_S)
        for seconds in (by, 0):
            await asyncio.to_thread(clock.write_text, f"{seconds:+d}")
            await asyncio.sleep(self.dice.uniform(0.5, self.longest_s))

    # --- what is held -------------------------------------------------------------------------------------

    async def books(self, before: Books | None = None) -> Books:
        """Resources that kvpin holds at rest. Waits up to `QUIET_S` until they are no more than `before`."""
        deadline = time.monotonic() + (QUIET_S if before is not None else 6)
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            while True:
                page = (await client.get("/metrics")).text
                pools = (await client.get("/admin/v1/stats")).json()["pools"]
                in_use = sum(map(_in_use, (engine for pool in pools for engine in pool["engines"])))
                in_use += _sum(page, "kvpin_queue_requests")
                tasks = _sum(page, "kvpin_tasks")
                books = Books(open_sockets(self.pid), tasks, in_use, resident_mb(self.pid))
                is_over = time.monotonic() > deadline
                if is_over or (before is not None and not _leaks(before, books, len(self.engines))):
                    return books
                await asyncio.sleep(0.5)

    def broken(self, answer: Answer) -> set[str]:
        """The engines of its model that a fault may have kept from answering it."""
        if any(began <= answer.ended and ended >= answer.began for began, ended in self.held_up):
            return {engine.id for engine in self.engines if engine.model == answer.model}
        return {
            fault.engine.id
            for fault in self.faults
            if fault.kind.hurts
            and fault.engine.model == answer.model
            and fault.began <= answer.ended
            and fault.healed >= answer.began
        }

    def size(self, model: str) -> int:
        """Engines that serve a model."""
        return sum(engine.model == model for engine in self.engines)


def _in_use(stats: dict) -> int:
    """Requests, blocks and slots of an engine that are in use, by kvpin's books."""
    kv = stats.get("kv") or {}
    slots = sum(slot["operation"] is not None for slot in kv.get("slots", ()))
    blocks = kv["gpu"]["active"] if isinstance(kv.get("gpu"), dict) else 0
    return int(stats["in_flight"]) + int(blocks) + slots


def _sum(page: str, name: str) -> int:
    """The series of a metric, added up."""
    return round(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))


def _leaks(before: Books, after: Books, engines: int) -> list[str]:
    """Resources held beyond those before. Health checks and idle connections may differ by one an engine."""
    return [
        name
        for name, more in (
            ("sockets", after.sockets - before.sockets > 2 * engines),
            ("tasks", after.tasks - before.tasks > engines),
            ("leases, slots", after.in_use > 0),
        )
        if more
    ]


# --- the verdict --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verdict:
    """Rows of the tables, and the answers behind each invariant that does not hold."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def hold(self, name: str, found: object, *, holds: bool) -> None:
        """Notes an invariant and what was found."""
        self.rows.append((name, str(found), holds))

    @property
    def holds(self) -> bool:
        """Whether all invariants hold."""
        return all(row[2] for row in self.rows)


def judge(trial: Trial, before: Books, after: Books, healed_at: float, log: str) -> Verdict:
    """Checks the invariants."""
    verdict, answers = Verdict(), trial.clients.answers
    for fate, name in (
        ("WRONG", "wrong, doubled or missing tokens"),
        ("HUNG", "clients that hang"),
        ("BROKEN OFF", "answers that end without a word"),
    ):
        count = sum(answer.fate == fate for answer in answers)
        verdict.hold(name, count, holds=not count)
    errors = [answer for answer in answers if answer.is_error]
    without_fault = [answer for answer in errors if not trial.broken(answer)]
    verdict.hold("errors without a fault", len(without_fault), holds=not without_fault)
    needless = [
        answer
        for answer in errors
        if answer.fate == "refused" and len(trial.broken(answer)) == 1 < trial.size(answer.model)
    ]
    name = "requests refused while one engine of several is broken"
    verdict.hold(name, len(needless), holds=not needless)
    late = [answer for answer in errors if answer.began > healed_at]
    verdict.hold("errors after the last fault", len(late), holds=not late)
    verdict.hold("engines that kvpin does not use again", len(trial.unready), holds=not trial.unready)
    verdict.hold("leases, slots and blocks in use at rest", after.in_use, holds=after.in_use == 0)
    leaks = _leaks(before, after, len(trial.engines))
    for kind in ("sockets", "tasks"):
        found = f"{getattr(before, kind)} before, {getattr(after, kind)} after"
        verdict.hold(f"kvpin's {kind} at rest", found, holds=kind not in leaks)
    third = statistics.median(trial.memory[len(trial.memory) // 4 : len(trial.memory) // 2 + 1])
    found = (
        f"{before.mb:.0f} before, {third:.0f} early, {max(trial.memory):.0f} at most, {after.mb:.0f} after"
    )
    verdict.hold("kvpin's memory, MB", found, holds=after.mb <= third * (1 + GROWTH) + GROWTH_MB)
    bugs = len(_BUGS.findall(log))
    verdict.hold("tracebacks in kvpin's log", bugs, holds=not bugs)
    return verdict


def print_tables(trial: Trial, verdict: Verdict) -> None:
    """In Markdown."""
    print("\n| fault | times |\n|---|---:|")
    kinds = Counter(fault.kind.name for fault in trial.faults) + trial.others
    kinds["the machine was too busy for the relays"] = len(trial.held_up)
    for name, count in sorted(kinds.items()):
        print(f"| {name} | {count} |")
    fates = Counter((answer.model, answer.fate) for answer in trial.clients.answers)
    print("\n| model | answers | count |\n|---|---|---:|")
    for (model, fate), count in sorted(fates.items()):
        print(f"| {model} | {fate} | {count} |")
    errors = Counter(_error_row(trial, answer) for answer in trial.clients.answers if answer.is_error)
    print("\n| error | engines of its model that were broken | count |\n|---|---|---:|")
    for (error, broken), count in sorted(errors.items()):
        print(f"| {error} | {broken} | {count} |")
    print("\n| invariant | found | holds |\n|---|---|---|")
    for name, found, holds in verdict.rows:
        print(f"| {name} | {found} | {'yes' if holds else '**NO**'} |")


def _error_row(trial: Trial, answer: Answer) -> tuple[str, str]:
    status = f"{answer.fate} ({answer.status})" if answer.fate == "refused" else answer.fate
    return status, f"{len(trial.broken(answer))} of {trial.size(answer.model)}"


def print_errors(trial: Trial, start: float) -> None:
    """Every error and every fault, in order, for whoever looks for a cause. Times are in seconds."""
    lines = [
        (fault.began, f"FAULT {fault.kind.name} of {fault.engine.id} until {fault.healed - start:.1f}")
        for fault in trial.faults
    ]
    lines += [
        (
            answer.ended,
            f"{answer.model} {answer.engine} began {answer.began - start:.1f} {answer.fate}: {answer.detail}",
        )
        for answer in trial.clients.answers
        if answer.is_error
    ]
    for moment, line in sorted(lines):
        print(f"{moment - start:8.1f} {line}", file=sys.stderr)


# --- the run ------------------------------------------------------------------------------------------------


async def play(arguments: argparse.Namespace, directory: Path, log: Path) -> Verdict:
    """Starts everything, runs the trial and prints its tables."""
    dice = random.Random(arguments.seed)  # noqa: S311 - not for secrets
    engines = [
        *(mock_engine(number, dice) for number in range(arguments.mocks)),
        *(embedded_engine(number, dice) for number in range(arguments.embedded)),
        *(llama_engine(number, dice, directory) for number in range(arguments.llama)),
    ]
    talks = Talks(list(dict.fromkeys(engine.model for engine in engines for _ in "ab")), dice)
    async with AsyncExitStack() as stack:
        flags: list[str] = []
        for engine in engines:
            flags += "--engine", await engine.open()
            engine.start()
            stack.push_async_callback(engine.close)
        await asyncio.gather(*(engine.until_healthy() for engine in engines))
        for model in (EMBEDDED, LLAMA):
            if found := next((engine for engine in engines if engine.model == model), None):
                await talks.learn(model, f"http://{HOST}:{found.port}")
        clock = log.with_name("clock") if arguments.faketime is not None else None
        running = kvpin(*flags, log=log, **_environment(arguments.faketime, clock))
        url = await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        pid = listener_of(int(url.rpartition(":")[2]))
        trial = Trial(url, pid, engines, Clients(url, talks, dice), dice, clock)
        start = time.monotonic()
        held = await trial.run(60 * arguments.minutes, arguments.fault_every, arguments.clients)
        verdict = judge(trial, *held, await asyncio.to_thread(log.read_text, errors="replace"))
        print_errors(trial, start)
        print(f"{arguments.minutes:g} minutes, {arguments.clients} clients, seed {arguments.seed}")
        print_tables(trial, verdict)
    return verdict


def _environment(faketime: Path | None, clock: Path | None) -> dict[str, str]:
    """Lets `clock` set kvpin's clock."""
    if faketime is None or clock is None:
        return {}
    clock.write_text("+0")
    return {
        "LD_PRELOAD": str(faketime),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _faketime() -> Path | None:
    """Where Debian's package has it."""
    return next(Path("/usr/lib").glob(f"*/{_FAKETIME}"), None)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--fault-every", type=float, default=5, help="seconds")
    parser.add_argument("--mocks", type=int, default=4, help="engines without a model")
    parser.add_argument("--embedded", type=int, default=2, help="kvpin's own engines")
    parser.add_argument("--llama", type=int, default=1, help="llama-servers")
    parser.add_argument("--faketime", type=Path, default=_faketime(), help="libfaketimeMT.so.1")
    parser.add_argument("--log", type=Path, help="kvpin's log, to keep it")
    arguments = parser.parse_args()
    if arguments.faketime is None:
        print("The clock does not jump: libfaketime is not installed.")
    with tempfile.TemporaryDirectory() as temporary, host_cache() as directory:
        log = arguments.log or Path(temporary) / "kvpin.log"
        verdict = asyncio.run(play(arguments, directory, log))
    sys.exit(0 if verdict.holds else 1)


if __name__ == "__main__":
    main()
