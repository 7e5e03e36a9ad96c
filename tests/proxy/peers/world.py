"""Proxies in front of two engines that send no events, and exchanges between them."""

import asyncio
import contextlib

from tests.fakes import DONE, FakeEngine, event, proxy_over
from tests.kv_world import tokens

COMPLETIONS = "/v1/completions"
PROMPT = tokens(16 * 20 + 5)


class Gated(FakeEngine):
    """Answers when `gate` opens."""

    def __init__(self, engine_id):
        super().__init__(engine_id, self.serve)
        self.gate = asyncio.Event()
        self.gate.set()

    async def serve(self, exchange):
        await self.gate.wait()
        if exchange.json.get("stream"):
            await exchange.stream(event({"choices": [{"text": "x"}]}), DONE)
        else:
            usage = {"prompt_tokens_details": {"cached_tokens": 0}}
            await exchange.send({"choices": [{"text": "x"}], "usage": usage})


class Wire:
    """An exchange in memory that a test cuts."""

    def __init__(self, others):
        self.dropped, self.is_connected, self.is_alone, self.is_private = 0, True, False, True
        self.http_socket = None
        self.others, self.ears, self.is_cut = others, None, False
        others.append(self)

    def publish(self, frame):
        if self.is_cut:
            self.dropped += 1
            return
        for other in self.others:
            if other is not self and other.ears is not None and not other.is_cut:
                asyncio.get_running_loop().call_soon(other.ears.receive, frame)

    def keep(self, _data):
        pass

    def reaches(self, _socket):
        return False

    async def run(self, ears):
        self.ears = ears
        ears.joined()
        await asyncio.Event().wait()

    async def aclose(self):
        self.ears = None


async def until(is_true, seconds=10):
    async with asyncio.timeout(seconds):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def in_step(proxy, others=1):
    told = proxy.peers.stats().peers
    return len(told) == others and all(peer.in_step for peer in told)


@contextlib.asynccontextmanager
async def world(make, count=2, **options):
    """Two engines, and proxies in front of both that know of each other."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Gated(name)) for name in ("a", "b")]
        proxies = [
            await stack.enter_async_context(proxy_over(*engines, reuse=True, exchange=make, **options))
            for _ in range(count)
        ]
        await until(lambda: all(in_step(proxy, count - 1) and proxy.peers.is_ready for proxy in proxies))
        yield engines, proxies
        open_all(engines)


def ask(client, prompt=PROMPT, **more):
    return client.post(COMPLETIONS, json={"model": "m", "prompt": prompt, "max_tokens": 1, **more})


def placer(proxy):
    return proxy.fleet.pools["m"].placer


def in_flight(proxy):
    """Requests on all engines, those at other proxies too."""
    return sum(engine.ledger.in_flight for engine in proxy.fleet.engines.values())


def shut(engines):
    """From now on, they answer nobody."""
    for engine in engines:
        engine.gate.clear()


def open_all(engines):
    for engine in engines:
        engine.gate.set()
