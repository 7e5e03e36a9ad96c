from fnmatch import fnmatchcase

import msgspec
import pytest
from msgspec import structs

from proxy.control.explain import explain, summarize
from proxy.core.placement.decision import Cost, Placement
from proxy.core.placement.transfers import TransferResult
from tests.kv_world import KvFake, tokens


def placed(engine, n_tokens, *costs):
    """A placement with `costs` as (engine, total seconds, cached tokens)."""
    terms = tuple(
        Cost(name, prefill_s=total, total_s=total, cached_tokens=cached) for name, total, cached in costs
    )
    predicted = next(cached for name, _, cached in costs if name == engine)
    return Placement.of(engine, predicted, n_tokens, terms, "lowest cost")


async def told(world, record):
    return msgspec.json.decode(msgspec.json.encode(await explain(world.flow, record)))


async def explained(world, ids, placement, reported, **fields):
    record = world.record("now", ids, placement=placement, reported_tokens=reported, **fields)
    return await told(world, record)


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
    fields = dict(fields)
    ids = fields.pop("ids", tokens(64))
    answer = await explained(world, ids, placement, reported, **fields)
    assert fnmatchcase(answer["explanation"], said), answer["explanation"]
    assert answer["changed"] == fields.get("changed", [])


async def test_it_diverges_and_the_text_shows_where(world, pair):
    other = tokens(40) + [5] * 24
    world.record("r1", other)
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 32)), 32)
    assert answer["explanation"].endswith("it shares 40 tokens with request r1; from there on it is new")
    assert (answer["miss"], answer["is_miss"]) == ("shared_prefix", False)
    divergence = answer["divergence"]
    assert (divergence["request_id"], divergence["common_tokens"]) == ("r1", 40)
    assert divergence["token_ids"] == tokens(64)[40:56]
    assert divergence["other_token_ids"] == other[40:56]
    decode = world.pool.prompts.local.tokenizer.decode
    assert divergence["text"] == decode(tokens(64)[40:56])
    assert divergence["other_text"] == decode(other[40:56])


async def test_evicted_before_it_came(world, pair):
    world.record("r1", tokens(64), placement=placed("a", 64, ("a", 0.1, 0)))
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 0)), 0)
    assert answer["explanation"].endswith(
        "; it shares 64 tokens with request r1, but a evicted or flushed them before it computed this prompt"
    )
    assert answer["miss"] == "evicted"


async def test_placed_elsewhere(world, pair):
    placement = placed("a", 64, ("a", 0.1, 0), ("b", 0.5, 48))
    answer = await explained(world, tokens(64), placement, 0)
    assert answer["miss"] == "placed_elsewhere"


async def test_the_decision_is_told_with_the_terms_of_every_engine(world, pair):
    costs = (
        Cost("a", prefill_s=0.1, regret_s=0.0, total_s=0.1),
        Cost("b", queue_s=0.5, total_s=0.5, cached_tokens=48),
    )
    placement = structs.replace(Placement.of("a", 0, 64, costs, "lowest cost"), strain=4.0)
    decision = (await explained(world, tokens(64), placement, 0))["decision"]
    assert decision["why"].startswith("b holds 48 of 64 tokens, but 500 ms of prefill wait there; a computes")
    assert (decision["reason"], decision["rule"], decision["tie"]) == ("released", "lowest cost", None)
    assert (decision["utilisation"], decision["strain"]) == (0.75, 4.0)
    assert [(cost["engine"], cost["queue_s"], cost["regret_s"]) for cost in decision["costs"]] == [
        ("a", 0.0, 0.0),
        ("b", 0.5, None),
    ]
    assert (await explained(world, tokens(64), None, None))["decision"] is None


async def test_a_stream_that_another_engine_went_on_with(world, pair):
    fields = {"died": ["a"], "interrupted": 1, "attempts": ["a", "b"]}
    answer = await explained(world, tokens(64), placed("b", 70, ("b", 0.1, 0)), 32, **fields)
    assert answer["explanation"] == "a died in mid-answer; b went on with the answer"
    assert answer["decision"]["why"] == (
        "a died in mid-answer; for the rest, with 6 tokens of the answer in its prompt, "
        "b is the only engine that can take the request; it holds 0 of 70 tokens"
    )
    assert answer["expected_first_token_s"] is None


async def test_the_first_token_was_expected_by_the_engines_own_terms(world, pair):
    placement = Placement.of("a", 0, 64, (Cost("a", 0.25, prefill_s=0.5, total_s=9.0),), "lowest cost")
    known = world.record("r", tokens(64), placement=placement)
    assert (await summarize(world.flow, known)).expected_first_token_s == 0.75
    for unknown in (world.record("r", tokens(64)), world.record("r", None, placement=placement)):
        assert (await summarize(world.flow, unknown)).expected_first_token_s is None


async def test_ids_alone_without_a_tokenizer(world, pair):
    world.pool.prompts.local = None
    world.record("r1", tokens(40))
    divergence = (await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 0)), 0))["divergence"]
    assert (divergence["text"], len(divergence["token_ids"])) == (None, 16)
    world.fleet.pools.clear()
    assert (await told(world, world.flow.requests.get("now")))["divergence"]["text"] is None


async def test_a_summary_holds_no_prompt(world, pair):
    record = world.record("r1", tokens(64), prompt_cache_key="k")
    summary = msgspec.to_builtins(await summarize(world.flow, record))
    assert (summary["n_tokens"], summary["prompt_cache_key"], summary["engine"]) == (64, "k", None)
    assert "prompt" not in summary


async def test_what_no_engine_served_missed_nothing(world, pair):
    placements = (None, placed("a", 64, ("a", 0.1, 0)))
    records = [world.record("r", None, placement=placement) for placement in placements]
    assert [(await summarize(world.flow, record)).miss for record in records] == [None, "not_followed"]


async def test_what_has_no_prompt_missed_nothing(world, pair):
    placement = placed("a", 0, ("a", 0.1, 0))
    record = world.record("r", None, placement=placement, runs_prompt=False)
    assert (await summarize(world.flow, record)).miss is None
    assert (await told(world, record))["explanation"] == "a served it; it had no prompt"


async def test_a_summary_says_how_it_was_served(world, pair):
    served = world.record("r1", tokens(64), note="it ran alone")
    notes = [(await summarize(world.flow, each)).note for each in (served, world.record("r2", None))]
    assert notes == ["it ran alone", ""]
    assert (await told(world, served))["note"] == "it ran alone"


async def test_a_prompt_that_is_known_in_part(world, pair):
    record = world.record("r", tokens(40), placement=placed("a", 40, ("a", 0.1, 32)), reported_tokens=500)
    record.prompt = structs.replace(record.prompt, whole=False)
    assert (await told(world, record))["explanation"] == (
        "only the part before the first image is known here: "
        "32 of its 40 tokens were predicted; a reused 500; "
        "the request that computed them is not known here: "
        "it came to another kvpin or worker, or was too long ago"
    )


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
