from time import monotonic

import msgspec
import pytest

from engine_adapter import JsonBody, Tier
from proxy.control.dry_run import route
from proxy.core.placement.load import Work
from proxy.errors import BadRequest, NoEngine, NotFound
from proxy.fleet.engine import EngineState
from tests.kv_world import KvFake, WatchedFlow, kv_world, tokens

IDS = tokens(64)


def body(**fields):
    return JsonBody(msgspec.json.encode(fields))


async def routed(world, body):
    return msgspec.to_builtins(await route(world.flow, body))


async def test_it_goes_where_the_prefix_lies_and_says_why(world, pair):
    _, b = pair
    world.served(b, IDS)
    answer = await routed(world, body(prompt=IDS, max_tokens=4))
    assert (answer["engine"], answer["predicted_tokens"], answer["n_tokens"]) == ("b", 48, 64)
    assert (answer["blocks"], answer["rule"], answer["path"]) == (4, "lowest cost", "/v1/completions")
    assert answer["why"].startswith("b holds 48 of 64 tokens; it computes 16 tokens in ")
    assert (answer["reason"], answer["tie"]) == ("held", None)
    assert answer["strain"] == pytest.approx(1 / (1 - answer["utilisation"]))
    by_engine = {candidate["engine"]: candidate for candidate in answer["candidates"]}
    assert by_engine["b"]["matched_tokens"] == {"gpu": 64, "host": 0, "disk": 0, "pending": 0}
    assert by_engine["a"]["prefill_s"] > by_engine["b"]["prefill_s"]
    assert (by_engine["a"]["regret_s"], by_engine["b"]["regret_s"]) == (None, 0.0)
    assert by_engine["b"]["first_token_s"] == by_engine["b"]["prefill_s"]


async def test_it_says_if_the_prediction_is_not_firm(world, pair):
    _, b = pair
    world.served(b, IDS)
    assert (await routed(world, body(prompt=IDS)))["is_firm"] is True
    for engine in world.engines.values():
        engine.is_proven = False
    assert (await routed(world, body(prompt=IDS)))["is_firm"] is False


async def test_it_takes_the_read_paths_own_steps_and_sends_nothing(world, pair):
    flow = WatchedFlow.of(world.flow)
    await route(flow, body(prompt=IDS))
    assert flow.steps == ["prepare", "candidates"]


async def test_the_tier_shows(world, pair):
    world.pool.index.store("a", Tier.HOST, world.pool.chain(world.served(pair[1], IDS)).hashes)
    answer = await routed(world, body(prompt=IDS))
    by_engine = {candidate["engine"]: candidate for candidate in answer["candidates"]}
    assert by_engine["a"]["matched_tokens"]["host"] == 64
    assert by_engine["a"]["restore_s"] > 0


async def test_a_busy_holder_loses(world, pair):
    world.served(pair[0], IDS)
    world.engines["a"].ledger.begin(monotonic(), 100.0, Work(100_000))
    answer = await routed(world, body(prompt=IDS))
    assert answer["engine"] == "b"
    assert answer["why"].startswith("a holds 48 of 64 tokens, but 100.0 s of prefill wait there; b computes")
    assert answer["reason"] == "released"


async def test_it_changes_nothing(world, pair):
    before = len(world.pool.index), world.engines["a"].ledger.placed
    await routed(world, body(prompt=IDS))
    assert (len(world.pool.index), world.engines["a"].ledger.placed) == before
    assert list(world.flow.requests) == []


async def test_a_chat_needs_no_path(world, pair):
    answer = await routed(world, body(messages=[{"role": "user", "content": "hi"}], model="m"))
    assert answer["path"] == "/v1/chat/completions"
    assert (
        answer["why"]
        == "no engine holds any of the prompt; of 2 engines within 1 ms, a was not chosen before"
    )
    assert answer["tie"] == "was not chosen before"


async def test_one_engine_alone(world):
    world.add(KvFake("a"))
    answer = await routed(world, body(prompt=IDS))
    assert answer["why"] == "a is the only engine that can take the request; it holds 0 of 64 tokens"


async def test_a_prompt_nobody_can_read_goes_to_the_least_loaded(world, pair):
    answer = await routed(world, body(path="/v1/embeddings", input="x"))
    assert (answer["n_tokens"], answer["rule"]) == (None, "least loaded")
    assert "not known here" in answer["why"]


async def test_without_reuse_it_balances(tokenizer_dir):
    async with kv_world(tokenizer_dir, reuse=False) as world:
        world.add(KvFake("a"))
        answer = await routed(world, body(prompt=IDS))
        assert answer["why"].startswith("reuse is off")


async def test_a_tenant_has_its_own_cache(tokenizer_dir):
    keys = ({"key": "ka", "tenant": "alice"}, {"key": "kb", "tenant": "bob"})
    async with kv_world(tokenizer_dir, api_keys=keys) as world:
        fake = KvFake("a")
        world.add(fake)
        world.served(fake, IDS, world.tenants.salt("alice", None))
        for tenant, predicted in (("alice", 48), ("bob", 0)):
            answer = await routed(world, body(prompt=IDS, tenant=tenant))
            assert answer["predicted_tokens"] == predicted
        with pytest.raises(NotFound):
            await routed(world, body(prompt=IDS, tenant="carol"))


async def test_the_uuids_of_images_are_held_to_what_they_stand_for(world, pair):
    def chat(data):
        part = {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}, "uuid": "u"}
        return body(messages=[{"role": "user", "content": [part]}], path="/v1/embeddings")

    assert (await routed(world, chat("eA==")))["rule"] == "least loaded"
    with pytest.raises(BadRequest) as caught:
        await routed(world, chat("eQ=="))
    assert caught.value.param == "messages[0].content[0].uuid"


async def test_what_is_wrong(world, pair):
    with pytest.raises(BadRequest) as caught:
        await routed(world, body(prompt=IDS, model=3))
    assert caught.value.param == "model"
    with pytest.raises(NotFound):
        await routed(world, body(prompt=IDS, model="n"))
    for engine in world.engines.values():
        engine.state = EngineState.DRAINING
    with pytest.raises(NoEngine):
        await routed(world, body(prompt=IDS))


async def test_an_adapters_request_goes_where_the_adapter_is_served(world, pair):
    ada = KvFake("c", loras=("ada",))
    world.add(ada)
    world.served(pair[0], IDS)
    answer = await routed(world, body(prompt=IDS, model="ada"))
    assert (answer["engine"], answer["model"], answer["lora"]) == ("c", "m", "ada")
    assert (answer["predicted_tokens"], len(answer["candidates"])) == (0, 1)
    world.served(ada, IDS, lora="ada")
    assert (await routed(world, body(prompt=IDS, model="ada")))["predicted_tokens"] == 48
    assert (await routed(world, body(prompt=IDS, model="m")))["engine"] == "a"
    world.engines["c"].state = EngineState.DRAINING
    with pytest.raises(NoEngine, match="LoRA adapter 'ada'"):
        await routed(world, body(prompt=IDS, model="ada"))
