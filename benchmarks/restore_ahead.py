"""Measures what kvpin gains by restoring KV before the turn that needs it.

More conversations than the GPU tier of one embedded engine can hold take turns, each after its own pause.
`agents` pause equally long every time (±10%). The pauses of `people` vary: they are log-normal, from a fifth
of the usual pause to five times it. The least recently used KV moves to host memory. It comes back on demand,
or before that with `restore_ahead`. The same conversations with the same pauses run with and without
`restore_ahead` at the same time, each on an engine with one thread, so that both see the same noise. The
model has one KV head for each attention head, so that there is much to move (512 KiB a block).

    python benchmarks/restore_ahead.py [--sessions 8] [--turns 10] [--rounds 2] [--pause 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from harness import kvpin, made_model

BLOCKS = 512
# With as many KV heads as heads.
SIZES = ("--layers", "8", "--hidden", "512", "--heads", "8", "--kv-heads", "8")


@dataclass
class Tally:
    """The figures of the returning turns of a run."""

    first_s: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    exact: int = 0
    ahead: dict[str, int] = field(default_factory=dict)
    restored: int = 0

    def add(self, other: Tally) -> None:
        """Another round of the same."""
        self.first_s += other.first_s
        self.cached += other.cached
        self.prompt += other.prompt
        self.exact += other.exact
        self.restored += other.restored
        for name, number in other.ahead.items():
            self.ahead[name] = self.ahead.get(name, 0) + number


def pauses(rhythm: str, usual_s: float, turns: int, dice: random.Random) -> list[float]:
    """Seconds before each turn."""
    if rhythm == "agents":
        return [usual_s * dice.uniform(0.9, 1.1) for _ in range(turns)]
    return [usual_s * min(max(dice.lognormvariate(0, 0.8), 0.2), 5.0) for _ in range(turns)]


async def converse(
    client: httpx.AsyncClient, model: str, number: int, waits: list[float], entries: int, tally: Tally
) -> None:
    """One conversation: a long document, then a short question each turn."""
    document = f"Log {number}: " + " ".join(f"entry {n} of {number} was fine." for n in range(entries))
    messages = [{"role": "user", "content": document}]
    for turn, wait_s in enumerate(waits):
        await asyncio.sleep(wait_s)
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first_s, text, usage = time.perf_counter(), 0.0, "", {}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            predicted = int(answer.headers["x-kvpin-predicted-tokens"])
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if piece:
                    first_s = first_s or time.perf_counter() - started
                    text += piece
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if turn:
            tally.first_s.append(first_s)
            tally.cached += cached
            tally.prompt += usage["prompt_tokens"]
            tally.exact += cached == predicted
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]


async def play(url: str, arguments: argparse.Namespace, rhythm: str, seed: int, offset_s: float) -> Tally:
    """All conversations at once; what they saw, and what the engine did."""
    dice, tally = random.Random(seed), Tally()  # noqa: S311 - not for secrets
    await asyncio.sleep(offset_s)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        plans = [pauses(rhythm, arguments.pause, arguments.turns, dice) for _ in range(arguments.sessions)]
        for number, plan in enumerate(plans):
            plan[0] = arguments.pause * number / arguments.sessions  # they begin one after the other
            await converse(client, model, number, [0.0], arguments.entries, tally)  # the documents are read
        await asyncio.gather(
            *(
                converse(client, model, number, plan, arguments.entries, tally)
                for number, plan in enumerate(plans)
            )
        )
        stats = (await client.get("/admin/v1/stats")).json()
    engine = stats["pools"][0]["engines"][0]
    tally.ahead, tally.restored = engine["restored_ahead"], engine["kv"]["blocks"]["restored"]
    return tally


async def both(urls: tuple[str, str], arguments: argparse.Namespace, rhythm: str, seed: int) -> list[Tally]:
    """The same on two proxies; half a step apart, so that not every turn meets its twin."""
    offset_s = arguments.pause / arguments.sessions / 2
    return await asyncio.gather(
        *(play(url, arguments, rhythm, seed, n * offset_s) for n, url in enumerate(urls))
    )


@contextmanager
def proxy(engine: str, *, ahead: bool) -> Iterator[str]:
    """A proxy with its engine, which restores ahead or does not."""
    os.environ["KVPIN_RESTORE_AHEAD"] = str(ahead).lower()
    try:
        with kvpin("--managed", engine, ready_s=300, log=Path(os.devnull)) as url:
            yield url
    finally:
        os.environ.pop("KVPIN_RESTORE_AHEAD", None)


def show(name: str, tally: Tally) -> None:
    """One line."""
    times = sorted(1000 * seconds for seconds in tally.first_s)
    deciles = statistics.quantiles(times, n=10)
    ahead = tally.ahead
    print(
        f"{name:20} TTFT ms mean {statistics.fmean(times):6.0f}  p50 {statistics.median(times):6.0f}  "
        f"p90 {deciles[-1]:6.0f}   hits {100 * tally.cached / tally.prompt:5.1f}%  "
        f"exact {100 * tally.exact / len(times):5.1f}%  blocks restored {tally.restored:6d}   "
        f"ahead {ahead['restores']:3d}: used {ahead['used']:3d}, wasted {ahead['wasted']:3d}"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pause", type=float, default=16.0)
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rhythm", choices=("agents", "people"))
    arguments = parser.parse_args()
    model = arguments.model or made_model("bench-25m-kv", *SIZES)
    engine = f"embedded: --model {model} --threads 1 --kv-blocks {BLOCKS} --host-cache-bytes 1GiB"
    for rhythm in (arguments.rhythm,) if arguments.rhythm else ("agents", "people"):
        tallies = {True: Tally(), False: Tally()}
        for number in range(arguments.rounds):
            order = (True, False) if number % 2 else (False, True)
            with proxy(engine, ahead=order[0]) as first, proxy(engine, ahead=order[1]) as second:
                results = asyncio.run(both((first, second), arguments, rhythm, arguments.seed + number))
            for ahead, result in zip(order, results, strict=True):
                tallies[ahead].add(result)
        for ahead, tally in tallies.items():
            show(f"{rhythm}, {'ahead' if ahead else 'on demand'}", tally)


if __name__ == "__main__":
    main()
