import msgspec

from engine_adapter import EngineUnavailable
from proxy.control.engines import stats
from tests.kv_world import tokens


async def shown_by(world):
    return msgspec.to_builtins(await stats(world.fleet, world.pinning.active(), reuse=world.reuse))


async def test_pools_engines_and_totals(world, pair):
    a, _ = pair
    world.served(a, tokens(64))
    world.engines["a"].audit.observe(32, 48)
    shown = await shown_by(world)
    (pool,) = shown["pools"]
    assert (pool["model"], pool["index_entries"], pool["tokens_per_block"]) == ("m", 4, 16)
    first, second = pool["engines"]
    assert first["blocks"] == {"gpu": 4, "host": 0, "disk": 0}
    assert first["kv"] == {"gpu": {"cached": 4}}
    assert (first["trust"], first["why"]) == ("approximate", "no events yet: learning from responses")
    assert first["audit"]["reported_tokens"] == 48
    assert second["blocks"]["gpu"] == 0
    totals = shown["totals"]
    assert (totals["engines"], totals["ready"], totals["predicted_cached_tokens"]) == (2, 2, 32)
    assert shown["reuse"]


async def test_how_prompts_become_tokens(world, pair):
    world.pool.prompts.ask_engines("why")
    world.pool.prompts.agreed = 3
    (pool,) = (await shown_by(world))["pools"]
    forms = pool["tokenisation"].pop("forms")
    assert pool["tokenisation"].pop("detail").startswith("the engine tokenises each prompt: ")
    assert pool["tokenisation"] == {"ok": True, "source": "engine", "agreed": 3, "differed": 0}
    assert forms["text parts"] == {
        "source": "engine", "ok": True, "detail": "why", "agreed": 0, "differed": 0
    }  # fmt: skip
    world.pool.renderings = ()
    (pool,) = (await shown_by(world))["pools"]
    assert pool["tokenisation"] is None


async def test_an_engine_that_does_not_answer_is_shown_all_the_same(world, pair):
    pair[0].failure = EngineUnavailable("gone")
    (pool,) = (await shown_by(world))["pools"]
    assert (pool["engines"][0]["kv"], pool["engines"][0]["kv_error"]) == ({}, "gone")
    assert pool["engines"][1]["kv_error"] is None
