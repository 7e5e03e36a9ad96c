"""Checks that kvpin keeps its promises while everything around it breaks: a random fault every few seconds.

Mock vLLMs with real caches (`chaos_mock.py`), embedded engines and llama-servers serve many clients, three or
more engines of each model. The greedy texts of the mocks differ between engines from some point on: a stream
that another engine continues must not mix them. Clients send chats of several turns by three APIs, as
streams and as whole answers. Some leave in mid-stream, some read slowly, some want more than kvpin's time
limit allows. Faults hit engines (`FAULTS`), KV events, kvpin's clock, and the disk; engines are removed and
added again while they answer (`Site`). Every answer is compared with the right ones.

libfaketime sets the clock of kvpin alone (Debian has a package). Without it, the clock does not jump. A disk
is full by RLIMIT_FSIZE, which needs no rights.

    python benchmarks/chaos.py [--minutes 30] [--seed 1] [--clients 100] [--fault-every 5]
    python benchmarks/chaos.py --busy     # 90 s of mocks alone, for a machine with other work
    python benchmarks/chaos.py --pairs    # mocks alone; half of them compute prompts for the others

Prints tables in Markdown, and faults and errors in order on stderr. Ends with status 1 if an invariant does
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from itertools import pairwise
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGSTOP

import httpx
from chaos_engines import (
    EMBEDDED,
    LLAMA,
    MOCK,
    Engine,
    embedded_engine,
    limit_files,
    llama_engine,
    mock_engine,
    open_sockets,
    resident_mb,
)
from chaos_pairs import Transfers, pair_engines, transfers_of
from chaos_relay import HOST, Spoil
from chaos_work import Answer, Clients, Talks
from harness import host_cache, kvpin
from hot_path import listener_of

IDLE_S = 6.0
"""kvpin's limit for the silence of an answer."""
LONGEST_FAULT = 2.0
"""The longest fault, in times from one fault to the next. The shortest takes 0.5 s."""
QUIET_S = 60.0
RECOVERY_S = 10.0
"""Clients go on for this long after the last fault."""
CLOCK_JUMP_S = 7200
HELD_UP_S = 1.0
"""If this process is held up for longer, by a busy machine, that counts as a fault of all engines."""
GROWTH = 0.1
"""Memory may grow by this share from the middle third of the run to its end, and by `GROWTH_MB`. Before, the
caches fill, and the allocator's arenas: glibc has one for each of some sixteen threads."""
GROWTH_MB = 20.0
_FAKETIME = "faketime/libfaketimeMT.so.1"
_BUGS = re.compile(r"Traceback|this is a bug in kvpin")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        begin, end: called with the engine at the start and the end of the fault.
        hurts: requests may fail because of it.
        fits: selects the engines that it can hit.
    """

    name: str
    begin: Callable[[Engine], Awaitable[None]]
    end: Callable[[Engine], Awaitable[None]]
    hurts: bool = True
    fits: Callable[[Engine], bool] = lambda _: True


async def _kill(engine: Engine) -> None:
    engine.kill()


async def _start_again(engine: Engine) -> None:
    engine.start()
    await engine.until_healthy()


async def _become_another(engine: Engine) -> None:
    """Another model answers at its address, with texts that none of the mocks gives."""
    engine.kill()
    engine.start("--model", "another", "--number", "97")
    await engine.until_healthy()


async def _become_itself(engine: Engine) -> None:
    engine.kill()
    await _start_again(engine)


async def _stop(engine: Engine) -> None:
    engine.process.send_signal(SIGSTOP)


async def _continue(engine: Engine) -> None:
    engine.process.send_signal(SIGCONT)


async def _spoil(engine: Engine, how: Spoil) -> None:
    engine.relay.spoil(how)


async def _heal(engine: Engine) -> None:
    engine.relay.heal()


async def _spoil_events(engine: Engine, *, spoils: bool = True) -> None:
    if engine.events is not None:
        engine.events.spoils = spoils


async def _heal_events(engine: Engine) -> None:
    await _spoil_events(engine, spoils=False)


FAULTS = (
    Kind("kill -9 and restart", _kill, _start_again),
    Kind(
        "another model at the address",
        _become_another,
        _become_itself,
        fits=lambda engine: engine.model == MOCK,
    ),
    Kind("SIGSTOP and SIGCONT", _stop, _continue),
    *(Kind(how.value, partial(_spoil, how=how), _heal) for how in Spoil),
    Kind(
        "KV events lost, doubled, swapped",
        _spoil_events,
        _heal_events,
        hurts=False,
        fits=lambda engine: engine.events is not None,
    ),
)


@dataclass(slots=True)
class Site:
    """kvpin and the file of its settings: removes engines and adds them again, which costs no request.

    Attributes:
        url, pid: of kvpin.
        file: its settings.
        total_s: its limit for a request.
        engines: all engines.
    """

    file: Path
    total_s: float
    engines: Sequence[Engine]
    url: str = ""
    pid: int = 0
    _left_out: set[str] = field(default_factory=set)
    _changes: Counter[str] = field(default_factory=Counter)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The faults."""
        return (
            Kind("removed and added by the admin API", self.remove, self.add, hurts=False),
            Kind("left out of a reload and named again", self.leave_out, self.name_again, hurts=False),
            Kind("other settings by a reload", self.change, self.change, hurts=False),
        )

    def write(self) -> None:
        """Writes the settings."""
        tables = [f"[timeouts]\nidle_s = {IDLE_S}\ntotal_s = {self.total_s}\n"]
        for engine in self.engines:
            if engine.id not in self._left_out:
                lines = [f"{name} = {json.dumps(value)}" for name, value in engine.entry.items()]
                headers = [
                    f'headers = {{ {name} = "{value}" }}' for name, value in self._headers(engine).items()
                ]
                tables.append("\n".join(["[[engines]]", *lines, *headers, ""]))
        self.file.write_text("\n".join(tables), encoding="utf-8")

    def _headers(self, engine: Engine) -> dict[str, str]:
        return {"x-chaos": str(self._changes[engine.id])}

    def _reload(self) -> None:
        self.write()
        os.kill(self.pid, SIGHUP)

    async def remove(self, engine: Engine) -> None:
        """By the admin API."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            (await client.delete(f"/admin/v1/engines/{engine.id}")).raise_for_status()

    async def add(self, engine: Engine) -> None:
        """By the admin API: the engine of the settings comes back."""
        entry = {**engine.entry, "headers": self._headers(engine)}
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            (await client.post("/admin/v1/engines", json=entry)).raise_for_status()

    async def leave_out(self, engine: Engine) -> None:
        """By a reload."""
        self._left_out.add(engine.id)
        self._reload()

    async def name_again(self, engine: Engine) -> None:
        """By a reload, perhaps while it still leaves."""
        self._left_out.remove(engine.id)
        self._reload()

    async def change(self, engine: Engine) -> None:
        """By a reload."""
        self._changes[engine.id] += 1
        self._reload()


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
        clock: the file that sets kvpin's clock; None where it cannot be set.
        memory: of kvpin, in MB, each second.
        others: faults that hit no engine.
        longest_s: how long a fault may last.
        unready: engines that kvpin did not use again.
        held_up: start and end of each pause of this process.
    """

    site: Site
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
            self.memory.append(resident_mb(self.site.pid))
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
                deck = [*FAULTS, *self.site.kinds, self._fill_disks]
                if self.clock is not None:
                    deck.append(partial(self._jump, self.clock))
                self.dice.shuffle(deck)
            card = deck.pop()
            if not isinstance(card, Kind):
                group.create_task(card())
            else:
                hit = {fault.engine.id for fault in self.faults if fault.healed == float("inf")}
                well = [engine for engine in self.site.engines if engine.id not in hit and card.fits(engine)]
                if well:
                    group.create_task(self._one_fault(card, self.dice.choice(well)))
            await asyncio.sleep(every)

    async def _one_fault(self, kind: Kind, engine: Engine) -> None:
        fault = Fault(kind, engine, time.monotonic())
        self.faults.append(fault)
        await kind.begin(engine)
        await asyncio.sleep(self.dice.uniform(0.5, self.longest_s))
        await kind.end(engine)
        await self._until_used(engine)
        fault.healed = time.monotonic()

    async def _until_used(self, engine: Engine) -> None:
        """Returns once kvpin has called the engine ready for two checks."""
        ready, deadline = 0, time.monotonic() + QUIET_S
        async with httpx.AsyncClient(base_url=self.site.url, timeout=30) as client:
            while ready < 4:
                if time.monotonic() > deadline:
                    self.unready.append(engine.id)
                    return
                await asyncio.sleep(0.5)
                states = (await client.get("/health/ready")).json()["engines"]
                ready = ready + 1 if states.get(engine.id) == "ready" else 0

    async def _fill_disks(self) -> None:
        """Keeps kvpin and the engines from writing files."""
        pids = [self.site.pid, *(engine.process.pid for engine in self.site.engines)]
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
        async with httpx.AsyncClient(base_url=self.site.url, timeout=30) as client:
            while True:
                page = (await client.get("/metrics")).text
                pools = (await client.get("/admin/v1/stats")).json()["pools"]
                in_use = sum(map(_in_use, (engine for pool in pools for engine in pool["engines"])))
                in_use += _sum(page, "kvpin_queue_requests")
                tasks = _sum(page, "kvpin_tasks")
                books = Books(open_sockets(self.site.pid), tasks, in_use, resident_mb(self.site.pid))
                is_over = time.monotonic() > deadline
                if is_over or (before is not None and not _leaks(before, books, len(self.site.engines))):
                    return books
                await asyncio.sleep(0.5)

    def broken(self, answer: Answer) -> set[str]:
        """Engines of the request's model that a fault may have kept from answering."""
        if any(began <= answer.ended and ended >= answer.began for began, ended in self.held_up):
            return {engine.id for engine in self.site.engines if engine.model == answer.model}
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
        return sum(engine.model == model for engine in self.site.engines)


