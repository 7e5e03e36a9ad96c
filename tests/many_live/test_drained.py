"""A drained engine stays drained while two kvpins of two workers each are replaced, one after the other."""

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.engines import STOP_S
from tests.fakes import FakeEngine, answer
from tests.kv_world import tokens
from tests.live.conftest import running_kvpin

pytestmark = pytest.mark.live


PROMPTS = [tokens(40, number) for number in range(4)]


class Counting(FakeEngine):
    """Counts completions."""

    def __init__(self, engine_id):
        super().__init__(engine_id, self.serve)
        self.served = 0

    async def serve(self, exchange):
        self.served += "/completions" in exchange.target and exchange.json.get("prompt") in PROMPTS
        await answer(exchange)


class Balancer:
    """Clients that send to the kvpins whose `/health/ready` was 200, as a load balancer does."""

    def __init__(self):
        self.kvpins, self.ready, self.statuses, self.is_over = [], [], [], False

    async def watch(self):
        async with httpx.AsyncClient(trust_env=False) as client:
            while not self.is_over:
                self.ready = [kvpin for kvpin in list(self.kvpins) if await self._is_ready(client, kvpin)]
                await asyncio.sleep(0.05)

    async def _is_ready(self, client, kvpin):
        try:
            return (await client.get(f"{kvpin.url}/health/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def send(self, number):
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for turn in range(10**6):
                if self.is_over:
                    return
                kvpin = self.ready[(number + turn) % len(self.ready)]
                body = {"model": "m", "prompt": PROMPTS[number], "max_tokens": 1}
                try:
                    answer = await client.post(f"{kvpin.base_url}/completions", json=body)
                    self.statuses.append(answer.status_code)
                except httpx.TransportError as error:
                    self.statuses.append(repr(error))
                await asyncio.sleep(0.02)


async def until(is_true):
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(is_true):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_it_stays_drained_over_a_rolling_restart_and_no_request_fails(tmp_path):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Counting(name)) for name in ("a", "b")]
        named = [f"--engine=openai-compatible={engine.url},id={engine.id}" for engine in engines]
        exchange = ("--exchange", f"unix:{tmp_path / 'bus'}")
        starts = iter(range(9))

        async def start(replica):
            log, state = tmp_path / f"{next(starts)}.log", tmp_path / f"state-{replica}"
            flags = ("--workers", "2", "--state-dir", str(state), *exchange, *named)
            kvpin = running_kvpin(log, *flags, tokenised=False, KVPIN_DRAIN_S="0.5")
            started = await asyncio.to_thread(kvpin.__enter__)
            stack.push_async_exit(lambda *error: asyncio.to_thread(kvpin.__exit__, *error))
            return started

        def drained(kvpin):
            return kvpin.engines()["a"]["state"] == "draining"

        balancer = Balancer()
        balancer.kvpins = [await start(0), await start(1)]
        async with asyncio.TaskGroup() as group:
            group.create_task(balancer.watch())
            await until(lambda: len(balancer.ready) == 2)
            for number in range(len(PROMPTS)):
                group.create_task(balancer.send(number))
            await until(lambda: all(engine.served for engine in engines))
            assert balancer.kvpins[0].admin("POST", "engines/a/drain").status_code == 200
            await until(lambda: all(map(drained, balancer.kvpins)))
            await until(lambda: not any(kvpin.engines()["a"]["in_flight"] for kvpin in balancer.kvpins))
            before = engines[0].served, engines[1].served
            for replica in (0, 1):
                old = balancer.kvpins[replica]
                old.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.process.wait, STOP_S) == 0
                balancer.kvpins[replica] = await start(replica)
                await until(lambda: len(balancer.ready) == 2)
            assert all(map(drained, balancer.kvpins))
            assert engines[0].served == before[0]
            assert engines[1].served > before[1]
            balancer.kvpins[1].admin("POST", "engines/a/drain", json={"undo": True})
            await until(lambda: engines[0].served > before[0])
            balancer.is_over = True
        assert set(balancer.statuses) == {200}
        print(Counter(balancer.statuses), before, [e.served for e in engines])  # noqa: T201
