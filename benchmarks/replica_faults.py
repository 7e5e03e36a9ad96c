"""Two kvpins with a Valkey exchange, and a fault between 15 s and 45 s of a run.

Four mock vLLMs serve workload (a) of `router_work.py`. kvpin follows them by their answers alone, so that all
it knows of the other kvpin's requests comes through the exchange. A client that gets no whole answer asks the
other kvpin once. One kvpin, and two without an exchange, stand beside it without a fault.

    python benchmarks/replica_faults.py [--runs one,kvpin,…] [--rate 8] [--seed 1] [--first]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from typing import Self

import httpx
from harness import ROOT, free_port, some_of
from replicas import kvpin_start
from router_client import CHAT, Answer, ask, play
from router_peers import Engine, started
from router_work import MIXES, Question, make_warm_up, make_work
from routers import SETTLE_S, before_others, engines

from engine_adapter import Headers, HttpTransport

sys.path.insert(0, str(ROOT))
from tests.relay import Relay
from tests.valkey import Valkey

FAULT_S, HEAL_S, END_S = 15.0, 45.0, 70.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """A run: how many kvpins, whether they exchange, and the fault. `delay_s` is that of each message
    from and to the first kvpin."""

    title: str
    count: int = 2
    exchanges: bool = True
    fault: str | None = None
    delay_s: float = 0.0


RUNS = {
    "one": Run("one kvpin, no fault", 1, exchanges=False),
    "alone": Run("two without exchange, no fault", exchanges=False),
    "none": Run("two, no fault"),
    "kvpin": Run("kill -9 of a kvpin, 30 s", fault="kvpin"),
    "redis": Run("kill -9 of Valkey, 30 s", fault="redis"),
    "partition": Run("a partition of 30 s", fault="partition"),
    "behind": Run("a kvpin 0.8 s behind for 30 s", fault="delay", delay_s=0.8),
    "far-behind": Run("a kvpin 2 s behind for 30 s", fault="delay", delay_s=2.0),
}


@dataclass(slots=True)
class Outcome:
    """The figures of a run.

    Attributes:
        questions, answers: of each request.
        retried: how many were asked again.
        noticed_s, recovered_s: from the fault and from its end; None if not seen.
    """

    questions: Sequence[Question]
    answers: list[Answer] = field(default_factory=list)
    retried: int = 0
    noticed_s: float | None = None
    recovered_s: float | None = None

    def row(self, title: str) -> str:
        """As a row of the table."""
        failed = sum(bool(answer.error) for answer in self.answers)
        phases = [self._phase(*span) for span in ((0, FAULT_S), (FAULT_S, HEAL_S), (HEAL_S, END_S))]
        hits = " | ".join(f"{100 * hits:.1f}%" for hits, _ in phases)
        first = " | ".join(f"{first_ms:.0f}" for _, first_ms in phases)
        times = " | ".join(
            "–" if each is None else f"{each:.1f}" for each in (self.noticed_s, self.recovered_s)
        )
        return f"| {title} | {failed} | {self.retried} | {hits} | {first} | {times} |"

    def _phase(self, start: float, end: float) -> tuple[float, float]:
        """Hits, and mean milliseconds to the first token, of requests that were due then."""
        pairs = zip(self.questions, self.answers, strict=True)
        answers = [answer for question, answer in pairs if start <= question.at < end]
        prompts = sum(answer.prompt_tokens for answer in answers)
        first = [1000 * answer.first_token_s for answer in answers if answer.first_token_s is not None]
        return sum(answer.cached_tokens for answer in answers) / max(prompts, 1), statistics.fmean(first)


class Group:
    """The kvpins of a run, their server, and the relay before the first one."""

    def __init__(self, run: Run, served: Sequence[Engine], directory: Path) -> None:
        self._run, self._served, self._directory = run, served, directory
        self._stack, self._kvpins = AsyncExitStack(), ExitStack()
        self._ports = [free_port() for _ in range(run.count)]
        self._processes = list[Popen[bytes]]()
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]

    async def __aenter__(self) -> Self:
        self._valkey = Valkey()
        self._stack.callback(self._valkey.kill)
        self._relay = await self._stack.enter_async_context(Relay(self._valkey.port))
        for number in range(self._run.count):
            self._processes.append(await asyncio.to_thread(self._start, number))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._kvpins.close)
        await self._stack.aclose()

    def _start(self, number: int) -> Popen[bytes]:
        port = self._valkey.port if number else self._relay.port
        exchange = f"redis://127.0.0.1:{port}/0" if self._run.exchanges else None
        start = kvpin_start(self._served, exchange, self._ports[number], learned=True)
        log = self._directory / f"{self._run.fault}-{number}-{time.monotonic():.0f}.log"
        return self._kvpins.enter_context(started("kvpin", start, self._ports[number], log))

    async def harm(self) -> None:
        """The fault begins."""
        match self._run.fault:
            case "kvpin":
                self._processes[0].kill()
            case "redis":
                await asyncio.to_thread(self._valkey.kill)
            case "partition":
                self._relay.cut()
            case "delay":
                self._relay.delay_s = self._run.delay_s

    async def heal(self) -> None:
        """The fault ends."""
        match self._run.fault:
            case "kvpin":
                await asyncio.to_thread(self._start, 0)
            case "redis":
                await asyncio.to_thread(self._valkey.start)
            case "partition":
                self._relay.heal()
            case "delay":
                self._relay.delay_s = 0.0

    async def is_well(self, client: httpx.AsyncClient) -> bool:
        """True if all kvpins are there, and each knows all requests of the other in time."""
        try:
            looks = [(await client.get(f"{url}/admin/v1/stats")).json()["exchange"] for url in self.urls]
        except httpx.HTTPError:
            return False
        return all(
            look["connected"]
            and len(look["peers"]) == len(self.urls) - 1
            and all(peer["in_step"] for peer in look["peers"])
            for look in looks
        )


async def measure(run: Run, served: Sequence[Engine], work: Sequence[Question], seed: int) -> Outcome:
    """Plays the work, with the fault in its middle, before engines that have forgotten everything."""
    async with httpx.AsyncClient() as client:
        for engine in served:
            (await client.post(f"{engine.url}/mock/restart")).raise_for_status()
    outcome = Outcome(work)
    with tempfile.TemporaryDirectory() as directory:
        async with Group(run, served, Path(directory)) as group:
            await play(group.urls, make_warm_up(), None)
            await asyncio.sleep(SETTLE_S)
            start = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                playing = tasks.create_task(_play(group.urls, work, start, random.Random(seed), outcome))  # noqa: S311
                if run.fault is not None:
                    tasks.create_task(_fault(group, start, outcome))
            outcome.answers = playing.result()
    return outcome


async def _fault(group: Group, start: float, outcome: Outcome) -> None:
    async with httpx.AsyncClient(timeout=5) as client:
        await asyncio.sleep(start + FAULT_S - time.monotonic())
        await group.harm()
        while time.monotonic() < start + HEAL_S - 1:
            if not await group.is_well(client):
                outcome.noticed_s = time.monotonic() - start - FAULT_S
                break
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(start + HEAL_S - time.monotonic())
        await group.heal()
        while time.monotonic() < start + END_S:
            if await group.is_well(client):
                outcome.recovered_s = time.monotonic() - start - HEAL_S
                return
            await asyncio.sleep(LOOK_S)


async def _play(
    urls: Sequence[str], work: Sequence[Question], start: float, dice: random.Random, outcome: Outcome
) -> list[Answer]:
    """Sends each request to a kvpin at random, when it is due."""
    headers = Headers.of([("content-type", "application/json")])

    async def one(question: Question, order: Sequence[str]) -> Answer:
        due = start + question.at
        answer = Answer()
        for number, url in enumerate(order):
            outcome.retried += number
            answer = await ask(client, f"{url}{CHAT}", headers, question, due)
            if not answer.error:
                break
        return answer

    async with aclosing(HttpTransport()) as client:
        tasks = []
        for question in work:
            await asyncio.sleep(max(0.0, start + question.at - time.monotonic()))
            tasks.append(asyncio.create_task(one(question, dice.sample(urls, len(urls)))))
        return await asyncio.gather(*tasks)


def main() -> None:
    """Runs what was asked for, and prints a table."""
    arguments = _arguments()
    mix = replace(MIXES["a"], requests_per_s=arguments.rate)
    work = [question for question in make_work(mix, arguments.seed) if question.at < END_S]
    print(
        "| | failed | asked again | hits before | during | after | first token ms before | during | after ",
        end="",
    )
    print("| noticed after s | recovered after s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    first = before_others() if arguments.first else nullcontext()
    with first, engines(mix, arguments.prefill_rate, arguments.token_ms) as served:
        for name in arguments.runs:
            outcome = asyncio.run(measure(RUNS[name], served, work, arguments.seed))
            print(outcome.row(RUNS[name].title), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=some_of(RUNS), default=list(RUNS), help="of " + ",".join(RUNS))
    parser.add_argument("--rate", type=float, default=8, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill-rate", type=float, default=10_000, help="tokens a second of an engine")
    parser.add_argument("--token-ms", type=float, default=15, help="from token to token")
    parser.add_argument("--first", action="store_true", help="before other work on this machine; as root")
    return parser.parse_args()


if __name__ == "__main__":
    main()
