import msgspec
import pytest

from engine_adapter import Capability, EngineRejected, EngineUnavailable, JsonBody
from proxy.prompt import PromptBuilder, PromptTables, verify_exactness
from proxy.prompt.tokenizer import EngineTokenizer

CHAT = "/v1/chat/completions"


@pytest.fixture
def check(engine):
    async def check(info):
        builder = PromptBuilder(info, tables=PromptTables())
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
    def no_tools(path, body, ids):
        if "tools" in body:
            raise EngineRejected("tools are off", status=400)
        return ids

    engine.alter = no_tools
    _, exactness = await check(embedded)
    assert exactness.source == "engine"
    assert "'tools': the engine refuses it (tools are off)" in exactness.detail


async def test_a_chat_neither_side_can_render_is_none(check, embedded, engine, monkeypatch):
    engine.tokenizer._tokenizer.chat_template = None
    builder = PromptBuilder(embedded, tables=PromptTables())
    builder.local.tokenizer._tokenizer.chat_template = None
    exactness = await verify_exactness(builder, engine)
    assert (exactness.ok, exactness.source) == (True, "local")


async def test_what_only_the_engine_can_render(embedded, engine):
    builder = PromptBuilder(embedded, tables=PromptTables())
    builder.local.tokenizer._tokenizer.chat_template = None
    exactness = await verify_exactness(builder, engine)
    assert exactness.source == "engine"
    assert "only the engine can render it" in exactness.detail


async def test_without_a_tokenizer_here_the_engine_is_asked(check, info_of):
    builder, exactness = await check(info_of(Capability.TOKENIZE, tokenizer=None))
    assert (exactness.ok, exactness.source) == (True, "engine")
    assert "no tokenizer is known" in exactness.detail
    assert isinstance(builder.tokenizer, EngineTokenizer)


async def test_without_any_tokenizer_prompts_are_not_followed(check, info_of, engine):
    builder, exactness = await check(info_of(tokenizer="/nowhere/at/all"))
    assert (exactness.ok, exactness.source) == (False, "none")
    assert "/nowhere/at/all" in exactness.detail
    assert builder.tokenizer is None
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
