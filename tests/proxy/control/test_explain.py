from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from engine_adapter import JsonBody, Tier
from proxy.control.explain import explain, route, summarize
from proxy.core.placement.decision import Cost
from proxy.core.placement.pairs import TransferResult
from proxy.errors import NotFound
from tests.golden import check_golden
from tests.kv_world import KvFake, kv_world, tokens
from tests.placements import placement_of

IDS = tokens(64)


def placed(engine, n_tokens, *costs):
    """A placement with `costs` as (engine, total seconds, cached tokens)."""
    terms = tuple(Cost(name, prefill_s=total, cached_tokens=cached) for name, total, cached in costs)
    predicted = next(cached for name, _, cached in costs if name == engine)
    return placement_of(engine, predicted, n_tokens, terms, "lowest cost")


async def told(world, record):
    return msgspec.json.decode(msgspec.json.encode(await explain(world.flow, record)))


async def explained(world, *, ids=IDS, **fields):
    return await told(world, world.record("now", ids, **fields))


async def routed(world, path=None, tenant=None, **body):
    answer = await route(world.flow, JsonBody(msgspec.json.encode(body)), path, tenant)
    return msgspec.to_builtins(answer)


HERE = placed("a", 64, ("a", 0.1, 0))
FOUND = placed("a", 64, ("a", 0.1, 32))
ELSEWHERE = placed("a", 64, ("a", 0.1, 0), ("b", 0.5, 48))
QUEUES = (Cost("a", prefill_s=0.1, regret_s=0.0), Cost("b", queue_s=0.5, cached_tokens=48))
BY_P = structs.replace(HERE, chosen=structs.replace(HERE.chosen, prefiller="p"))
NOT_BY_P = {"placement": HERE, "reported_tokens": 0, "prefilled_by": "p"}
WENT_ON = {"died": ["a"], "interrupted": 1, "attempts": ["a", "b"], "reported_tokens": 32}
# Title → the tokens of an earlier request, and the fields of the request.
REQUESTS = {
    "nothing like it": (tokens(64, start=9), {"placement": HERE, "reported_tokens": 0}),
    "p computed it": (None, NOT_BY_P | {"placement": BY_P, "transfer": TransferResult.MOVED}),
    "no KV came from p": (None, NOT_BY_P | {"transfer": TransferResult.FAILED}),
    "the KV of p came late": (None, NOT_BY_P | {"transfer": TransferResult.LATE}),
    "kvpin changed it": (
        None, {"placement": HERE, "reported_tokens": 0, "changed": ["half_characters", "tool:web_search"]},
    ),
    "it differs in the first block": (tokens(5) + [5] * 59, {"placement": HERE, "reported_tokens": 0}),
    "it differs later": (tokens(40) + [5] * 24, {"placement": FOUND, "reported_tokens": 32}),
    "evicted": (None, {"placement": placed("a", 64, ("a", 0.1, 48)), "reported_tokens": 16}),
    "another engine holds it": (None, {"placement": ELSEWHERE, "reported_tokens": 0}),
    "more than predicted": (tokens(64), {"placement": FOUND, "reported_tokens": 48}),
    "more than predicted, not firmly": (
        tokens(64), {"placement": structs.replace(FOUND, firm=False), "reported_tokens": 48},
    ),
    "all there was": (
        tokens(50), {"placement": placed("a", 64, ("a", 0.1, 50)), "reported_tokens": 50},
    ),
    "tokenised differently": (None, {"placement": HERE, "reported_tokens": 0, "tokens_agree": False}),
    "not placed": (None, {"error": "no engine"}),
    "answered here": (None, {}),
    "an error of the engine": (None, {"placement": HERE, "status": 404, "error": "File Not Found"}),
    "no prompt": (None, {"placement": HERE, "ids": None, "runs_prompt": False}),
    "an unknown prompt": (None, {"placement": HERE, "ids": None}),
    "a prompt that the engine tokenised": (
        None, {"placement": placed("a", 64, ("a", 0.1, 48)), "reported_tokens": 48, "ids": None},
    ),
    "no report": (None, {"placement": placed("a", 64, ("a", 0.1, 16))}),
    "it waits elsewhere": (
        None, {"placement": placement_of("a", 0, 64, QUEUES, "lowest cost"), "reported_tokens": 0},
    ),
    "another engine went on": (None, WENT_ON | {"placement": placed("b", 70, ("b", 0.1, 0))}),
}  # fmt: skip


async def test_each_explanation(tokenizer_dir):
    said = {}
    for title, (earlier, fields) in REQUESTS.items():
        async with kv_world(tokenizer_dir) as world:
            for engine_id in "ab":
                world.add(KvFake(engine_id))
            if earlier is not None:
                world.record("r1", earlier)
            answer = await explained(world, **fields)
        assert answer["changed"] == fields.get("changed", [])
        said[title] = f"{answer['explanation']}\nmiss: {answer['miss']}\n"
        if answer["decision"] is not None:
            said[title] += f"{answer['decision']['reason']}: {answer['decision']['why']}\n"
    check_golden(Path(__file__).with_name("explained.txt"), said)


async def test_it_diverges_and_the_text_shows_where(world, pair):
    other = tokens(40) + [5] * 24
    world.record("r1", other)
    answer = await explained(world, placement=FOUND, reported_tokens=32)
    assert not answer["is_miss"]
    decode = world.pool.prompts.local.tokenizer.decode
    assert answer["divergence"] == {
        "request_id": "r1",
        "at": None,
        "common_tokens": 40,
        "token_ids": IDS[40:56],
        "other_token_ids": other[40:56],
        "text": decode(IDS[40:56]),
        "other_text": decode(other[40:56]),
    }