def _by_part(samples: Sequence[float], parts: int = 6) -> str:
    """The medians of equal parts of the samples, in their order."""
    ends = [len(samples) * n // parts for n in range(parts + 1)]
    return ", ".join(f"{statistics.median(samples[at:end]):.0f}" for at, end in pairwise(ends) if end > at)


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

    is_busy: bool = False
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def hold(self, name: str, found: object, *, holds: bool, in_time: bool = False) -> None:
        """Notes an invariant and its result. `in_time`: a busy machine alone may break the invariant."""
        verdict = "yes" if holds else "no: the machine is busy" if in_time and self.is_busy else "**NO**"
        self.rows.append((name, str(found), verdict))

    @property
    def holds(self) -> bool:
        """True if all invariants hold that must."""
        return all(row[2] != "**NO**" for row in self.rows)


def judge(trial: Trial, before: Books, after: Books, healed_at: float, log: str, *, is_busy: bool) -> Verdict:
    """Checks the invariants. `is_busy`: those that need CPU time in time are told, and need not hold."""
    verdict, answers = Verdict(is_busy), trial.clients.answers
    for fate, name in (
        ("WRONG", "wrong, doubled or missing tokens"),
        ("HUNG", "clients that hang"),
        ("BROKEN OFF", "answers that end without a word"),
    ):
        count = sum(answer.fate == fate for answer in answers)
        verdict.hold(name, count, holds=not count)
    errors = [answer for answer in answers if answer.is_error]
    without_fault = [answer for answer in errors if not trial.broken(answer)]
    verdict.hold("errors without a fault", len(without_fault), holds=not without_fault, in_time=True)
    needless = [
        answer
        for answer in errors
        if answer.fate == "refused" and len(trial.broken(answer)) == 1 < trial.size(answer.model)
    ]
    name = "requests refused while one engine of several is broken"
    verdict.hold(name, len(needless), holds=not needless, in_time=True)
    late = [answer for answer in errors if answer.began > healed_at]
    verdict.hold("errors after the last fault", len(late), holds=not late, in_time=True)
    verdict.hold(
        "engines that kvpin does not use again", len(trial.unready), holds=not trial.unready, in_time=True
    )
    verdict.hold("leases, slots and blocks in use at rest", after.in_use, holds=after.in_use == 0)
    leaks = _leaks(before, after, len(trial.site.engines))
    for kind in ("sockets", "tasks"):
        found = f"{getattr(before, kind)} before, {getattr(after, kind)} after"
        verdict.hold(f"kvpin's {kind} at rest", found, holds=kind not in leaks)
    middle = statistics.median(trial.memory[len(trial.memory) // 3 : 2 * len(trial.memory) // 3 + 1])
    found = (
        f"{before.mb:.0f} before, {_by_part(trial.memory)} by sixths, {max(trial.memory):.0f} at most, "
        f"{after.mb:.0f} after"
    )
    verdict.hold(
        "kvpin's memory, MB", found, holds=after.mb <= middle * (1 + GROWTH) + GROWTH_MB, in_time=True
    )
    bugs = len(_BUGS.findall(log))
    verdict.hold("tracebacks in kvpin's log", bugs, holds=not bugs)
    return verdict


def judge_pairs(verdict: Verdict, transfers: Transfers, healed_at: float) -> None:
    """Checks that requests were divided, and that no KV is kept for nobody."""
    moved, results = transfers.results["moved"], dict(sorted(transfers.results.items()))
    verdict.hold("requests in two legs, by what came of the transfer", results, holds=moved > 0)
    found = f"{transfers.held}; {transfers.fetched} fetched before, {len(transfers.unfetched)} ran out"
    verdict.hold("leases of KV at rest", found, holds=not transfers.held)
    left = transfers.after(healed_at)
    verdict.hold("leases that began after the last fault and ran out", left, holds=not left, in_time=True)
    found = f"by what was there: {dict(sorted(transfers.found.items()))}"
    verdict.hold("pulls", found, holds=transfers.found["THE_KV"] > 0)


def print_tables(trial: Trial, verdict: Verdict) -> None:
    """Prints the tables in Markdown."""
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
        print(f"| {name} | {found} | {holds} |")


def _error_row(trial: Trial, answer: Answer) -> tuple[str, str]:
    status = f"{answer.fate} ({answer.status})" if answer.fate == "refused" else answer.fate
    return status, f"{len(trial.broken(answer))} of {trial.size(answer.model)}"


def print_errors(trial: Trial, start: float) -> None:
    """Prints every error and every fault in order of time, in seconds, to find causes."""
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
    mocks = (
        pair_engines(arguments.mocks, dice)
        if arguments.pairs
        else [mock_engine(number, dice) for number in range(arguments.mocks)]
    )
    engines = [
        *mocks,
        *(embedded_engine(number, dice) for number in range(arguments.embedded)),
        *(llama_engine(number, dice, directory) for number in range(arguments.llama)),
    ]
    models = list(dict.fromkeys(engine.model for engine in engines))
    talks = Talks(models, arguments.mocks, 1.5 * arguments.total_s, dice)
    site = Site(log.with_name("chaos.toml"), arguments.total_s, engines)
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.open()
            engine.start()
            stack.push_async_callback(engine.close)
        site.write()
        await asyncio.gather(*(engine.until_healthy() for engine in engines))
        for model in (EMBEDDED, LLAMA):
            if found := next((engine for engine in engines if engine.model == model), None):
                await talks.learn(model, f"http://{HOST}:{found.port}")
        clock = log.with_name("clock") if arguments.faketime is not None else None
        running = kvpin("--config", str(site.file), log=log, **_environment(arguments.faketime, clock))
        site.url = await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        site.pid = listener_of(int(site.url.rpartition(":")[2]))
        trial = Trial(site, Clients(site.url, talks, dice), dice, clock)
        start = time.monotonic()
        held = await trial.run(60 * arguments.minutes, arguments.fault_every, arguments.clients)
        said = await asyncio.to_thread(log.read_text, errors="replace")
        verdict = judge(trial, *held, said, is_busy=arguments.busy)
        if arguments.pairs:
            judge_pairs(verdict, await transfers_of(site.url, mocks), held[2])
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
    """The library of Debian's package."""
    return next(Path("/usr/lib").glob(f"*/{_FAKETIME}"), None)


# Of a run: on a busy machine or not.
_SIZES: dict[bool, dict[str, float]] = {
    False: {
        "minutes": 30, "clients": 100, "fault_every": 5, "total_s": 40, "mocks": 4, "embedded": 3, "llama": 3,
    },
    True: {
        "minutes": 1.5, "clients": 24, "fault_every": 2, "total_s": 20, "mocks": 3, "embedded": 0, "llama": 0,
    },
}  # fmt: skip


def main() -> None:
    """Reads the arguments and runs the trial."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", action="store_true", help="a short run on a machine with other work")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--fault-every", type=float, help="seconds")
    parser.add_argument("--total-s", type=float, help="kvpin's limit for a request")
    parser.add_argument("--mocks", type=int, help="engines without a model")
    parser.add_argument("--embedded", type=int, help="kvpin's own engines")
    parser.add_argument("--llama", type=int, help="llama-servers")
    parser.add_argument("--faketime", type=Path, default=_faketime(), help="libfaketimeMT.so.1")
    parser.add_argument("--log", type=Path, help="kvpin's log, to keep it")
    parser.add_argument("--pairs", action="store_true", help="mocks alone, with roles")
    parser.set_defaults(**_SIZES[parser.parse_known_args()[0].busy])
    arguments = parser.parse_args()
    if arguments.pairs:
        arguments.mocks, arguments.embedded, arguments.llama = max(arguments.mocks, 4), 0, 0
    if arguments.faketime is None:
        print("The clock does not jump: libfaketime is not installed.")
    with tempfile.TemporaryDirectory() as temporary, host_cache() as directory:
        log = arguments.log or Path(temporary) / "kvpin.log"
        verdict = asyncio.run(play(arguments, directory, log))
    sys.exit(0 if verdict.holds else 1)


if __name__ == "__main__":
    main()
