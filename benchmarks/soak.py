"""Does any client get a wrong answer? Sends hundreds of mixed requests over caches that are too small.

The requests are chats with shared prefixes, token ids, p-tuning tables, embeddings, salts, sampling, streams
and clients that hang up, while an operator flushes, offloads, restores, pins and warms at random. Each answer
is then compared with that of an engine that gets the same request alone, with an empty cache. If a greedy
answer differs where the two best tokens are nearly equal, that is float noise; any other difference is
corruption.

At the end no block may be in use, none pending, and the index must equal what engines hold.

    python benchmarks/soak.py [--seconds 60] [--concurrency 12] [--kv-blocks 160] [--tokens-per-block 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from harness import engine, kvpin
from soak_work import CHAT, Ask, Workload, table

NEAR_TIE = 1e-4  # difference of logprobs below which the order of summation decides
TABLES = {"harbour": 1, "lighthouse": 2}


@dataclass
class Answer:
    """The answer that a client got: all of it, or its beginning when `whole` is false."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    whole: bool = False
    predicted: int | None = None
    cached: int | None = None
    problem: str | None = None

    @property
    def crowded_out(self) -> bool:
        """Refused, as no engine had room for it beside what the operator has pinned."""
        return self.problem is not None and "no room for this request beside" in self.problem


