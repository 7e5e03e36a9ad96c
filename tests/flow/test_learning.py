"""What a pool learns from the requests that pass, over real sockets and in the simulator."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from engine_adapter import Capability, Headers, JsonBody
from engine_adapter.types import Usage
from proxy.core.index.blocks import Chain
from proxy.core.placement.whole_answers import MIN_ANSWERS
from proxy.fleet.lower_tiers import RestoreAhead
from proxy.fleet.pool import Pool
from proxy.replay import rules
from proxy.replay.policy import Kvpin
from proxy.replay.simulated_engine import EngineModel
from proxy.replay.simulator import ReplayRun, simulate
from proxy.replay.trace import Trace, TraceRequest
from proxy.request.calls import Call, Reply
from proxy.request.gate import Admission
from proxy.steps.forward import Forwarded, Forwarding
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


class WholeAnswers(Kvpin):
    """kvpin, where no client streams: it sees answers when they end, and nothing before."""

    def __init__(self, *args):
        super().__init__(*args)
        self._placer.begin = partial(self._placer.begin, streams=False)

    def first_token(self, now, engine, request):
        """Nobody saw it."""

    def finished(self, now, engine, request):
        placed, computed = self._placed.pop(request.id)
        self._placer.answered(now, placed)
        self._placer.end(now, placed, computed, Usage(None, request.output_tokens))
        self._placer.settled(placed)


def trace(random, requests=400):
    """Prompts that share nothing, of 200 to 8,000 tokens, and answers of 16 to 400."""

    def length(low, high):
        return round(low * (high / low) ** random.random())

    made, now = [], 0.0
    for at in range(requests):
        now += random.expovariate(4.0)
        tokens = length(200, 8000)
        chain = Chain(tuple(1000 * at + n for n in range(tokens // 16)), tokens, 16)
        made.append(TraceRequest(at, now, chain, length(16, 400)))
    return Trace("t", tuple(made), 16, 0)


@pytest.mark.parametrize(("prefill_tok_s", "seed"), [(8000.0, 0), (40_000.0, 1)])
def test_streams_and_whole_answers_agree(monkeypatch, prefill_tok_s, seed):
    learned = []

    class Streams(Kvpin):
        def __init__(self, *args):
            super().__init__(*args)
            learned.append(self._placer.rates)

    class Answers(WholeAnswers):
        def __init__(self, *args):
            super().__init__(*args)
            learned.append(self._placer.rates)

    model = EngineModel(gpu_tokens=1_000_000, prefill_tok_s=prefill_tok_s, chunked=True)
    for policy in (Streams, Answers):
        monkeypatch.setitem(rules.POLICIES, "kvpin", policy)
        simulate(trace(Random(seed)), ReplayRun("kvpin", 4, model))  # noqa: S311 - a test
    by_stream, by_answer = learned
    assert by_answer.fit is not None
    for tokens in (500, 2000, 8000):
        assert by_stream.prefill_s(tokens) == pytest.approx(tokens / prefill_tok_s, rel=0.1)
        assert by_answer.prefill_s(tokens) == pytest.approx(by_stream.prefill_s(tokens), rel=0.35)
    assert by_answer.fit.step_s == pytest.approx(model.step_s, rel=0.5)


async def test_the_chain_of_a_request_is_computed_once(monkeypatch):
    async def run(*_):
        return Forwarded(200)

    monkeypatch.setattr(Forwarding, "run", run)
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
        assert len(ahead._threads) == 1
        assert proxy.last.chain is None
