"""Requests, traces and engines for tests of the simulator; blocks of 100 tokens."""

from itertools import count as count_up
from pathlib import Path
from random import Random

from proxy.core.index.blocks import Chain
from proxy.replay.policy import SimFleet
from proxy.replay.simulated_engine import EngineModel, SimEngine
from proxy.replay.trace import Trace, TraceRequest

SIZE = 100
TRACES = Path(__file__).parents[2] / "data" / "traces"


def ask(blocks, *, at=0.0, name=0, tail=50, output=1, session=None):
    """A request of whole blocks and a tail that fills none."""
    blocks = tuple(blocks)
    return TraceRequest(name, at, Chain(blocks, len(blocks) * SIZE + tail, SIZE), output, session)


def trace_of(*requests, common=0):
    """They are numbered in the order given."""
    numbered = [TraceRequest(i, r.at, r.chain, r.output_tokens, r.session) for i, r in enumerate(requests)]
    return Trace("made", tuple(numbered), SIZE, common)


def chats(count, turns, seed):
    """A trace of conversations that grow by 1k to 6k tokens a turn; nobody shares anything."""
    random, requests, blocks = Random(seed), [], count_up()  # noqa: S311 - made up
    for _ in range(count):
        at, prompt = random.uniform(0, 10 * turns), []
        for _ in range(turns):
            prompt += (next(blocks) for _ in range(random.randint(10, 60)))
            requests.append(ask(prompt, at=at, output=random.randint(100, 400)))
            at += random.uniform(6, 34)
    return trace_of(*sorted(requests, key=lambda request: request.at))


def model_of(blocks=10, host=0, **options):
    """10 blocks a second, unless told otherwise."""
    given = {"prefill_tok_s": 1000.0, "restore_tok_s": 10_000.0, **options}
    return EngineModel(blocks * SIZE, host * SIZE, **given)


def fleet_of(engines=2, *, common=0, **options):
    return SimFleet(engines, model_of(**options), SIZE, common)


class Diary:
    """Writes down what engines tell."""

    def __init__(self):
        self.lines = []

    def started(self, now, engine, request, gpu, host):
        self.lines.append(("started", round(now, 6), request.id, gpu, host))

    def first_token(self, now, engine, request):
        self.lines.append(("first", round(now, 6), request.id))

    def finished(self, now, engine, request):
        self.lines.append(("finished", round(now, 6), request.id))

    def stored(self, engine, tier, hashes):
        self.lines.append(("stored", tier.value, list(hashes)))

    def removed(self, engine, tier, hashes):
        self.lines.append(("removed", tier.value, list(hashes)))

    def of(self, *kinds):
        return [line for line in self.lines if line[0] in kinds]


def play(model, *requests):
    """One engine serves them, each at its time; returns it and what it told."""
    diary = Diary()
    engine = SimEngine(0, model, SIZE, diary)
    for request in requests:
        while engine.due <= request.at:
            engine.advance(engine.due)
        engine.submit(request.at, request)
    while engine.due < float("inf"):
        engine.advance(engine.due)
    return engine, diary