async def test_the_decision_is_told_with_the_terms_of_every_engine(world, pair):
    placement = structs.replace(placement_of("a", 0, 64, QUEUES, "lowest cost"), strain=4.0)
    decision = (await explained(world, placement=placement, reported_tokens=0))["decision"]
    assert (decision["rule"], decision["tie"]) == ("lowest cost", None)
    assert (decision["utilisation"], decision["strain"]) == (0.75, 4.0)
    told = [
        [cost[name] for name in ("engine", "queue_s", "regret_s", "total_s")] for cost in decision["costs"]
    ]
    assert told == [["a", 0.0, 0.0, 0.1], ["b", 0.5, None, 0.5]]


async def test_an_engine_that_makes_other_tokens_is_named(world, pair):
    for fake in pair:
        world.served(fake, IDS)
    world.pool.part(world.engines["b"])
    answer = await routed(world, prompt=IDS)
    name, other = (answer["engine"], "b" if answer["engine"] == "a" else "a")
    assert answer["why"].startswith(
        f"{name} holds 48 of 64 tokens; {other} would not cost less, and cannot go on"
    )


async def test_the_first_token_was_expected_by_the_engines_own_terms(world, pair):
    placement = placement_of("a", 0, 64, (Cost("a", 0.25, prefill_s=0.5, later_s=8.25),), "lowest cost")
    known = world.record("r", tokens(64), placement=placement)
    assert (await summarize(world.flow, known)).expected_first_token_s == 0.75
    went_on = world.record("r", tokens(64), placement=placed("b", 70, ("b", 0.1, 0)), **WENT_ON)
    for unknown in (world.record("r", tokens(64)), world.record("r", None, placement=placement), went_on):
        assert (await summarize(world.flow, unknown)).expected_first_token_s is None


async def test_the_text_of_an_adapters_request_is_shown_and_of_no_models_is_not(world, pair):
    world.add(KvFake("c", loras=("ada",)))
    world.add(KvFake("n", model="n"))
    world.record("r0", tokens(40), model="ada", lora="ada")
    other = [*tokens(20), *tokens(20, start=9)]
    placement = placed("c", 40, ("c", 0.1, 0))
    record = world.record("r1", other, model="ada", lora="ada", placement=placement)
    assert (await told(world, record))["divergence"]["text"]
    for request_id in ("r2", "r3"):
        record = world.record(request_id, tokens(40), model="gone", placement=placed("c", 40, ("c", 0.1, 0)))
    assert (await told(world, record))["divergence"]["text"] is None


async def test_a_summary_holds_no_prompt_and_says_how_it_was_served(world, pair):
    record = world.record("r1", tokens(64), prompt_cache_key="k", note="it ran alone")
    summary = msgspec.to_builtins(await summarize(world.flow, record))
    assert (summary["n_tokens"], summary["prompt_cache_key"], summary["engine"]) == (64, "k", None)
    assert (summary["note"], (await told(world, record))["note"]) == ("it ran alone", "it ran alone")
    assert "prompt" not in summary


class TestDryRun:
    """A request that is not sent."""

    async def test_it_goes_where_the_prefix_lies_and_says_why(self, world, pair):
        world.pool.index.store("a", Tier.HOST, world.pool.chain(world.served(pair[1], IDS)).hashes)
        before = len(world.pool.index), world.engines["b"].ledger.placed
        answer = await routed(world, prompt=IDS, max_tokens=4)
        assert (answer["engine"], answer["predicted_tokens"], answer["n_tokens"]) == ("b", 48, 64)
        assert (answer["blocks"], answer["rule"], answer["path"]) == (4, "lowest cost", "/v1/completions")
        assert answer["why"].startswith("b holds 48 of 64 tokens; it computes 16 tokens in ")
        assert (answer["reason"], answer["tie"], answer["is_firm"]) == ("held", None, True)
        assert answer["strain"] == pytest.approx(1 / (1 - answer["utilisation"]))
        a, b = answer["candidates"]
        assert (a["matched_tokens"]["host"], b["matched_tokens"]["gpu"]) == (64, 64)
        assert a["restore_s"] > b["restore_s"] == 0
        assert b["first_token_s"] == b["prefill_s"]
        # It changed nothing.
        assert (len(world.pool.index), world.engines["b"].ledger.placed) == before
        assert list(world.flow.requests) == []
        for engine in world.engines.values():
            engine.is_proven = False
        assert (await routed(world, prompt=IDS))["is_firm"] is False

    async def test_its_route_follows_from_its_fields_unless_it_is_named(self, world, pair):
        answer = await routed(world, messages=[{"role": "user", "content": "hi"}], model="m")
        tie = "was not chosen before"
        assert (answer["path"], answer["tie"]) == ("/v1/chat/completions", tie)
        assert answer["why"] == f"no engine holds any of the prompt; of 2 engines within 1 ms, a {tie}"
        answer = await routed(world, path="/v1/embeddings", input="x")
        assert (answer["n_tokens"], answer["rule"]) == (None, "least loaded")
        assert "not known here" in answer["why"]

    async def test_a_tenant_has_its_own_cache(self, tokenizer_dir):
        keys = ({"key": "ka", "tenant": "alice"}, {"key": "kb", "tenant": "bob"})
        async with kv_world(tokenizer_dir, api_keys=keys) as world:
            fake = KvFake("a")
            world.add(fake)
            world.served(fake, IDS, world.tenants.salt("alice", None))
            for tenant, predicted in (("alice", 48), ("bob", 0)):
                answer = await routed(world, prompt=IDS, tenant=tenant)
                assert (answer["predicted_tokens"], answer["note"]) == (predicted, None)
            assert "--tenant NAME" in (await routed(world, prompt=IDS))["note"]
            with pytest.raises(NotFound):
                await routed(world, prompt=IDS, tenant="carol")
