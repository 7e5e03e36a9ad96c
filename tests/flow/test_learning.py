"""What a pool learns from the requests that pass, over real sockets and in the simulator."""

import asyncio
import json
from dataclasses import replace

import pytest

from engine_adapter import Capability, Headers, JsonBody
from proxy.core.placement.whole_answers import MIN_ANSWERS
from proxy.fleet.lower_tiers import RestoreAhead
from proxy.fleet.pool import Pool
from proxy.request.calls import Call, Reply
from proxy.request.gate import Admission
from proxy.steps.forward import Attempt, Forwarded
from tests.fakes import FakeEngine, client_of, proxy_over

PREFILL_TOK_S, STEP_S = 40_000, 0.001


class Whole(FakeEngine):
    """Answers nothing but whole, after the time it takes; a prompt says how long its answer is."""

    def __init__(self, *, timings=False):
        super().__init__("a", self.serve)
        self.timings = timings

    async def serve(self, exchange):
        asked = exchange.json
        tokens, output = len(asked["prompt"]), asked["max_tokens"]
        if self.timings:
            timings = {"prompt_n": tokens, "prompt_ms": 1000 * tokens / PREFILL_TOK_S}
        else:
            timings = None
            await asyncio.sleep(tokens / PREFILL_TOK_S + output * STEP_S)
        usage = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens": output}
        await exchange.send({"choices": [{"text": "x"}], "usage": usage, "timings": timings})


async def ask(proxy, client, count):
    """Prompts of their own, whole answers."""
    for at in range(count):
        prompt = [1000 * at + n for n in range(200 + 150 * (at % 5))]
        body = {"model": "m", "prompt": prompt, "max_tokens": 1 + 3 * (at % 7)}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    await proxy.settled()
    return proxy.fleet.pools["m"].placer.rates


async def test_a_pool_whose_clients_never_stream_learns():
    async with Whole() as engine, proxy_over(engine, reuse=True) as proxy, client_of(proxy) as client:
        rates = await ask(proxy, client, MIN_ANSWERS)
        assert rates.learned
        assert rates.fit.step_s > 0


async def test_an_engine_that_times_its_prefills_teaches_at_once():
    async with (
        Whole(timings=True) as engine,
        proxy_over(engine, reuse=True) as proxy,
        client_of(proxy) as client,
    ):
        rates = await ask(proxy, client, 1)
        assert rates.prefill_s(200) == pytest.approx(200 / PREFILL_TOK_S)


async def test_the_chain_of_a_request_is_computed_once(monkeypatch):
    async def run(*_):
        return Forwarded(200)

    monkeypatch.setattr(Attempt, "run", run)
    made, chain = [], Pool.chain
    monkeypatch.setattr(Pool, "chain", lambda *prompt: made.append(prompt) or chain(*prompt))
    async with FakeEngine() as engine, proxy_over(reuse=True) as proxy:
        proxy.add(engine, capabilities=frozenset({Capability.RESTORE}), host_blocks=9)
        ahead = RestoreAhead(proxy.fleet, proxy.tasks)
        call = Call(
            "r",
            "POST",
            "/v1/completions",
            Headers([]),
            JsonBody(json.dumps({"model": "m", "prompt": [1] * 40}).encode()),
        )
        flow = replace(proxy.flow, observe=ahead.observe)
        await flow.serve(call, Reply(None), Admission.of_kvpin())
        assert len(made) == 1
        assert len(ahead._threads._threads) == 1
        assert proxy.last.chain is None
