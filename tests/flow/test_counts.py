"""Requests that an engine served and that failed there, counted in random traffic with random faults."""

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest

from proxy.core.life import Rules
from tests.fakes import ANSWER, ASK, CHAT, DONE, STREAM, asked, event

FAULTS = (
    "refuses",
    "rejects",
    "dies",
    "hangs",
    "dies after a comment",
    "hangs after a comment",
    "does not end",
)
COMMENTS = ([b":\n\n"], [b": p", b"ing\n\n"], [b": p\r", b"\n\r\n"], [b": data: x\n\n"])
REQUESTS = (ASK, STREAM, STREAM | {"temperature": 0}, ASK | {"n": 2})


def chunk(text, end=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return event({"id": "1", "created": 1, "model": "m", "choices": [choice]})


async def fails(exchange, fault):
    match fault.split()[0]:
        case "dies":
            exchange.die()
        case "hangs":
            await exchange.left.wait()
        case refusal:
            await exchange.send({"message": "no"}, status=500 if refusal == "refuses" else 400)


def faulty(chance: random.Random):
    """The script of an engine that serves about half of its requests well."""

    async def script(exchange):
        fault = chance.choice(("", "", "", "", "", *FAULTS))
        if fault in ("refuses", "rejects", "dies", "hangs"):
            return await fails(exchange, fault)
        if not exchange.json.get("stream"):
            return await exchange.send(ANSWER)
        await exchange.start()
        for piece in chance.choice(COMMENTS):
            await exchange.chunk(piece)
            await asyncio.sleep(0.001)
        if fault.endswith("after a comment"):
            return await fails(exchange, fault)
        for part in (chunk("One"), chunk(" two", "stop"), DONE):
            await exchange.chunk(part)
        return await (exchange.left.wait() if fault == "does not end" else exchange.end())

    return script


@pytest.mark.parametrize("seed", range(2))
async def test_every_attempt_is_counted_once(seed):
    chance = random.Random(seed)  # noqa: S311 - a test
    async with asked(faulty(chance), faulty(chance), rules=Rules(first_byte_s=0.2, idle_s=0.2)) as (
        proxy,
        client,
        *_,
    ):

        async def ask():
            try:
                answer = await client.post(
                    CHAT, json=chance.choice(REQUESTS), timeout=chance.choice((0.05, 9, 9, 9, 9))
                )
            except httpx.HTTPError:
                return
            if answer.headers["content-type"].startswith("text/event-stream"):
                lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
                deltas = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines]
                assert "".join(deltas) == "One two"

        for _ in range(5):
            await asyncio.gather(*(ask() for _ in range(8)))
        await proxy.settled()
        placed, failed, left = Counter(), Counter(), Counter()
        for record in proxy.requests:
            placed.update(record.attempts)
            failed.update(record.attempts[:-1])
            if record.error is not None:  # a client may leave while its engine fails
                (left if record.status == 499 else failed).update(record.attempts[-1:])
            assert record.first_byte_s is not None or record.status != 200 or record.error is not None
        assert failed.total()
        for name, engine in proxy.fleet.engines.items():
            assert failed[name] <= engine.failed <= failed[name] + left[name]
            assert engine.served + engine.failed == placed[name]
            assert not engine.ledger.in_flight
