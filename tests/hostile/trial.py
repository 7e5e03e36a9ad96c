"""A trial: an attack, and beside it an innocent tenant that must not notice.

Worlds           a kvpin for each attack: the last one, unless that was damaged or does not fit
Innocent         sends a small steady load, and compares every answer with the right one
try_attack()     runs one attack and says what it did to kvpin and to the innocent
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.hostile.attacker import Attack
from tests.hostile.attacks import fire
from tests.hostile.client import CHAT, Answer, ask, chat, head_of, post
from tests.hostile.engine_texts import SECRET, text_of
from tests.hostile.place import GOOD, TINY, WELL, Place
from tests.hostile.world import Books, World, running_world, status_of

MORE_MEMORY = 500 << 20
"""What kvpin, and its engine, may take more during an attack."""
BETWEEN_S = 0.05
"""From one request of the innocent to the next."""
TINY_EVERY = 5
"""Every so many requests goes to the embedded engine, the others to the mock."""
HEALTH_EVERY = 4
PATIENCE_S = 30.0
REST_S = 30.0
MOST_LOG = 2 << 20
"""Bytes that kvpin may log in one attack."""
_KINDS = 3
_ENDED, _NOT_AT_REST, _ANEW = "kvpin ended", "not at rest", "the engine was started again"
_DAMAGES = (_ENDED, _NOT_AT_REST, _ANEW)
_BUGS = re.compile(
    r"Traceback|request crashed|task failed|bug in kvpin|is not healthy|engine (?:ended|died)|" + SECRET
)


def p99(seconds: list[float]) -> float:
    """The 99th percentile, 0 without any."""
    return sorted(seconds)[max(len(seconds) * 99 // 100 - (len(seconds) % 100 == 0), 0)] if seconds else 0.0


@dataclass(slots=True)
class Seen:
    """What the innocent saw.

    Attributes:
        well, tiny, health: seconds that answers took: of the mock, the embedded engine, and kvpin itself.
        failures: what went wrong.
    """

    well: list[float] = field(default_factory=list)
    tiny: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Innocent:
    """A tenant that sends a request every `BETWEEN_S`, streams and whole answers in turns.

    The embedded engine answers greedily, so each of its prompts has one right answer: the first it got.
    """

    def __init__(self, place: Place) -> None:
        self._place, self._key = place, GOOD if place.has_keys else ""
        self._numbers = itertools.count()
        self._right: dict[bytes, bytes] = {}

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Seen]:
        """Sends meanwhile; at the end waits for all answers."""
        seen, stop = Seen(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send(seen, stop, group))
            try:
                yield seen
            finally:
                stop.set()
                await sending

    async def _send(self, seen: Seen, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        while not stop.is_set():
            number = next(self._numbers)
            if number % HEALTH_EVERY == 0:
                group.create_task(self._one(head_of("GET", "/health/live"), b"", seen.health, seen))
            if number % TINY_EVERY == 0 and self._place.has_keys:
                body = chat(TINY, f"Tell me about {number // TINY_EVERY % 8}.", max_tokens=4, temperature=0)
                group.create_task(self._one(post(CHAT, body, key=self._key), b"", seen.tiny, seen))
            else:
                prompt = f"prompt {number}"
                body = chat(WELL, prompt, stream=number % 2 == 0)
                group.create_task(
                    self._one(post(CHAT, body, key=self._key), text_of(prompt).encode(), seen.well, seen)
                )
            await asyncio.sleep(BETWEEN_S)

    async def _one(self, request: bytes, right: bytes, times: list[float], seen: Seen) -> None:
        began = time.perf_counter()
        answer = await ask(self._place.port, request, seconds=PATIENCE_S)
        times.append(time.perf_counter() - began)
        what = request.partition(b"\r\n")[0].decode()
        if answer.status != 200:
            seen.failures.append(f"{what}: {_why(answer)}")
        elif times is seen.tiny:
            text = b"".join(re.findall(rb'"content":"(.*?)"', answer.raw))
            if not text or self._right.setdefault(request, text) != text:
                seen.failures.append(f"{what}: a wrong answer, {text!r}")
        elif right not in answer.raw or (b"event-stream" in answer.raw and b"[DONE]" not in answer.tail):
            seen.failures.append(f"{what}: not the whole answer, {answer.tail!r}")


def _why(answer: Answer) -> str:
    code = re.search(rb'"code":"(\w+)"', answer.raw)
    return f"{answer.status} {code[1].decode() if code is not None else ''}".rstrip()


@dataclass(slots=True)
class Result:
    """What an attack did.

    Attributes:
        name: of the attack.
        answers: how often each status came.
        alone, during: what the innocent saw before and beside it.
        more: bytes that kvpin and its engine took more, at their peaks.
        faults: everything that must not be.
    """

    name: str
    answers: Counter[int]
    alone: Seen
    during: Seen
    more: tuple[int, ...]
    seconds: float
    faults: list[str]

    @property
    def is_damaged(self) -> bool:
        """True if another kvpin is needed for what follows."""
        return not self.more or any(fault.startswith(_DAMAGES) for fault in self.faults)

    @classmethod
    def of_error(cls, attack: Attack, error: Exception) -> Result:
        """An attack after which kvpin could not be asked."""
        return cls(attack.name, Counter(), Seen(), Seen(), (), 0.0, [repr(error)[:300]])


def attackers(count: int) -> ProcessPoolExecutor:
    """Processes that attack. They let others go first: what they compute themselves must not count."""
    return ProcessPoolExecutor(count, get_context("spawn"), os.nice, (10,))


async def make(
    attack: Attack,
    place: Place,
    pool: ProcessPoolExecutor,
    *,
    small: bool,
    seconds: float = 0.0,
    beside_others: bool = False,
) -> tuple[Counter[int], list[str]]:
    """Makes an attack for `seconds`, at least once, in a process of the pool. Returns answers and faults."""
    until = time.monotonic() + seconds
    try:
        return await asyncio.get_running_loop().run_in_executor(
            pool, fire, attack.name, place, small, until, beside_others
        )
    except OSError as error:
        return Counter(), [f"kvpin is not there: {error}"]


class Watch:
    """What kvpin does between two moments: its memory, its log, its engine's process, what it still holds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pids = world.pids
        self._books = world.books()
        self._log_bytes = world.kvpin.log.stat().st_size
        world.forget_peaks()
        self._memory = [status_of(pid, "VmRSS") for pid in self._pids]

    def more(self) -> tuple[int, ...]:
        """Bytes that kvpin and its engine took more, at their peaks."""
        peaks = (status_of(pid, "VmHWM") for pid in self._pids)
        return tuple(max(peak - before, 0) for peak, before in zip(peaks, self._memory, strict=True))

    async def faults(self) -> list[str]:
        """What is wrong now that the attack is over."""
        if self._world.kvpin.process.poll() is not None:
            return [f"{_ENDED} with {self._world.kvpin.process.returncode}"]
        faults = [
            f"{who} took {more >> 20} MiB more"
            for who, more in zip(("kvpin", "the engine"), self.more(), strict=False)
            if more > MORE_MEMORY
        ]
        with self._world.kvpin.log.open("rb") as file:
            file.seek(self._log_bytes)
            logged = file.read(50 * MOST_LOG).decode(errors="replace")
        if len(logged) > MOST_LOG:
            faults.append(f"{len(logged) >> 20} MiB of log")
        for found in sorted({found[0] for found in _BUGS.finditer(logged)}):
            line = next(line for line in logged.splitlines() if found in line)
            faults.append(f"the log has {found!r}: {line[:300]}")
        held = await self._at_rest()
        if held.exceeds(self._books):
            faults.append(f"{_NOT_AT_REST}: {held}, before it {self._books}")
        if (pids := await asyncio.to_thread(lambda: self._world.pids)) != self._pids:
            faults.append(f"{_ANEW}: {self._pids} → {pids}")
        return faults

    async def _at_rest(self) -> Books:
        deadline = time.monotonic() + REST_S
        while True:
            books = await asyncio.to_thread(self._world.books)
            if not books.exceeds(self._books) or time.monotonic() > deadline:
                return books
            await asyncio.sleep(0.2)


