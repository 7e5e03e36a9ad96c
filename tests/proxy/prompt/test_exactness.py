from array import array
from dataclasses import replace

import msgspec
import pytest

from engine_adapter import Capability, EngineRejected, EngineUnavailable, JsonBody
from proxy.prompt import PromptBuilder, PromptTables, audit_tokens, verify_exactness
from proxy.prompt.exactness import ENOUGH_AGREED
from proxy.prompt.tokenizer import EngineTokenizer
from tests.fakes import prompts_of

CHAT = "/v1/chat/completions"


@pytest.fixture
def check(engine):
    async def check(info):
        builder = prompts_of(info, tables=PromptTables())
        return builder, await verify_exactness(builder, engine)

    return check


async def test_the_same_tokenizer_is_exact(check, embedded, engine):
    builder, exactness = await check(embedded)
    assert (exactness.ok, exactness.source) == (True, "local")
    assert f"on {len(engine.asked)} prompts" in exactness.detail
    assert len(engine.asked) >= 9
    assert builder.tokenizer is builder.local
    asked = len(engine.asked)
    body = JsonBody(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}]}))
    assert await builder.build(CHAT, body, salt=None) is not None
    assert len(engine.asked) == asked


@pytest.mark.parametrize(
    ("alter", "detail"),
    [
        (lambda path, body, ids: [0, *ids], "differs on 'one message': token 0 is 1 here, 0 there"),
        (lambda path, body, ids: [*ids, 1] if "tools" in body else ids, "differs on 'tools': "),
        (lambda path, body, ids: ids if path == CHAT else ids[1:], "differs on 'text': "),
    ],
)
async def test_one_token_off_and_the_engine_is_asked_from_then_on(check, embedded, engine, alter, detail):
    engine.alter = alter
    builder, exactness = await check(embedded)
    assert (exactness.ok, exactness.source) == (True, "engine")
    assert detail in exactness.detail
    assert isinstance(builder.tokenizer, EngineTokenizer)


async def test_a_chat_only_one_side_can_render_is_a_difference(check, embedded, engine):
    def no_turns(path, body, ids):
        if len(body.get("messages") or ()) > 1:
            raise EngineRejected("no turns", status=400)
        return ids

    engine.alter = no_turns
    _, exactness = await check(embedded)
    assert exactness.source == "engine"
    assert "'system message': the engine refuses it (no turns)" in exactness.detail


async def test_an_engine_that_is_not_set_up_for_tools_is_asked_about_them_alone(info_of, engine):
    def no_tools(path, body, ids):
        if "tools" in body:
            raise EngineRejected("tools are off", status=400)
        return ids

    engine.alter = no_tools
    builder = prompts_of(info_of(Capability.TOKENIZE), tables=PromptTables(), engines=lambda: [engine])
    exactness = await verify_exactness(builder, engine)
    assert (exactness.ok, exactness.source) == (True, "local")
    assert "on 8 prompts" in exactness.detail

    async def source(**fields):
        prompt = await builder.build(CHAT, JsonBody(msgspec.json.encode(fields)), salt=None)
        return None if prompt is None else prompt.source

    hello = {"role": "user", "content": "hello"}
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert await source(messages=[hello]) == "local"
    assert await source(messages=[hello, called, hello]) == "engine"
    assert await source(messages=[hello, {"role": "tool", "content": "1"}]) == "engine"
    # Only an engine could say, and it does not.
    assert await source(messages=[hello], tools=[{"type": "function", "function": {"name": "f"}}]) is None


async def test_a_chat_neither_side_can_render_is_none(check, embedded, engine, monkeypatch):
    engine.tokenizer._tokenizer.chat_template = None
    builder = prompts_of(embedded, tables=PromptTables())
    builder.local.tokenizer._tokenizer.chat_template = None
    exactness = await verify_exactness(builder, engine)
    assert (exactness.ok, exactness.source) == (True, "local")


async def test_what_only_the_engine_can_render(embedded, engine):
    builder = prompts_of(embedded, tables=PromptTables())
    builder.local.tokenizer._tokenizer.chat_template = None
    exactness = await verify_exactness(builder, engine)
    assert exactness.source == "engine"
    assert "only the engine can render it" in exactness.detail


async def test_without_a_tokenizer_here_the_engine_is_asked(check, info_of):
    builder, exactness = await check(info_of(Capability.TOKENIZE, tokenizer=None))
    assert (exactness.ok, exactness.source) == (True, "engine")
    assert "no tokenizer is known" in exactness.detail
    assert isinstance(builder.tokenizer, EngineTokenizer)


async def test_without_any_tokenizer_prompts_are_not_followed(info_of, engine):
    builder = PromptBuilder(info_of(), tables=PromptTables())
    await builder.load("/nowhere/at/all")
    exactness = await verify_exactness(builder, engine)
    assert (exactness.ok, exactness.source) == (False, "none")
    assert "/nowhere/at/all" in exactness.detail
    assert engine.asked == []