async def send(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """Asks; hangs up early where the client of this request does."""
    answer = Answer(ask)
    try:
        async with client.stream("POST", f"/v1/{ask.path}", json=ask.body) as response:
            if response.status_code != httpx.codes.OK:
                answer.problem = f"{response.status_code} {(await response.aread()).decode()[:200]}"
                return answer
            answer.predicted = _number(response, "x-kvpin-predicted-tokens")
            answer.cached = _number(response, "x-kvpin-cached-tokens")
            if ask.body["stream"]:
                await _read_stream(response, ask, answer)
            elif ask.leave_after is None:
                _take(json.loads(await response.aread())["choices"][0], answer)
                answer.whole = True
    except httpx.HTTPError as error:
        answer.problem = repr(error)
    return answer


async def _read_stream(response: httpx.Response, ask: Ask, answer: Answer) -> None:
    chunks = 0
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            answer.whole = True
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                answer.problem = str(chunk["error"])
                return
            _take(chunk["choices"][0], answer)
            chunks += 1
            if ask.leave_after is not None and chunks > ask.leave_after:
                return


def _take(choice: dict[str, Any], answer: Answer) -> None:
    message = choice.get("delta") or choice.get("message") or choice
    answer.text += message.get("content") or message.get("text") or ""
    answer.tokens += choice["token_ids"]
    answer.finish = choice["finish_reason"]


def _number(response: httpx.Response, header: str) -> int | None:
    value = response.headers.get(header)
    return None if value is None else int(value)


class Soak:
    """One run against a kvpin at `url`."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        room = arguments.kv_blocks * arguments.tokens_per_block
        self._work = Workload(arguments.seed, room, list(TABLES))
        self._dice = random.Random(arguments.seed)  # noqa: S311 - not for secrets
        self._until = 0.0
        self.answers: list[Answer] = []
        self.operations: Counter[str] = Counter()
        self.complaints: list[str] = []

    async def run(self) -> None:
        """Sends for the time given, waits for quiet, then looks at the books."""
        async with self._client:
            for name, seed in TABLES.items():
                response = await self._client.post(
                    "/admin/v1/prompt_tables",
                    params={"id": name},
                    content=table(seed),
                    headers={"content-type": "application/octet-stream"},
                )
                response.raise_for_status()
            self._until = time.monotonic() + self._arguments.seconds
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._arguments.concurrency):
                    tasks.create_task(self._client_loop())
                tasks.create_task(self._operator_loop())
            await self._quiet()
            await self._check_predictions()
            await self._check_books()

    async def _client_loop(self) -> None:
        while time.monotonic() < self._until:
            ask = self._work.draw()
            if ask.leave_after is not None and not ask.body["stream"]:
                task = asyncio.create_task(send(self._client, ask))
                await asyncio.wait((task,), timeout=ask.leave_after / 20)
                task.cancel()
                continue
            answer = await send(self._client, ask)
            self.answers.append(answer)
            if answer.whole:
                ask.answered(answer.text)

    async def _operator_loop(self) -> None:
        pins: list[str] = []
        while time.monotonic() < self._until:
            verb, body = self._work.operation(pins)
            response = await self._client.post(f"/admin/v1/{verb}", json=body)
            content = response.json()
            state = content.get("state", response.status_code)
            self.operations[f"{verb} {state}"] += 1
            lapsed = verb == "unpin" and state == httpx.codes.NOT_FOUND
            if state not in ("done", "running") and not lapsed:
                self.complaints.append(f"{verb}: {json.dumps(content)[:300]}")
            if verb == "pin" and state == "done" and content["result"]:
                pins.append(content["result"]["pin_id"])
            await asyncio.sleep(self._dice.uniform(0, 0.3))

    async def _quiet(self) -> None:
        """Waits until nothing runs and nothing is pinned."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            stats = await self._stats()
            busy = any(
                e["in_flight"] or e["kv"]["gpu"]["active"] or e["kv"]["pins"] for e in stats["engines"]
            )
            if not busy and not stats["totals"]["in_flight"]:
                return
            await asyncio.sleep(0.2)
        self.complaints.append(f"not quiet after 30 s: {stats}")

    async def _check_predictions(self) -> None:
        """Without anything else going on, every prediction must be exact."""
        await asyncio.sleep(0.5)
        for answer in self._dice.sample(self.answers, k=min(30, len(self.answers))):
            ask = Ask(answer.ask.path, {**answer.ask.body, "max_tokens": 1, "stream": False}, "quiet")
            quiet = await send(self._client, ask)
            self.answers.append(quiet)
            if quiet.predicted != quiet.cached:
                self.complaints.append(f"at rest, predicted {quiet.predicted}, cached {quiet.cached}")
            await asyncio.sleep(0.05)

    async def _check_books(self) -> None:
        await asyncio.sleep(0.5)
        for engine_stats in (await self._stats())["engines"]:
            kv, blocks, name = engine_stats["kv"], engine_stats["blocks"], engine_stats["id"]
            gpu = kv["gpu"]
            if gpu["free"] + gpu["cached"] != gpu["total"] or gpu["active"] or kv["pinned_blocks"]:
                self.complaints.append(f"{name}: the tier does not add up: {kv}")
            if (blocks["gpu"], blocks["host"]) != (gpu["cached"], kv["host"]["cached"]):
                self.complaints.append(f"{name}: the index has {blocks}, the engine {gpu} and {kv['host']}")
        (await self._client.post("/admin/v1/flush", json={"all": True})).raise_for_status()
        await asyncio.sleep(0.5)
        after = await self._stats()
        if after["totals"]["index_entries"]:
            self.complaints.append(f"{after['totals']['index_entries']} blocks in the index after a flush")
        for engine_stats in after["engines"]:
            if engine_stats["kv"]["gpu"]["free"] != engine_stats["kv"]["gpu"]["total"]:
                self.complaints.append(f"{engine_stats['id']}: blocks left by a flush: {engine_stats['kv']}")

    async def _stats(self) -> dict[str, Any]:
        stats = (await self._client.get("/admin/v1/stats")).raise_for_status().json()
        engines = [engine for pool in stats["pools"] for engine in pool["engines"]]
        return {"engines": engines, "totals": stats["totals"]}


async def judge(url: str, answers: list[Answer]) -> tuple[Counter[str], list[str]]:
    """Holds every answer against one engine that is asked alone, each time under a salt of its own."""
    verdicts: Counter[str] = Counter()
    corrupt: list[str] = []
    known: dict[str, Answer] = {}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for name, seed in TABLES.items():
            (await client.put(f"/kv/prompt_tables/{name}", content=table(seed))).raise_for_status()
        for number, answer in enumerate(answers):
            if answer.problem is not None or not answer.tokens:
                why = "left before the first token" if answer.problem is None else "failed"
                verdicts["crowded out by pins" if answer.crowded_out else why] += 1
                continue
            body = {**answer.ask.body, "stream": False, "cache_salt": f"alone-{number}"}
            key = json.dumps(body | {"cache_salt": None})
            if key not in known:
                known[key] = await send(client, Ask(answer.ask.path, body, "reference"))
            verdict = await _compare(client, answer, known[key], body)
            verdicts[verdict] += 1
            if verdict == "CORRUPT":
                corrupt.append(json.dumps({"got": answer.tokens, "alone": known[key].tokens, "body": body}))
    return verdicts, corrupt


async def _compare(client: httpx.AsyncClient, answer: Answer, alone: Answer, body: dict[str, Any]) -> str:
    same = len(answer.tokens)
    if answer.whole:
        if (answer.tokens, answer.text, answer.finish) == (alone.tokens, alone.text, alone.finish):
            return "equal"
    elif answer.tokens == alone.tokens[:same] and alone.text.startswith(answer.text):
        return "equal as far as read"
    pairs = zip(answer.tokens, alone.tokens, strict=False)
    at = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    if at is None:
        return "CORRUPT"
    if body["temperature"]:
        return "sampled otherwise"
    return "near tie" if await _gap(client, answer.ask.path, body, at) < NEAR_TIE else "CORRUPT"


async def _gap(client: httpx.AsyncClient, path: str, body: dict[str, Any], at: int) -> float:
    """By how much the best token leads at position `at`, in logprob."""
    chat = path == CHAT
    more = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 5}
    response = await client.post(f"/v1/{path}", json={**body, **more, "cache_salt": "gap"})
    shown = response.raise_for_status().json()["choices"][0]["logprobs"]
    if chat:
        best, second = (entry["logprob"] for entry in shown["content"][at]["top_logprobs"])
        return best - second
    best = shown["token_logprobs"][at]
    others = sorted(shown["top_logprobs"][at].values(), reverse=True)
    return best - next((value for value in others if value < best), best - 1)


