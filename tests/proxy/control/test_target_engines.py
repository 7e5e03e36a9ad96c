from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from engine_adapter import Capability, JsonBody, KvTarget, NotSupported
from proxy.control.operations import Target
from proxy.control.target_engines import parts_of
from proxy.errors import BadRequest, NoEngine, NotFound
from proxy.prompt.builder import PromptBuilder
from tests.kv_world import ALL, KvFake, kv_world, tokens

MESSAGES = [{"role": "user", "content": "What is the weather in Paris today? " * 8}]
KEYS = ({"key": "ka", "tenant": "alice"}, {"key": "kb", "tenant": "bob"})


async def check_refused(world, error, param, /, match=None, **fields):
    with pytest.raises(error, match=match) as caught:
        await world.targets.prefix_of(Target(**fields))
    assert caught.value.param == param


async def chosen(world, capability, **fields):
    """The engines that a target concerns."""
    selection = await world.targets.select(Target(**fields), capability)
    return [share.engine.id for share in selection.shares]


async def test_a_chat_is_the_data_planes_prompt_without_the_turn_to_answer(world, pair):
    prefix = await world.targets.prefix_of(Target(messages=MESSAGES))
    body = JsonBody(msgspec.json.encode({"model": "m", "messages": MESSAGES}))
    served = await world.pool.prompts.build("/v1/chat/completions", body, salt=None)
    length = len(prefix.prompt.token_ids)
    assert prefix.prompt.token_ids == served.token_ids[:length]
    assert length < len(served.token_ids)
    whole = await world.targets.prefix_of(Target(messages=MESSAGES, add_generation_prompt=True))
    assert whole.prompt == served
    assert whole.chain == world.pool.chain(served)


@pytest.mark.parametrize(
    ("capabilities", "error"), [(ALL, NoEngine), (ALL - {Capability.TOKENIZE}, BadRequest)]
)
async def test_a_prefix_that_engines_did_not_tokenise_may_be_tried_again(
    world, monkeypatch, capabilities, error
):
    async def build(*_, **__):
        """As where no engine answers in time, or no tokenizer is known."""

    world.add(KvFake("a", capabilities))
    monkeypatch.setattr(PromptBuilder, "build", build)
    with pytest.raises(error, match="use token_ids, which always work"):
        await world.targets.prefix_of(Target(messages=MESSAGES))


async def test_engines_that_make_other_tokens_are_named(world, pair):
    world.pool.part(world.engines["b"])
    selection = await world.targets.select(Target(messages=MESSAGES), Capability.FLUSH)
    assert selection.note == "left out, because they make other tokens of it: b; name each (--engine ID)"
    for fields in ({"engine": "a", "messages": MESSAGES}, {"token_ids": tokens(40)}):
        assert "left out" not in str((await world.targets.select(Target(**fields), Capability.FLUSH)).note)


async def test_the_last_prompt_of_a_cache_key(world, pair):
    record = world.record("r1", tokens(40), prompt_cache_key="k")
    assert (await world.targets.prefix_of(Target(prompt_cache_key="k"))).prompt is record.prompt
    await check_refused(world, NotFound, "prompt_cache_key", prompt_cache_key="other")
    await check_refused(world, NotFound, "model", prompt_cache_key="k", model="n")
    world.add(KvFake("n", model="n"))
    await check_refused(world, BadRequest, "model", match="was for 'm'", prompt_cache_key="k", model="n")
    text = record.prompt
    for unlike_text in ({"media": True}, {"whole": False}):
        record.prompt = structs.replace(text, **unlike_text)
        await check_refused(world, BadRequest, "prompt_cache_key", match="images", prompt_cache_key="k")


async def test_the_beginning_of_a_requests_prompt(world, pair):
    record = world.record("r1", tokens(40), salt="s", tenant="t")
    assert (await world.targets.prefix_of(Target(request_id="r1"))).prompt == record.prompt
    part = await world.targets.prefix_of(Target(request_id="r1", tokens=32))
    assert part.chain.hashes == world.pool.chain(record.prompt).hashes
    assert (part.prompt.salt, part.label) == ("s", "request_id (32 tokens)")
    world.record("unknown", None)
    world.add(KvFake("n", model="n"))
    await check_refused(world, NotFound, "request_id", request_id="r2")
    await check_refused(world, NotFound, "request_id", request_id="r1", tenant="other")
    await check_refused(world, BadRequest, "request_id", request_id="unknown")
    await check_refused(world, BadRequest, "tokens", request_id="r1", tokens=41)
    await check_refused(world, BadRequest, "model", request_id="r1", model="n")


