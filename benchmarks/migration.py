"""Engines killed (SIGKILL) in the middle of greedy streams: which go on, and whether a client can tell.

Two engines of a kind, which kvpin starts and restarts. Every stream is read twice: undisturbed, then in a
wave. When each stream of a wave has begun, one of its engines is killed. Both answers must be the same, text
and usage. Where they differ, the first token that differs must be a near tie: the two best tokens are so
close that rounding decides, which depends on what else the engine computes in the same step. The gap is the
longest pause between two chunks of a stream.

    python benchmarks/migration.py [--embedded 200] [--llama 100] [--wave 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from harness import ROOT, engine_pids, kvpin

TOKENS = 120
KILL_AFTER = 10
"""Chunks that each stream of a wave has before the kill."""
EMBEDDED_TIE, LLAMA_TIE = 1e-4, 0.01
"""Lead of the best token over the second, in logprob, below which rounding decides."""
LOG = Path(os.devnull)


@dataclass(frozen=True, slots=True)
class Read:
    """A stream as its client read it.

    Attributes:
        told: text, reason of the end, prompt and completion tokens; None if it broke off.
        text: as much as was read of it.
        error: the message of its error event, or why it was refused or broke off; empty if it did neither.
        ids: different ids and models in its chunks; 1 for one stream.
        gap: the longest pause between two chunks, in seconds.
        leads: of an undisturbed stream, for each token: the bytes its text begins and ends at, and the lead
            of the best token over the second, in logprob.
    """

    told: tuple[str, str, int, int] | None
    text: str
    error: str
    ids: int
    gap: float
    leads: list[tuple[int, int, float]]


def body_of(number: int) -> dict[str, Any]:
    """A greedy chat; each number has a prompt of its own."""
    text = f"Story {number}: " + f"a ship, a storm and lighthouse {number * 7919 % 1000}. " * 8
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def read(client: httpx.AsyncClient, number: int, name: str, begun: asyncio.Event | None = None) -> Read:
    """Reads a stream to its end; sets `begun` when it is well under way."""
    chunks: list[dict[str, Any]] = []
    last, gap, error = time.perf_counter(), 0.0, ""
    try:
        headers = {"x-request-id": name}
        path, body = "/v1/chat/completions", body_of(number)
        if begun is None:
            body |= {"logprobs": True, "top_logprobs": 2}
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            if answer.is_error:
                error = f"{answer.status_code}: {(await answer.aread()).decode()}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                gap, last = max(gap, now - last if chunks else 0.0), now
                chunks.append(json.loads(line[6:]))
                if begun is not None and len(chunks) > KILL_AFTER:
                    begun.set()
    except httpx.TransportError as broken:
        error = repr(broken)
    finally:
        if begun is not None:
            begun.set()
    return _read_of(chunks, gap, error)


def _read_of(chunks: list[dict[str, Any]], gap: float, error: str) -> Read:
    choices = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    errors = [chunk["error"]["message"] for chunk in chunks if "error" in chunk]
    ids = len({(chunk["id"], chunk["model"]) for chunk in chunks if "id" in chunk})
    told = None
    if len(ends) == len(usages) == 1:
        told = text, ends[0], usages[0]["prompt_tokens"], usages[0]["completion_tokens"]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return Read(told, text, errors[0] if errors else error, ids, gap, _leads(logprobs))


def _leads(logprobs: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """See `Read.leads`."""
    leads, length = [], 0
    for entry in (entry for each in logprobs for entry in each["content"] or ()):
        begins, length = length, length + len(entry["bytes"])
        best, second = (top["logprob"] for top in entry["top_logprobs"])
        leads.append((begins, length, best - second))
    return leads


async def wait_until_ready(client: httpx.AsyncClient) -> None:
    """Returns when all engines take requests."""
    while set((await client.get("/health/ready")).json()["engines"].values()) != {"ready"}:
        await asyncio.sleep(0.1)


async def one_wave(client: httpx.AsyncClient, numbers: range, victim: str) -> list[Read]:
    """Streams of which those on `victim` lose their engine."""
    begun = [asyncio.Event() for _ in numbers]
    running = [
        asyncio.create_task(read(client, number, f"killed-{number}", event))
        for number, event in zip(numbers, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(engine_pids(str(client.base_url))[victim], signal.SIGKILL)
    return await asyncio.gather(*running)


async def measure(url: str, title: str, streams: int, wave: int, tie: float) -> None:
    """Reads all streams twice and prints what became of the second ones."""
    limits = httpx.Limits(max_connections=None)
    alone: list[Read] = []
    killed: list[Read] = []
    fates, others = Counter[str](), Counter[str]()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        victims = sorted(engine_pids(url))
        for first in range(0, streams, wave):
            numbers = range(first, min(first + wave, streams))
            await wait_until_ready(client)
            alone += await asyncio.gather(*(read(client, n, f"alone-{n}") for n in numbers))
            killed += await one_wave(client, numbers, victims[first // wave % len(victims)])
        records = (await client.get("/admin/v1/requests", params={"limit": 10_000})).json()["requests"]
        hit = {record["client_request_id"] for record in records if record["interrupted"]}
        numbers_hit = [number for number in range(streams) if f"killed-{number}" in hit]
    for number in range(streams):
        counts = fates if f"killed-{number}" in hit else others
        counts[fate(alone[number], killed[number], tie)] += 1
    went_on = [killed[number].gap for number in numbers_hit if killed[number].told is not None]
    print(f"{title}: {streams} greedy streams of {TOKENS} tokens, {-(-streams // wave)} kills")
    print(f"  lost their engine    {len(numbers_hit)}: {dict(fates)}")
    print(f"  kept it              {sum(others.values())}: {dict(others)}")
    if went_on:
        middle, worst = statistics.median(went_on) * 1000, max(went_on) * 1000
        usual = statistics.median(each.gap for each in alone) * 1000
        print(
            f"  gap of the migrated  {middle:.0f} ms (median), {worst:.0f} ms (worst); usual: {usual:.0f} ms"
        )


def fate(alone: Read, killed: Read, tie: float) -> str:
    """The outcome of a stream, in words: how it differs from the same stream without a kill."""
    if alone.told is None:
        return f"not compared: the undisturbed stream failed ({alone.error or 'without a word'})"
    if killed.told == alone.told:
        return "identical" if killed.ids == 1 else "SEVERAL IDS"
    lead, at = lead_of_difference(alone, killed)
    print(
        f"  differs at byte {at}, where the best token leads by {lead:.4f}: {killed.error}", file=sys.stderr
    )
    if killed.told is None:
        near = " after a near tie" if lead < tie else ""
        why = killed.error.partition(": the first ")[0]
        return f"ended with an error{near} ({why})" if why else "BROKEN WITHOUT A WORD"
    return "near tie" if lead < tie else "DIFFERENT"


def lead_of_difference(alone: Read, killed: Read) -> tuple[float, int]:
    """The lead of the best token where a stream differs from the undisturbed one, and that byte.

    If both are the same as far as they go, the engine that was to go on chose another token somewhere in
    between: kvpin's error says where.
    """
    one, two = alone.text.encode(), killed.text.encode()
    pairs = enumerate(zip(one, two, strict=False))
    at = next((index for index, (left, right) in pairs if left != right), min(len(one), len(two)))
    said = re.search(r"the first (\d+) characters are the same", killed.error)
    if said is not None and one.startswith(two):
        at = len(killed.text[: int(said[1])].encode())
    around = (lead for begins, ends, lead in alone.leads if begins <= at <= ends)
    return min(around, default=math.inf), at


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedded", type=int, default=200)
    parser.add_argument("--llama", type=int, default=100)
    parser.add_argument("--wave", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.embedded:
        embedded = "embedded: --threads 1 --kv-blocks 2048"
        with kvpin("--managed", embedded, "--managed", embedded, log=LOG) as url:
            asyncio.run(measure(url, "embedded", arguments.embedded, arguments.wave, EMBEDDED_TIE))
    if arguments.llama:
        sys.path.insert(0, str(ROOT))
        from scripts.make_gguf import gguf_path  # noqa: PLC0415 - needs packages that embedded engines do not

        binary = [ROOT / "scripts" / "llama-server"]
        found = subprocess.run(binary, check=True, capture_output=True, text=True)
        os.environ["LLAMA_SERVER"] = found.stdout.strip()
        slots = arguments.wave // 2 + 4
        llama = (
            f"llama-server: -m {gguf_path('large')} -t 1 -np {slots} -c {slots * 1024} --cache-ram 0 -fa off"
        )
        with kvpin("--managed", llama, "--managed", llama, log=LOG) as url:
            asyncio.run(measure(url, "llama-server", arguments.llama, arguments.wave, LLAMA_TIE))


if __name__ == "__main__":
    main()
