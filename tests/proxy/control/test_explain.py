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


async def test_first_time_seen(world, pair):
    world.record("r1", tokens(64, start=9))
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 0)), 0)
    assert answer["explanation"] == (
        "a reused 0 of 64 tokens, as predicted; no recent request begins like it"
    )


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        (TransferResult.MOVED, "p, which computed the prompt for a, {}"),
        (TransferResult.FAILED, "a {}; p was to compute the prompt, but no KV came from it"),
        (
            TransferResult.LATE,
            "a {}; p computed the prompt, but no answer began in time to use its KV",
        ),
    ],
)
async def test_what_the_engine_did_that_was_to_compute_the_prompt(world, pair, transfer, said):
    placement = placed("a", 64, ("a", 0.1, 0))
    if transfer is TransferResult.MOVED:  # else the placement on one engine counts
        placement = structs.replace(placement, chosen=structs.replace(placement.chosen, prefiller="p"))
    answer = await explained(world, tokens(64), placement, 0, prefilled_by="p", transfer=transfer)
    reused = "reused 0 of 64 tokens, as predicted; no recent request begins like it"
    assert answer["explanation"] == said.format(reused)


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


async def test_what_was_changed_in_the_request(world, pair):
    changed = ["half_characters", "tool:web_search"]
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 0)), 0, changed=changed)
    assert answer["changed"] == changed
    assert answer["explanation"].endswith("; kvpin left out or changed half_characters, tool:web_search")


async def test_within_the_first_block(world, pair):
    world.record("r1", tokens(5) + [5] * 59)
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 0)), 0)
    assert answer["explanation"].endswith("from request r1 from token 5 on, within the first block of 16")


async def test_evicted_before_it_came(world, pair):
    world.record("r1", tokens(64), placement=placed("a", 64, ("a", 0.1, 0)))
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 0)), 0)
    assert answer["explanation"].endswith(
        "; it shares 64 tokens with request r1, but a evicted or flushed them before it computed this prompt"
    )
    assert answer["miss"] == "evicted"


async def test_evicted_on_the_engine_after_it_was_placed(world, pair):
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 48)), 16)
    assert answer["explanation"] == (
        "a reused 16 of 48 predicted tokens; its beginning was evicted before the engine computed the prompt"
    )


async def test_placed_elsewhere(world, pair):
    placement = placed("a", 64, ("a", 0.1, 0), ("b", 0.5, 48))
    answer = await explained(world, tokens(64), placement, 0)
    assert answer["miss"] == "placed_elsewhere"
    assert answer["explanation"].endswith("; b holds 48 tokens of it, but would have cost more")


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


async def test_all_that_can_be(world, pair):
    world.record("r1", tokens(64))
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 32)), 48)
    assert answer["explanation"].startswith("a reused 48 of 64 tokens, 16 more than predicted; ")
    assert answer["explanation"].endswith("these are all its full blocks; the last token is always computed")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"placement": None, "error": "no engine"}, "/v1/completions was not placed: no engine"),
        (
            {"placement": None},
            "/v1/completions was not placed: kvpin answered it without an engine",
        ),
        (
            {"placement": placed("a", 64, ("a", 0.1, 0)), "status": 404, "error": "File Not Found"},
            "/v1/completions failed on a with status 404: File Not Found",
        ),
        (
            {"placement": placed("a", 64, ("a", 0.1, 0)), "ids": None},
            "nothing was predicted: kvpin did not know the prompt when it placed it: reuse was off, ",
        ),
        (
            {"placement": placed("a", 64, ("a", 0.1, 48)), "ids": None, "reported_tokens": 48},
            "a tokenised the prompt: 48 of its tokens were predicted then; a reused 48; kvpin did not know ",
        ),
        (
            {"placement": placed("a", 64, ("a", 0.1, 16))},
            "a did not report cached tokens; predicted were 16",
        ),
    ],
)
async def test_when_less_is_known(world, pair, fields, said):
    record = world.record("now", fields.pop("ids", tokens(64)), **fields)
    assert (await told(world, record))["explanation"].startswith(said)


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


async def test_more_than_a_prediction_that_was_not_firm_is_told_as_such(world, pair):
    world.record("r1", tokens(64))
    placement = structs.replace(placed("a", 64, ("a", 0.1, 32)), firm=False)
    answer = await explained(world, tokens(64), placement, 48)
    said = "a reused 48 of 64 tokens, 16 more than a prediction that was not firm; "
    assert answer["explanation"].startswith(said)


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


async def test_a_prediction_to_the_token_is_explained_like_any_other(world, pair):
    world.record("r1", tokens(50))
    answer = await explained(world, tokens(64), placed("a", 64, ("a", 0.1, 50)), 50)
    assert answer["explanation"].startswith("a reused 50 of 64 tokens, as predicted; ")


async def test_other_tokens_explain_it_all(world, pair):
    record = world.record(
        "r", tokens(40), placement=placed("a", 40, ("a", 0.1, 0)), reported_tokens=0, tokens_agree=False
    )
    assert (await told(world, record))["explanation"].startswith("a tokenised the prompt differently")


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