def innocent_faults(seen: Seen) -> list[str]:
    """The failures that the innocent saw most often, with their counts."""
    kinds = Counter(seen.failures).most_common(_KINDS)
    return [f"innocent: {count} × {failure}" for failure, count in kinds]


async def try_attack(
    world: World,
    innocent: Innocent,
    attack: Attack,
    pool: ProcessPoolExecutor,
    *,
    small: bool,
    seconds: float,
) -> Result:
    """Makes one attack beside the innocent, for `seconds` and at least once. Before that, the innocent is
    alone for as long."""
    async with innocent.at_work() as alone:
        await asyncio.sleep(seconds)
    watch = Watch(world)
    began = time.monotonic()
    async with innocent.at_work() as during:
        await asyncio.sleep(2 * BETWEEN_S)
        answers, faults = await make(attack, world.place, pool, small=small, seconds=seconds)
        await asyncio.sleep(2 * BETWEEN_S)
    took, more = time.monotonic() - began, watch.more()
    faults += innocent_faults(during)
    faults += await watch.faults()
    return Result(attack.name, answers, alone, during, more, took, faults)


class Worlds:
    """Starts one world at a time."""

    def __init__(self, checkout: Path | None, faketime: Path | None, more_memory: int) -> None:
        """Args:
        checkout: of the kvpin that is attacked; None for this one.
        faketime: the library that sets kvpin's clock where an attack needs that.
        more_memory: bytes that kvpin and its engine may have more than at their start.
        """
        self._checkout, self._faketime, self._more_memory = checkout, faketime, more_memory
        self._stack = ExitStack()
        self._current: tuple[World, Innocent] | None = None
        self._is_for: tuple[bool, bool] | None = None

    def get(self, attack: Attack) -> tuple[World, Innocent]:
        """A kvpin that the attack fits, and the innocent there."""
        wanted = (attack.has_keys, attack.needs_clock)
        if self._current is None or self._is_for != wanted:
            self.end()
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "world")
            world = self._stack.enter_context(
                running_world(
                    directory,
                    has_keys=attack.has_keys,
                    checkout=self._checkout,
                    faketime=self._faketime if attack.needs_clock else None,
                )
            )
            world.limit(self._more_memory)
            self._current, self._is_for = (world, Innocent(world.place)), wanted
        return self._current

    def end(self) -> str | None:
        """Ends the kvpin. Returns what was wrong then."""
        self._current = None
        try:
            self._stack.close()
        except Exception as error:  # noqa: BLE001 - a kvpin that was attacked may end in any way
            return f"it did not end well: {str(error)[-400:]}"
        return None