async def test_an_alias_names_its_model_and_its_adapter(world, pair):
    world.fleet.aliases = {"gpt": "m", "tuned": "ada", "m": "ada"}
    world.add(KvFake("c", loras=("ada", "lin")))
    for name, lora in (("gpt", None), ("tuned", "ada"), ("ada", "ada"), ("m", None)):
        for engine in (None, "c"):
            prefix = await world.targets.prefix_of(Target(token_ids=tokens(40), model=name, engine=engine))
            assert prefix.prompt.lora == lora
    for name, engine, served in (
        ("tuned", "a", "'m'"),
        ("ada", "a", "'m'"),
        ("bob", "c", "'m', 'ada', 'lin'"),
    ):
        said = f"engine '{engine}' serves {served}$"
        await check_refused(world, BadRequest, "model", match=said, prompt="x", model=name, engine=engine)
    world.record("r1", tokens(40), model="gpt", served_as="m", prompt_cache_key="k")
    for name in (None, "gpt", "m"):
        prefix = await world.targets.prefix_of(Target(prompt_cache_key="k", model=name))
        assert prefix.pool.model == "m"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"token_ids": []}, BadRequest, "token_ids"),
        ({"token_ids": [1] * 5000}, BadRequest, "prompt"),
        ({"token_ids": [600], "extra_ids": [9]}, Exception, "extra_ids[0]"),
        ({"prompt": "x", "model": "n"}, NotFound, "model"),
        ({"prompt": "x", "model": "n", "engine": "a"}, BadRequest, "model"),
        ({"prompt": "x", "engine": "z"}, NotFound, "engine"),
        ({"prompt": "x", "tenant": "t"}, NotFound, "tenant"),
        ({"engine": "a"}, BadRequest, "engine"),
    ],
)
async def test_a_prefix_that_cannot_be_named(world, pair, fields, error, param):
    world.pool.prompts._context = lambda: 4096
    await check_refused(world, error, param, **fields)


async def test_of_a_prefix_that_engines_cut_they_keep_the_beginning(world, pair):
    whole = await world.targets.prefix_of(Target(token_ids=tokens(100)))
    builder = world.pool.prompts
    builder.info, builder._context = replace(builder.info, cuts_prompts=True), lambda: 90
    assert (await world.targets.prefix_of(Target(token_ids=tokens(100)))).chain == whole.chain


async def test_an_engine_that_is_down_has_no_pool(world, pair):
    world.fleet.leave(world.engines["a"])
    with pytest.raises(NoEngine, match="'a' is not connected"):
        await world.targets.prefix_of(Target(prompt="x", engine="a"))


@pytest.mark.parametrize("change", ["leaves", "gets another builder"])
async def test_an_engine_that_changes_while_the_prefix_is_tokenised_is_no_failure_of_kvpin(
    world, pair, monkeypatch, change
):
    engine, build = world.engines["a"], PromptBuilder.build

    async def slow_build(*args, **more):
        if change == "leaves":
            world.fleet.leave(engine)
        else:
            world.pool.part(engine)
        return await build(*args, **more)

    monkeypatch.setattr(PromptBuilder, "build", slow_build)
    with pytest.raises(NoEngine, match="'a' has changed meanwhile; try again shortly"):
        await world.targets.select(Target(messages=MESSAGES, engine="a"), Capability.FLUSH)


async def test_a_prefix_concerns_engines_that_hold_any_of_it_or_may(world, pair):
    for engine in world.engines.values():
        engine.audit.synced()
    ids = tokens(64)
    prompt = world.served(pair[0], ids[:32])
    world.pool.index.store("a", "gpu", world.pool.chain(prompt).hashes)
    assert await chosen(world, Capability.FLUSH, token_ids=ids) == ["a"]
    world.engines["b"].audit.lost("in doubt")
    assert await chosen(world, Capability.FLUSH, token_ids=ids) == ["a", "b"]


async def test_tiers_that_no_event_tells_of_may_hold_it(world, pair):
    for engine in world.engines.values():
        engine.audit.synced()
    world.engines["b"].info = replace(world.engines["b"].info, tokens_per_chunk=16)
    assert await chosen(world, Capability.RESTORE, token_ids=tokens(40)) == ["b"]


