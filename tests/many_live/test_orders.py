"""What operators order about engines holds while two kvpins of two workers each are replaced, one by one."""

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


async def test_orders_hold_over_a_rolling_restart_and_no_request_fails(tmp_path):
    """`a` is drained, `b` serves, `added` is not in the settings, `removed` is."""
    names = ("a", "b", "added", "removed")
    async with AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(Counting(name)) for name in names}
        named = [
            f"--engine=openai-compatible={engines[name].url},id={name}" for name in names if name != "added"
        ]
        exchange = ("--exchange", f"unix:{tmp_path / 'bus'}")
        starts = iter(range(9))

        async def start(replica):
            log, state = tmp_path / f"{next(starts)}.log", tmp_path / f"state-{replica}"
            flags = ("--workers", "2", "--state-dir", str(state), *exchange, *named)
            kvpin = running_kvpin(log, *flags, tokenised=False, KVPIN_DRAIN_S="0.5")
            started = await asyncio.to_thread(kvpin.__enter__)
            stack.push_async_exit(lambda *error: asyncio.to_thread(kvpin.__exit__, *error))
            return started

        def are_ordered(kvpin):
            states = {name: each["state"] for name, each in kvpin.engines().items()}
            return states == {"a": "draining", "b": "ready", "added": "ready"}

        def served():
            return {name: engine.served for name, engine in engines.items()}

        def serve_more(names, before):
            return all(engines[name].served > before[name] for name in names)

        balancer = Balancer()
        balancer.kvpins = [await start(0), await start(1)]
        async with asyncio.TaskGroup() as group:
            group.create_task(balancer.watch())
            await until(lambda: len(balancer.ready) == 2)
            for number in range(len(PROMPTS)):
                group.create_task(balancer.send(number))
            await until(lambda: serve_more(("a", "b", "removed"), dict.fromkeys(names, 0)))
            added = {"kind": "openai_compatible", "url": engines["added"].url, "id": "added"}
            assert balancer.kvpins[1].admin("POST", "engines", json=added).status_code == 201
            assert balancer.kvpins[0].admin("POST", "engines/a/drain").status_code == 200
            assert balancer.kvpins[0].admin("DELETE", "engines/removed").status_code == 200
            await until(lambda: all(map(are_ordered, balancer.kvpins)))
            await until(lambda: not any(kvpin.engines()["a"]["in_flight"] for kvpin in balancer.kvpins))
            await asyncio.sleep(0.5)  # requests in flight at the removed engine
            before = served()
            for replica in (0, 1):
                old = balancer.kvpins[replica]
                old.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(old.process.wait, STOP_S) == 0
                balancer.kvpins[replica] = await start(replica)
                await until(lambda: len(balancer.ready) == 2)
            await until(lambda: all(map(are_ordered, balancer.kvpins)))
            assert [served()[name] for name in ("a", "removed")] == [before["a"], before["removed"]]
            await until(lambda: all(kvpin.engines()["added"]["served"] for kvpin in balancer.kvpins))
            balancer.kvpins[0].admin("POST", "engines/a/drain", json={"undo": True})
            again = {"kind": "openai_compatible", "url": engines["removed"].url}
            answered = balancer.kvpins[0].admin("POST", "engines", json=again)
            assert (answered.status_code, answered.json()["id"]) == (201, "removed")
            await until(lambda: serve_more(("a", "removed"), before))
            balancer.is_over = True
        print(Counter(balancer.statuses), before, served())  # noqa: T201
        assert set(balancer.statuses) == {200}
