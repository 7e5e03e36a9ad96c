"""Three times the load that engines can serve, from a greedy and a modest tenant, with and without admission.

Two mock vLLMs (`mock_engine.py`) with real caches and KV events serve kvpin over sockets. Requests arrive at
random, whatever comes back. Each has its tenant's system prompt, which is soon cached, and a question of its
own. An answer is good if its first token comes within `LIMIT_S`. Three runs:

    peak          as much load as the engines can serve, in equal parts
    admission     3 times that: the modest tenant sends a fifth of what can be served, the greedy one the rest
    no admission  the same, with a kvpin that holds nothing back

    python benchmarks/overload.py [--seconds 300]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from harness import running
from rich.console import Console
from rich.table import Table
from router_work import MODEL, text_of, words

from engine_adapter import EngineUnavailable, Headers, HttpTransport, IncomingResponse, OutgoingRequest
from proxy.replay.simulator import quantile_of

ENGINES = 2
# Tokens a second that one engine computes. Slow, so that the engines are overloaded and not this machine.
PREFILL_RATE = 800
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 500, 200, 8
# About what of a prompt is computed: the question, the template, and the rest of a block.
COMPUTED_TOKENS = 220
CAPACITY = ENGINES * PREFILL_RATE / COMPUTED_TOKENS
# kvpin's `limits.queue_s`, and what counts as good: that, the second of work that an engine has, and itself.
QUEUE_S, LIMIT_S = 4, 6
OVERLOAD, MODEST = 3.0, 0.2
# Not counted: system prompts are computed, rates are learned, queues fill.
WARM_UP_S = 10
TIMEOUT_S = 600
# Holds nothing back: no engine is ever too busy.
NO_ADMISSION = "import proxy.fleet.pool as pool; pool.HOLD_S = 1e9; from proxy.cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends requests: its name, which is its key, and how many a second."""

    name: str
    rate: float


@dataclass(slots=True)
class Tally:
    """The outcomes of a tenant's requests.

    For those that were served: seconds from arrival to first token. For all: how many had each status.
    """

    first_token_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> int:
        """Answers whose first token came in time."""
        return sum(seconds <= LIMIT_S for seconds in self.first_token_s)

    def percentile(self, share: float) -> float:
        """A percentile of the times to first token, in seconds; 0 without any."""
        return quantile_of(sorted(self.first_token_s), share) if self.first_token_s else 0.0


async def play(url: str, tenants: Sequence[Tenant], seconds: float) -> dict[str, Tally]:
    """Sends what the tenants send in so many seconds; returns what became of it."""
    dice = random.Random(1)  # noqa: S311 - not for secrets
    tallies = {tenant.name: Tally() for tenant in tenants}
    async with aclosing(HttpTransport()) as client, asyncio.TaskGroup() as group:
        start = time.monotonic()
        for tenant in tenants:
            group.create_task(_send(group, client, url, tenant, tallies[tenant.name], start, seconds, dice))
    return tallies


async def _send(
    group: asyncio.TaskGroup,
    client: HttpTransport,
    url: str,
    tenant: Tenant,
    tally: Tally,
    start: float,
    seconds: float,
    dice: random.Random,
) -> None:
    known = tuple(words())
    system = text_of(dice.choices(known, k=SYSTEM_TOKENS))
    due = start
    while (due := due + dice.expovariate(tenant.rate)) < start + seconds:
        question = text_of(dice.choices(known, k=QUESTION_TOKENS))
        body = msgspec.json.encode(
            {
                "model": MODEL,
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
                "max_tokens": ANSWER_TOKENS,
                "stream": True,
            }
        )
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        counted = tally if due > start + WARM_UP_S else Tally()
        group.create_task(_ask(client, url, tenant, body, due, counted))