async def test_engines_that_cannot_are_told_apart(world):
    world.add(KvFake("a"))
    world.add(KvFake("b", ALL - {Capability.OFFLOAD}))
    selection = await world.targets.select(Target(all=True), Capability.OFFLOAD)
    assert [s.engine.id for s in selection.shares] == ["a"]
    assert [s.engine.id for s in selection.unable] == ["b"]
    parts_of(selection, Capability.OFFLOAD, is_required=True)
    selection = await world.targets.select(Target(engine="b"), Capability.OFFLOAD)
    with pytest.raises(NotSupported, match="'offload'") as caught:
        parts_of(selection, Capability.OFFLOAD, is_required=True)
    assert str(caught.value) == str(world.fleet.engine("b").adapter.not_supported(Capability.OFFLOAD))


async def test_a_tenant_is_every_salt_it_has_been_seen_with(tokenizer_dir):
    async with kv_world(tokenizer_dir, api_keys=KEYS) as world:
        engine = world.add(KvFake("a"))
        tenants = world.tenants
        for tenant, salt in (("alice", None), ("alice", "x"), ("bob", None)):
            engine.salts.note(tenant, tenants.salt(tenant, salt))
        selection = await world.targets.select(Target(tenant="alice"), Capability.FLUSH)
        expected = {tenants.salt("alice", None), tenants.salt("alice", "x")}
        assert {target.cache_salt for target in selection.shares[0].targets} == expected
        narrow = await world.targets.select(Target(tenant="alice", cache_salt="x"), Capability.FLUSH)
        assert narrow.shares[0].targets == (KvTarget(cache_salt=tenants.salt("alice", "x")),)


async def test_a_prefix_lies_under_its_tenants_salt(tokenizer_dir):
    async with kv_world(tokenizer_dir, api_keys=KEYS) as world:
        world.add(KvFake("a"))
        salt = world.tenants.salt("alice", "x")
        prefix = await world.targets.prefix_of(Target(prompt="x", tenant="alice", cache_salt="x"))
        assert prefix.prompt.kv.cache_salt == salt
        await check_refused(world, BadRequest, "tenant", prompt="x")
        await check_refused(world, BadRequest, "tenant", prompt_cache_key="k")
        world.record("r1", tokens(20), tenant="bob", prompt_cache_key="k")
        found = await world.targets.prefix_of(Target(prompt_cache_key="k", tenant="bob"))
        assert len(found.prompt.token_ids) == 20
        await check_refused(world, NotFound, "prompt_cache_key", prompt_cache_key="k", tenant="alice")
        await check_refused(world, NotFound, "tenant", prompt_cache_key="k", tenant="carol")


async def test_one_tenant_alone_shares_with_everybody(tokenizer_dir):
    async with kv_world(tokenizer_dir, api_keys=KEYS[:1]) as world:
        world.add(KvFake("a"))
        with pytest.raises(BadRequest) as caught:
            await world.targets.select(Target(tenant="alice"), Capability.FLUSH)
        assert caught.value.param == "tenant"
        world.record("r1", tokens(20), tenant="alice", prompt_cache_key="k")
        assert (await world.targets.prefix_of(Target(prompt_cache_key="k"))).prompt.salt is None


class TestAdapters:
    """Targets that are KV of a LoRA adapter."""

    IDS = tokens(64)

    @pytest.fixture
    def ada(self, world, pair):
        ada = KvFake("c", loras=("ada", "lin"))
        world.add(ada)
        return ada

    @pytest.mark.parametrize(
        "fields", [{"messages": MESSAGES}, {"prompt": "some words " * 20}, {"token_ids": IDS}]
    )
    async def test_a_prefix_is_the_adapters_that_model_names(self, world, ada, fields):
        plain = await world.targets.prefix_of(Target(**fields))
        own = await world.targets.prefix_of(Target(**fields, model="ada"))
        assert (own.prompt.kv.lora, plain.prompt.kv.lora) == ("ada", None)
        assert own.prompt.kv.token_ids == plain.prompt.kv.token_ids
        assert own.chain.hashes[0] != plain.chain.hashes[0]

    @pytest.mark.parametrize("fields", [{"all": True}, {"engine": "c"}])
    async def test_all_of_an_adapters_kv_cannot_be_told_from_the_rest(self, world, ada, fields):
        with pytest.raises(BadRequest, match="only by a prefix") as caught:
            await world.targets.select(Target(**fields, model="ada"), Capability.FLUSH)
        assert caught.value.param == "model"
