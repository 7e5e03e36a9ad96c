"""Tiers that are asked: predictions to the token, hints for the next placement, nothing that is not there."""

from array import array
from dataclasses import replace

import pytest
from msgspec import structs

from engine_adapter import BelowGpu, Tier
from proxy.core.index.match import Match
from proxy.core.placement.rates import DEFAULT_PREFILL_TOK_S
from proxy.core.placement.scores import place
from proxy.fleet.engine import EngineState
from proxy.fleet.lower_tiers import expect_below, look_below
from proxy.prompt import Prompt
from tests.fakes import INFO, FakeAdapter

CHUNK = 64
PROMPT = Prompt(array("i", range(330)))  # 20 blocks of 16, 5 chunks of 64


class TieredAdapter(FakeAdapter):
    """An engine whose lower tiers answer what the test says, in the order asked."""

    def __init__(self, engine_id="a", *answers, shared_tiers="http://127.0.0.1:1"):
        super().__init__(engine_id)
        self.shared_tiers = shared_tiers
        self.answers = list(answers)
        self.asked = []

    async def lookup(self, prompt):
        self.asked.append(prompt)
        return self.answers.pop(0)


def add(fleet, adapter, *, chunk=CHUNK):
    engine = fleet.add(adapter)
    pool = fleet.join(engine, replace(INFO, tokens_per_chunk=chunk, shared_tiers=adapter.shared_tiers))
    engine.state = EngineState.READY
    return engine, pool


async def looked(pool, prompt=PROMPT):
    """The placement of one request, after the look below; the request itself comes to nothing."""
    chain = pool.chain(prompt)
    placement = place(pool.candidates(chain, prompt), chain)
    with pool.lease(placement, chain) as lease:
        await look_below(pool, lease.engine, lease, prompt, chain)
        return lease.placement, lease.engine.ledger.view(lease.started)


def match(pool, engine="a"):
    return pool.index.match(pool.chain(PROMPT).hashes).get(engine, Match())


async def test_what_lies_below_is_the_prediction_and_goes_into_the_index(fleet):
    engine, pool = add(fleet, TieredAdapter("a", BelowGpu(host=192, disk=128, cached=320)))
    placement, load = await looked(pool)
    assert (placement.predicted_tokens, placement.gpu_tokens, placement.firm) == (320, 0, True)
    assert load.queue_s == pytest.approx(10 / DEFAULT_PREFILL_TOK_S + 192 / 40_000 + 128 * 3 / 40_000)
    assert match(pool) == Match(host=12, disk=8)
    assert engine.adapter.asked == [PROMPT.kv]


async def test_less_than_was_thought_corrects_both(fleet):
    engine, pool = add(fleet, TieredAdapter("a", BelowGpu(64, 64, 128), BelowGpu(0, 0, 0)))
    expect_below(pool, engine, pool.chain(PROMPT))
    assert match(pool) == Match(host=20)
    placement, _ = await looked(pool)
    # The last chunks may have been stored a moment ago, and not be told yet.
    assert (placement.predicted_tokens, placement.firm) == (128, False)
    assert match(pool) == Match(host=4, disk=4)
    placement, _ = await looked(pool)
    assert placement.predicted_tokens == 0
    assert match(pool) == Match()


async def test_no_prediction_rests_on_what_was_not_confirmed(fleet):
    engine, pool = add(fleet, TieredAdapter("a", None))
    hashes = pool.chain(PROMPT).hashes
    pool.index.store("a", Tier.GPU, hashes[:4])
    expect_below(pool, engine, pool.chain(PROMPT))
    placement, _ = await looked(pool)
    assert (placement.predicted_tokens, placement.firm) == (64, False)


@pytest.mark.parametrize("unlike_text", [{"media": True}, {"whole": False}])
async def test_tiers_are_not_asked_for_what_is_more_than_text(fleet, unlike_text):
    engine, pool = add(fleet, TieredAdapter("a"))
    pool.index.store("a", Tier.GPU, pool.chain(PROMPT).hashes[:4])
    placement, _ = await looked(pool, structs.replace(PROMPT, **unlike_text))
    assert (placement.predicted_tokens, placement.firm, engine.adapter.asked) == (64, False, [])


@pytest.mark.parametrize("on_gpu", [18, 2])
async def test_the_longer_of_both_is_reused(fleet, on_gpu):
    _, pool = add(fleet, TieredAdapter("a", BelowGpu(320, 0, 320)))
    pool.index.store("a", Tier.GPU, pool.chain(PROMPT).hashes[:on_gpu])
    placement, _ = await looked(pool)
    assert (placement.predicted_tokens, placement.gpu_tokens) == (320, 16 * on_gpu)


async def test_engines_without_such_tiers_are_left_alone(fleet):
    engine, pool = add(fleet, TieredAdapter("a"), chunk=None)
    assert (await looked(pool))[0].predicted_tokens == 0
    expect_below(pool, engine, pool.chain(PROMPT))
    assert match(pool) == Match()
    assert engine.adapter.asked == []


async def test_engines_over_one_lmcache_share_what_is_known_of_it(fleet):
    _, pool = add(fleet, TieredAdapter("a", BelowGpu(128, 0, 128)))
    add(fleet, TieredAdapter("b"))
    add(fleet, TieredAdapter("c", shared_tiers="http://127.0.0.1:2"))
    add(fleet, TieredAdapter("d", shared_tiers=None))
    await looked(pool)
    assert {name: match(pool, name).host for name in "abcd"} == {"a": 8, "b": 8, "c": 0, "d": 0}
    expect_below(pool, pool.engines["d"], pool.chain(PROMPT))
    assert {name: match(pool, name).host for name in "abcd"} == {"a": 8, "b": 8, "c": 0, "d": 20}


async def test_hints_are_bounded_and_die_with_the_engine(fleet):
    engine, pool = add(fleet, TieredAdapter("a"))
    engine.below.capacity = 20
    expect_below(pool, engine, pool.chain(PROMPT))
    other = Prompt(array("i", range(1000, 1128)))
    expect_below(pool, engine, pool.chain(other))
    assert pool.index.held("a", Tier.HOST) == 20
    assert pool.index.match(pool.chain(other).hashes)["a"] == Match(host=8)
    # Of the older one the end made room, as it would be evicted.
    assert match(pool) == Match(host=12)
    pool.wipe(engine)
    assert (len(engine.below), match(pool)) == (0, Match())
