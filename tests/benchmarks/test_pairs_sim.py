"""The simulation of pairs: what is divided, and that no request is lost."""

from pathlib import Path

import pytest

from proxy.core.index.blocks import Chain
from proxy.replay.trace import TraceRequest, read_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"


@pytest.fixture(scope="module")
def trace():
    return read_trace(TRACES / "conversation.jsonl.gz", limit=120)


RULES = ["no roles", "shared", "never", "always", "threshold", "local", "ppd", "conserve", "kvpin"]


@pytest.mark.parametrize("rule", RULES)
def test_every_request_is_answered_under_every_rule(script, trace, rule):
    played = script.PairRun(1, 2, rule, 100_000.0, trace.tokens_per_block)
    figures = played.play([(request.at / 1000, request) for request in trace.requests])
    assert len(played.ttfts) == len(trace.requests)
    assert played.running == {}
    assert {name: book.ledger.in_flight for name, book in played.placer.books.items()} == {
        "e0": 0, "e1": 0, "e2": 0,
    }  # fmt: skip
    assert not any(played.placer.index.counts(name)[3] for name in played.names)
    assert list(script.RULES) == RULES
    divided = {"no roles": 0, "never": 0, "always": len(trace.requests)}.get(rule, played.divided)
    assert played.divided == divided
    assert 0 < figures.mean_ttft_s <= figures.p99_ttft_s


def test_a_decoder_computes_nothing_of_what_was_moved(script, trace):
    played = script.PairRun(1, 1, "always", 100_000.0, trace.tokens_per_block)
    played.play([(60.0 * number, request) for number, request in enumerate(trace.requests)])
    assert played.engines[1].computed == 0
    assert played.engines[0].computed > 0


def turns_of(blocks: list[list[int]]) -> list[TraceRequest]:
    """Prompts of so many blocks each of 512 tokens, ten seconds apart."""
    chains = [Chain(tuple(each), 512 * len(each), 512) for each in blocks]
    return [TraceRequest(number, 10_000.0 * number, each, 20) for number, each in enumerate(chains)]


@pytest.mark.parametrize(("rule", "divided"), [("always", 5), ("ppd", 3), ("conserve", 2), ("never", 0)])
def test_rules_for_conversations_divide_first_turns(script, rule, divided):
    """Two conversations of one system prompt: turns that add little, one that adds much."""
    first, second = [1, 2, 3], [1, 5, 6]
    requests = turns_of([first, second, [*first, 4], [*second, 7, 8, 9, 10, 11], [*first, 4, 12]])
    played = script.PairRun(1, 2, rule, 100_000.0, 512)
    played.play([(request.at / 1000, request) for request in requests])
    assert played.divided == divided


def test_kvpin_is_no_worse_than_always_and_never(script, trace):
    means = {
        rule: script.run(trace, (1, 2), 0.6, 400_000.0, rule).mean_ttft_s
        for rule in ("never", "always", "kvpin")
    }
    assert means["kvpin"] <= 1.02 * min(means["never"], means["always"])