async def _ask(
    client: HttpTransport, url: str, tenant: Tenant, body: bytes, due: float, tally: Tally
) -> None:
    headers = Headers.of([("content-type", "application/json"), ("authorization", f"Bearer {tenant.name}")])
    request = OutgoingRequest("POST", f"{url}/v1/chat/completions", headers.raw, body)
    try:
        async with asyncio.timeout(TIMEOUT_S), await client.send(request) as response:
            if response.status == 200:
                await _read(response, due, tally)
            tally.statuses[str(response.status)] += 1
    except (EngineUnavailable, TimeoutError) as error:
        tally.statuses[type(error).__name__] += 1


async def _read(response: IncomingResponse, due: float, tally: Tally) -> None:
    """The first text is in the second event."""
    events = 0
    while piece := await response.receive():
        before, events = events, events + piece.count(b"\n\n")
        if before < 2 <= events:
            tally.first_token_s.append(time.monotonic() - due)


def measure(tenants: Sequence[Tenant], seconds: float, *, admits: bool) -> dict[str, Tally]:
    """One run, with engines and a kvpin of its own."""
    mock = [
        sys.executable,
        "benchmarks/mock_engine.py",
        "--prefill-rate",
        str(PREFILL_RATE),
        "--token-ms",
        "20",
    ]
    keys = msgspec.json.encode([{"key": tenant.name, "tenant": tenant.name} for tenant in tenants])
    environment = {
        **os.environ,
        "ENABLE_KV_CACHE_REUSE": "1",
        "KVPIN_API_KEYS": keys.decode(),
        "KVPIN_LIMITS__QUEUE_S": str(QUEUE_S),
    }
    with ExitStack() as stack:

        def run(command: list[str], health: str) -> str:
            # An engine with a long queue does not end by itself.
            server = running(command, environment, health, 120, Path(os.devnull), kills=True)
            return stack.enter_context(server)

        engines = [run(mock, "/health") for _ in range(ENGINES)]
        flags = [word for url in engines for word in ("--engine", f"vllm={url}")]
        kvpin = ["-m", "proxy.cli"] if admits else ["-c", NO_ADMISSION]
        url = run([sys.executable, *kvpin, "serve", *flags], "/health/ready")
        time.sleep(3)  # for the tokenizer to be loaded and checked
        return asyncio.run(play(url, tenants, seconds))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="of each run")
    seconds = parser.parse_args().seconds
    equal = [Tenant("modest", CAPACITY / 2), Tenant("greedy", CAPACITY / 2)]
    unequal = [
        Tenant("modest", MODEST * CAPACITY),
        Tenant("greedy", (OVERLOAD - MODEST) * CAPACITY),
    ]
    words()  # not while requests are due
    console, peak = Console(width=120), 0.0
    for title, tenants, admits in (
        ("peak", equal, True),
        ("admission", unequal, True),
        ("no admission", unequal, False),
    ):
        tallies = measure(tenants, seconds, admits=admits)
        table = Table(
            title=f"{title}: {seconds:g} s, capacity about {CAPACITY:.1f} requests/s, good within {LIMIT_S} s"
        )
        for column in ("tenant", "sent/s", "good/s", "p50 s", "p99 s", "statuses"):
            table.add_column(column)
        counted_s = seconds - WARM_UP_S
        for tenant in tenants:
            tally = tallies[tenant.name]
            table.add_row(
                tenant.name,
                f"{tally.statuses.total() / counted_s:.2f}",
                f"{tally.good / counted_s:.2f}",
                f"{tally.percentile(0.5):.2f}",
                f"{tally.percentile(0.99):.2f}",
                ", ".join(f"{name}: {count}" for name, count in sorted(tally.statuses.items())),
            )
        goodput = sum(tally.good for tally in tallies.values()) / counted_s
        peak = peak or goodput or 1.0
        table.add_row("both", "", f"{goodput:.2f}", "", "", f"{goodput / peak:.0%} of the peak")
        console.print(table)


if __name__ == "__main__":
    main()
