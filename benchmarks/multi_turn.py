"""Are predictions exact, and does routing keep the hits that one big cache would have had?

Conversations with a shared system prompt grow turn by turn, interleaved, over two engines whose pools are too
small for all of them. The same conversations then run on one engine with the memory of both; its reuse is the
upper bound.

    python benchmarks/multi_turn.py [--requests 500] [--conversations 20] [--concurrency 1] [--kv-blocks 320]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx
from harness import kvpin

SYSTEM = "You are a careful assistant. " + "Answer briefly and name your sources. " * 6
TOPICS = ("tides", "lighthouses", "harbours", "charts", "winds", "knots", "sails", "stars")


@dataclass
class Tally:
    """The figures of a run."""

    exact: int = 0
    predicted: int = 0
    cached: int = 0
    prompt: int = 0
    evicted: int = 0
    per_engine: Counter[str] = field(default_factory=Counter)
    misses: list[tuple[int, int, int]] = field(default_factory=list)


async def run(url: str, schedule: list[list[int]], concurrency: int) -> Tally:
    """Plays the schedule: rounds of conversation numbers; each entry is that conversation's next turn."""
    tally = Tally()
    histories: dict[int, list[dict[str, str]]] = {}
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def turn(conversation: int) -> None:
            messages = histories.setdefault(
                conversation, [{"role": "system", "content": f"{SYSTEM} Reader {conversation}."}]
            )
            topic = TOPICS[(conversation + len(messages)) % len(TOPICS)]
            messages.append(
                {"role": "user", "content": f"Question {len(messages)}: tell me more about {topic}."}
            )
            body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
            async with gate:
                answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            content = answer.json()
            messages.append({"role": "assistant", "content": content["choices"][0]["message"]["content"]})
            predicted = int(answer.headers["x-kvpin-predicted-tokens"])
            cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
            tally.predicted += predicted
            tally.cached += cached
            tally.prompt += content["usage"]["prompt_tokens"]
            tally.exact += predicted == cached
            tally.per_engine[answer.headers["x-kvpin-engine"]] += 1
            if predicted != cached:
                tally.misses.append((conversation, predicted, cached))

        for turns in schedule:
            await asyncio.gather(*(turn(conversation) for conversation in turns))
        stats = (await client.get("/admin/v1/stats")).json()
        engines = [engine["kv"] for pool in stats["pools"] for engine in pool["engines"]]
        tally.evicted = sum(kv["blocks"]["evicted"] for kv in engines)
    return tally


def make_schedule(requests: int, conversations: int, turns: int, seed: int) -> list[list[int]]:
    """Rounds of different conversations; a conversation that has had its turns gives way to a new one."""
    dice = random.Random(seed)  # noqa: S311 - not for secrets
    left = dict.fromkeys(range(conversations), turns)
    fresh = conversations
    schedule = []
    while sum(map(len, schedule)) < requests:
        chosen = dice.sample(sorted(left), k=min(4, len(left)))
        schedule.append(chosen)
        for conversation in chosen:
            left[conversation] -= 1
            if not left[conversation]:
                del left[conversation]
                left[fresh] = turns
                fresh += 1
    return schedule


def main() -> None:
    """Runs both set-ups and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--kv-blocks", type=int, default=320, help="blocks of each of the two engines")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    schedule = make_schedule(arguments.requests, arguments.conversations, arguments.turns, arguments.seed)

    small = f"embedded: --threads 1 --kv-blocks {arguments.kv_blocks} --host-cache-bytes 0"
    large = f"embedded: --threads 2 --kv-blocks {2 * arguments.kv_blocks} --host-cache-bytes 0"
    with kvpin("--managed", small, "--managed", small) as url:
        two = asyncio.run(run(url, schedule, arguments.concurrency))
    with kvpin("--managed", large) as url:
        one = asyncio.run(run(url, schedule, arguments.concurrency))

    count = sum(two.per_engine.values())
    print(f"requests            {count} over {dict(two.per_engine)}")
    print(f"prediction exact    {two.exact} = {100 * two.exact / count:.1f}%")
    print(f"token hit rate      {100 * two.cached / two.prompt:.1f}% of {two.prompt} prompt tokens")
    print(f"one joint engine    {100 * one.cached / one.prompt:.1f}%")
    print(f"blocks evicted      {two.evicted} by the two, {one.evicted} by the joint one")
    print(f"hits of possible    {100 * two.cached / one.cached:.1f}%")
    print(f"missed predictions  {json.dumps(two.misses[:10])}  [conversation, predicted, reported]")


if __name__ == "__main__":
    main()
