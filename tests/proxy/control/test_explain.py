from fnmatch import fnmatchcase

import msgspec
import pytest
from msgspec import structs

from engine_adapter import JsonBody, Tier
from proxy.control.explain import explain, route, summarize
from proxy.core.placement.decision import Cost
from proxy.core.placement.pairs import TransferResult
from proxy.errors import NotFound
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
BY_P = structs.replace(HERE, chosen=structs.replace(HERE.chosen, prefiller="p"))
REUSED_NONE = "reused 0 of 64 tokens, as predicted; no recent request begins like it"
UNKNOWN = "kvpin did not know the prompt when it placed it: reuse was off, *"


@pytest.mark.parametrize(
    ("earlier", "placement", "reported", "fields", "said"),
    [
        (tokens(64, start=9), HERE, 0, {}, f"a {REUSED_NONE}"),
        (
            None, BY_P, 0, {"prefilled_by": "p", "transfer": TransferResult.MOVED},
            f"p, which computed the prompt for a, {REUSED_NONE}",
        ),
        (
            None, HERE, 0, {"prefilled_by": "p", "transfer": TransferResult.FAILED},
            f"a {REUSED_NONE}; p was to compute the prompt, but no KV came from it",
        ),
        (
            None, HERE, 0, {"prefilled_by": "p", "transfer": TransferResult.LATE},
            f"a {REUSED_NONE}; p computed the prompt, but no answer began in time to use its KV",
        ),
        (
            None, HERE, 0, {"changed": ["half_characters", "tool:web_search"]},
            "*; kvpin left out or changed half_characters, tool:web_search",
        ),
        (
            tokens(5) + [5] * 59, HERE, 0, {},
            "* from request r1 from token 5 on, within the first block of 16",
        ),
        (
            None, placed("a", 64, ("a", 0.1, 48)), 16, {},
            "a reused 16 of 48 predicted tokens; its beginning was evicted before the engine*",
        ),
        (
            None, placed("a", 64, ("a", 0.1, 0), ("b", 0.5, 48)), 0, {},
            "*; b holds 48 tokens of it, but would have cost more",
        ),
        (
            tokens(64), FOUND, 48, {},
            "a reused 48 of 64 tokens, 16 more than predicted; these are all its full blocks; the last *",
        ),
        (
            tokens(64), structs.replace(FOUND, firm=False), 48, {},
            "a reused 48 of 64 tokens, 16 more than a prediction that was not firm; *",
        ),
        (tokens(50), placed("a", 64, ("a", 0.1, 50)), 50, {}, "a reused 50 of 64 tokens, as predicted; *"),
        (None, HERE, 0, {"tokens_agree": False}, "a tokenised the prompt differently*"),
        (None, None, None, {"error": "no engine"}, "/v1/completions was not placed: no engine"),
        (None, None, None, {}, "/v1/completions was not placed: kvpin answered it without an engine"),
        (
            None, HERE, None, {"status": 404, "error": "File Not Found"},
            "/v1/completions failed on a with status 404: File Not Found",
        ),
        (None, HERE, None, {"ids": None, "runs_prompt": False}, "a served it; it had no prompt"),
        (None, HERE, None, {"ids": None}, f"nothing was predicted: {UNKNOWN}"),
        (
            None, placed("a", 64, ("a", 0.1, 48)), 48, {"ids": None},
            f"a tokenised the prompt: 48 of its tokens were predicted then; a reused 48; {UNKNOWN}",
        ),
        (
            None, placed("a", 64, ("a", 0.1, 16)), None, {},
            "a did not report cached tokens; predicted were 16*",
        ),
    ],
)  # fmt: skip
async def test_each_explanation(world, pair, earlier, placement, reported, fields, said):
    if earlier is not None:
        world.record("r1", earlier)
    answer = await explained(world, placement=placement, reported_tokens=reported, **fields)
    assert fnmatchcase(answer["explanation"], said), answer["explanation"]
    assert answer["changed"] == fields.get("changed", [])


async def test_it_diverges_and_the_text_shows_where(world, pair):
    other = tokens(40) + [5] * 24
    world.record("r1", other)
    answer = await explained(world, placement=FOUND, reported_tokens=32)
    assert answer["explanation"].endswith("it shares 40 tokens with request r1; from there on it is new")
    assert (answer["miss"], answer["is_miss"]) == ("shared_prefix", False)
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
    costs = (
        Cost("a", prefill_s=0.1, regret_s=0.0),
        Cost("b", queue_s=0.5, cached_tokens=48),
    )
    placement = structs.replace(placement_of("a", 0, 64, costs, "lowest cost"), strain=4.0)
    decision = (await explained(world, placement=placement, reported_tokens=0))["decision"]
    assert decision["why"].startswith("b holds 48 of 64 tokens, but 500 ms of prefill wait there; a computes")
    assert (decision["reason"], decision["rule"], decision["tie"]) == ("released", "lowest cost", None)
    assert (decision["utilisation"], decision["strain"]) == (0.75, 4.0)
    told = [
        [cost[name] for name in ("engine", "queue_s", "regret_s", "total_s")] for cost in decision["costs"]
    ]
    assert told == [["a", 0.0, 0.0, 0.1], ["b", 0.5, None, 0.5]]
    assert (await explained(world))["decision"] is None


async def test_an_engine_that_makes_other_tokens_is_named(world, pair):
    for fake in pair:
        world.served(fake, IDS)
    world.pool.part(world.engines["b"])
    answer = await routed(world, prompt=IDS)
    name, other = (answer["engine"], "b" if answer["engine"] == "a" else "a")
    assert answer["why"].startswith(
        f"{name} holds 48 of 64 tokens; {other} would not cost less, and cannot go on"
    )


async def test_a_stream_that_another_engine_went_on_with(world, pair):
    fields = {"died": ["a"], "interrupted": 1, "attempts": ["a", "b"], "reported_tokens": 32}
    answer = await explained(world, placement=placed("b", 70, ("b", 0.1, 0)), **fields)
    assert answer["explanation"] == "a died in mid-answer; b went on with the answer"
    assert answer["decision"]["why"] == (
        "a died in mid-answer; for the rest, with 6 tokens of the answer in its prompt, "
        "b is the only engine that can take the request; it holds 0 of 70 tokens"
    )
    assert answer["expected_first_token_s"] is None


async def test_the_first_token_was_expected_by_the_engines_own_terms(world, pair):
    placement = placement_of("a", 0, 64, (Cost("a", 0.25, prefill_s=0.5, later_s=8.25),), "lowest cost")
    known = world.record("r", tokens(64), placement=placement)
    assert (await summarize(world.flow, known)).expected_first_token_s == 0.75
    for unknown in (world.record("r", tokens(64)), world.record("r", None, placement=placement)):
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


@pytest.mark.parametrize(
    ("fields", "miss"),
    [
        ({}, None),  # no engine served it
        ({"placement": HERE}, "not_followed"),
        ({"placement": HERE, "error": "no"}, None),
        ({"placement": HERE, "runs_prompt": False}, None),
    ],
)
async def test_only_what_an_engine_served_can_miss(world, pair, fields, miss):
    record = world.record("r", None, **fields)
    assert (await summarize(world.flow, record)).miss == miss


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