def report(soak: Soak, verdicts: Counter[str], corrupt: list[str]) -> None:
    """Prints the summary."""
    checked = [a for a in soak.answers if a.predicted is not None and a.cached is not None]
    exact = sum(a.predicted == a.cached for a in checked)
    kinds = Counter(answer.ask.kind for answer in soak.answers)
    print(f"answers             {len(soak.answers)}: {dict(kinds.most_common())}")
    print(f"operations          {dict(sorted(soak.operations.items()))}")
    print(f"verdicts            {dict(verdicts.most_common())}")
    print(f"predictions exact   {exact} of {len(checked)} = {100 * exact / max(len(checked), 1):.1f}%")
    cached, predicted = sum(a.cached or 0 for a in checked), sum(a.predicted or 0 for a in checked)
    print(f"cached tokens       {cached}, predicted {predicted}")
    problems = Counter(answer.problem for answer in soak.answers if answer.problem)
    for problem, count in problems.most_common(10):
        print(f"failed ×{count:<4}        {problem}")
    for complaint in soak.complaints[:20]:
        print(f"complaint           {complaint}")
    for case in corrupt[:3]:
        print(f"corrupt             {case[:1500]}")


def main() -> int:
    """Runs the soak, then the judge. Status 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long requests are sent")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--kv-blocks", type=int, default=160, help="blocks of each of the two engines")
    parser.add_argument("--tokens-per-block", type=int, default=16)
    parser.add_argument("--host-cache", default="16MiB")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where kvpin's log goes")
    arguments = parser.parse_args()
    size = f"--threads 1 --tokens-per-block {arguments.tokens_per_block}"
    small = f"embedded: {size} --kv-blocks {arguments.kv_blocks} --host-cache-bytes {arguments.host_cache}"
    with kvpin("--managed", small, "--managed", small, log=arguments.log) as url:
        soak = Soak(url, arguments)
        asyncio.run(soak.run())
    # As long a context as the small ones: some answers end where it does.
    room = arguments.kv_blocks * arguments.tokens_per_block
    with engine("--threads", "1", "--kv-blocks", str(room // 16), "--tokens-per-block", "16") as url:
        verdicts, corrupt = asyncio.run(judge(url, soak.answers))
    report(soak, verdicts, corrupt)
    return 1 if corrupt or soak.complaints or verdicts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