async def test_an_engine_that_cannot_be_asked_leaves_it_unchecked(check, info_of):
    builder, exactness = await check(info_of())
    assert (exactness.ok, exactness.source) == (False, "local")
    assert "unchecked" in exactness.detail
    assert builder.tokenizer is builder.local


async def test_an_engine_that_goes_away_is_unavailable(check, embedded, engine):
    engine.is_gone()
    with pytest.raises(EngineUnavailable):
        await check(embedded)


class TestAudit:
    """Prompts that were served, held against the ids that the engine says it made of them."""

    @pytest.fixture
    def build(self, engine):
        async def build(builder, **fields):
            body = JsonBody(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields}))
            return await builder.build(CHAT, body, salt=None)

        return build

    @pytest.fixture
    async def asking(self, info_of, engine):
        """A builder of a pool whose engine can be asked, and was: its tokenizer is right on the probes."""
        info = info_of(Capability.TOKENIZE)
        builder = prompts_of(info, tables=PromptTables(), engines=lambda: (engine,))
        await verify_exactness(builder, engine)
        return builder

    @pytest.fixture
    async def unchecked(self, info_of, engine):
        """A builder of a pool whose engine cannot be asked."""
        builder = prompts_of(info_of(), tables=PromptTables())
        await verify_exactness(builder, engine)
        return builder

    async def test_the_same_ids_change_nothing(self, asking, build):
        prompt = await build(asking)
        before = asking.exactness
        assert audit_tokens(asking, prompt, prompt.token_ids) is None
        assert (asking.agreed, asking.differed, asking.exactness) == (1, 0, before)
        assert (await build(asking)).exact

    async def test_one_token_off_and_the_engine_is_asked_from_then_on(self, asking, build, engine):
        prompt = await build(asking)
        assert (prompt.source, prompt.exact) == ("local", True)
        theirs = array("i", [*prompt.token_ids[:3], 9, *prompt.token_ids[4:]])
        difference = audit_tokens(asking, prompt, theirs)
        assert difference == f"token 3 is {prompt.token_ids[3]} here, 9 there"
        assert (asking.exactness.ok, asking.exactness.source) == (True, "engine")
        assert difference in asking.exactness.detail
        later = await build(asking)
        assert (later.source, later.exact) == ("engine", True)
        assert len(engine.asked) > 9

    async def test_a_prompt_of_before_says_nothing_about_the_engines(self, asking, build):
        prompt = await build(asking)
        longer = prompt.token_ids + array("i", [1])
        assert audit_tokens(asking, prompt, longer) == f"{len(longer) - 1} tokens here, {len(longer)} there"
        assert audit_tokens(asking, prompt, longer) is None, "told once"
        assert (asking.differed, asking.exactness.ok) == (2, True)
        assert (await build(asking)).exact

    async def test_an_engine_that_serves_others_than_it_tells_is_not_exact(self, asking, build):
        asking.ask_engines()
        prompt = await build(asking)
        assert audit_tokens(asking, prompt, prompt.token_ids[1:]) is not None
        assert not asking.exactness.ok
        later = await build(asking)
        assert (later.source, later.exact) == ("engine", False)
        audit_tokens(asking, later, later.token_ids[1:])
        assert await build(asking) is None, "twice is no accident"

    async def test_special_chats_alone_can_be_unknown(self, asking, build):
        special = await build(asking, tool_choice="none")
        for _ in range(2):
            assert special.source == "engine"
            audit_tokens(asking, special, special.token_ids[1:])
        assert await build(asking, tool_choice="none") is None
        assert (await build(asking)).exact

    async def test_an_engine_that_cannot_be_asked_leaves_it_inexact(self, unchecked, build):
        prompt = await build(unchecked)
        assert audit_tokens(unchecked, prompt, prompt.token_ids[1:]) is not None
        assert (unchecked.exactness.ok, unchecked.exactness.source) == (False, "local")
        assert not (await build(unchecked)).exact

    async def test_enough_prompts_alike_are_a_check(self, unchecked, build):
        prompt = await build(unchecked)
        for _ in range(ENOUGH_AGREED):
            assert not unchecked.exactness.ok
            audit_tokens(unchecked, prompt, prompt.token_ids)
        assert (unchecked.exactness.ok, unchecked.exactness.source) == (True, "local")
        assert "20 prompts" in unchecked.exactness.detail
        assert not (await build(unchecked)).exact, "a few prompts do not show all that a template does"

    async def test_not_after_one_that_differed(self, unchecked, build):
        prompt = await build(unchecked)
        audit_tokens(unchecked, prompt, prompt.token_ids[1:])
        for _ in range(2 * ENOUGH_AGREED):
            audit_tokens(unchecked, prompt, prompt.token_ids)
        assert not unchecked.exactness.ok

    async def test_ids_that_the_client_gave_prove_nothing(self, unchecked, build):
        prompt = replace(await build(unchecked), source="client")
        for theirs in (prompt.token_ids, prompt.token_ids[1:]):
            assert audit_tokens(unchecked, prompt, theirs) is None
        assert (unchecked.agreed, unchecked.differed) == (0, 0)
