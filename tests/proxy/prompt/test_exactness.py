import asyncio
import json
from array import array

import msgspec
import pytest
from msgspec import structs

from engine_adapter import Capability, EngineRejected, EngineUnavailable, JsonBody
from engine_adapter.prompt.forms import Form
from proxy.prompt import audit_tokens, exactness, verify_exactness
from proxy.prompt.trust import ENOUGH_AGREED, Audits, FormTable
from tests.fakes import prompts_of

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
SAYS = "{% for tool in tools %}{{ tool.type }}{% endfor %}{{ messages | map(attribute='content') | join }}"


@pytest.fixture
def check(engine):
    async def check(info):
        builder = prompts_of(info)
        return builder, await verify_exactness(builder, engine)

    return check


@pytest.fixture
def builder(info_of, engine):
    """Of a pool whose engine can be asked."""
    return prompts_of(info_of(Capability.TOKENIZE), engines=lambda _: (engine,))


def chat(**fields):
    return JsonBody(msgspec.json.encode({"messages": [HELLO], **fields}))


async def test_the_same_tokenizer_is_exact(check, embedded, engine):
    """In all forms, as it renders with the same code."""
    builder, exactness = await check(embedded)
    assert (exactness.ok, exactness.source) == (True, "local")
    assert "as the engine does in 12 forms" in exactness.detail
    assert all(row.source == "local" and row.probed for row in builder.forms.rows.values())
    assert len(engine.asked) >= 18
    assert any(body.get("stream") for body in engine.asked)
    asked = len(engine.asked)
    assert (await builder.build(CHAT, chat(tool_choice="none"), salt=None)).exact
    assert len(engine.asked) == asked


def has_messages(body):
    return "messages" in body


@pytest.mark.parametrize(
    ("is_off", "forms"),
    [
        (has_messages, set(Form) - {Form.TEXT}),
        (lambda body: "tools" in body, {Form.TOOLS, Form.TOOL_CALLS, Form.REASONING}),
        (lambda body: "prompt" in body, {Form.TEXT}),
        (lambda body: "reasoning_content" in body.raw.decode(), {Form.REASONING}),
        (lambda body: body.get("continue_final_message"), {Form.CONTINUED}),
        (lambda body: b"parts" not in body.raw and b'"text":"one"' in body.raw, {Form.TEXT_PARTS}),
    ],
)
async def test_one_token_off_costs_one_form(check, info_of, engine, is_off, forms):
    engine.alter = lambda path, body, ids: [0, *ids] if is_off(body) else ids
    builder, exactness = await check(info_of(Capability.TOKENIZE))
    rows = builder.forms.rows
    unprobed = {Form.OTHER, Form.DOCUMENTS}
    assert {form for form, row in rows.items() if row.source == "engine"} == forms | unprobed
    assert all(row.ok for row in rows.values())
    assert (exactness.ok, exactness.source) == (True, "engine" if Form.PLAIN in forms else "local")
    if Form.PLAIN in forms:
        assert "does not make its tokens with the chat template of " in exactness.detail
        assert len(exactness.detail) < 400, "two sentences, however many forms differ"
    else:
        assert all(f"{form} ('" in exactness.detail for form in forms - unprobed)
    assert ", the engine 0" in exactness.detail


def called(text):
    function = {"name": "f", "arguments": json.dumps({"text": text})}
    return {"tool_calls": [{"id": "1", "type": "function", "function": function}]}


async def test_special_tokens_are_looked_for_where_engines_read_them_otherwise(builder, engine):
    mark = min(engine.tokenizer.special_tokens)
    engine.alter = lambda path, body, ids: [0, *ids] if mark in body.raw.decode() else ids
    await verify_exactness(builder, engine)
    assert builder.forms.rows[Form.SPECIAL_TOKENS].source == "engine"
    parts = [{"type": "text", "text": f"a {mark} b"}]
    for content, source in ((f"x {mark}", "engine"), (parts, "engine"), ("x", "local"), ([], "engine")):
        body = chat(messages=[{"role": "user", "content": content}])
        assert (await builder.build(CHAT, body, salt=None)).source == source, content
    for said in ({"reasoning_content": mark}, called(mark), called("\\u003c")):
        body = chat(messages=[HELLO, {"role": "assistant", "content": "", **said}, HELLO])
        assert (await builder.build(CHAT, body, salt=None)).source == "engine", said
    body = JsonBody(b'{"prompt": "x"}')  # it reads completions otherwise, too
    assert (await builder.build("/v1/completions", body, salt=None)).source == "engine"


async def test_a_form_that_the_engine_refuses_is_asked_of_it(builder, engine):
    """For example tools, without a tool parser."""

    def no_tools(path, body, ids):
        if "tools" in body:
            raise EngineRejected("tools are off", status=400)
        return ids

    engine.alter = no_tools
    exactness = await verify_exactness(builder, engine)
    assert (exactness.ok, exactness.source) == (True, "local")
    assert "tools ('tools': the engine refuses it (tools are off))" in exactness.detail

    async def source(**fields):
        prompt = await builder.build(CHAT, chat(**fields), salt=None)
        return None if prompt is None else prompt.source

    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert await source() == "local"
    assert await source(messages=[HELLO, called, HELLO]) == "engine"
    assert await source(messages=[HELLO, {"role": "tool", "content": "1"}]) == "engine"
    # Only an engine could say, and it does not.
    assert await source(tools=[{"type": "function", "function": {"name": "f"}}]) is None


@pytest.mark.parametrize("wrong", [EngineUnavailable("late"), None])
async def test_an_engine_that_does_not_answer_one_probe_costs_its_form(
    check, info_of, engine, wrong, monkeypatch
):
    monkeypatch.setattr(exactness, "_PROBE_S", 0.2)
    tokenize = engine.tokenize

    async def no_parts(path, body):
        if b'"text":"one"' in body.raw:
            if wrong is not None:
                raise wrong
            await asyncio.sleep(60)
        return await tokenize(path, body)

    engine.tokenize = no_parts
    builder, _ = await check(info_of(Capability.TOKENIZE))
    rows = builder.forms.rows
    assert rows[Form.TEXT_PARTS].source == "engine"
    assert "did not answer" in rows[Form.TEXT_PARTS].detail
    assert rows[Form.PLAIN].probed
    assert rows[Form.TOOLS].probed


async def test_probes_that_both_sides_refuse_prove_nothing(embedded, engine):
    builder = prompts_of(embedded)
    builder.local.tokenizer.transformers.chat_template = None
    exactness = await verify_exactness(builder, engine)
    assert exactness.source == "engine"
    assert "('one message': kvpin cannot render it" in exactness.detail
    engine.tokenizer.transformers.chat_template = None
    exactness = await verify_exactness(builder, engine)
    assert exactness.source == "engine"
    assert "(nothing is proven: the engine refuses all probes, and so does kvpin)" in exactness.detail
    assert builder.forms.rows[Form.TEXT].source == "local"


@pytest.mark.parametrize(
    "template",
    [
        "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + SAYS,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + SAYS,
    ],
    ids=["no chat without tools", "no system prompt"],
)
async def test_a_probe_that_the_template_refuses_leaves_its_form_to_the_others(builder, engine, template):
    for tokenizer in (engine.tokenizer, builder.local.tokenizer):
        tokenizer.transformers.chat_template = template
    await verify_exactness(builder, engine)
    assert builder.forms.rows[Form.PLAIN].probed
    assert (await builder.build(CHAT, chat(tools=[exactness._TOOL]), salt=None)).source == "local"


async def test_an_engine_that_cannot_be_asked_leaves_it_unchecked(check, info_of):
    builder, exactness = await check(info_of())
    assert (exactness.ok, exactness.source) == (False, "local")
    assert "unchecked" in exactness.detail
    assert builder.forms.source([Form.PLAIN]) == "local"


async def test_an_engine_that_goes_away_is_unavailable(check, embedded, engine):
    engine.error = EngineUnavailable("gone")
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
    async def asking(self, builder, engine):
        """A builder of a pool whose engine can be asked, and was: its tokenizer is right on the probes."""
        await verify_exactness(builder, engine)
        return builder

    async def test_the_same_ids_change_nothing(self, asking, build):
        prompt = await build(asking)
        before = asking.exactness
        assert audit_tokens(asking, prompt, prompt.token_ids) is None
        assert (asking.agreed, asking.differed, asking.exactness.detail) == (1, 0, before.detail)
        assert (await build(asking)).exact

    async def test_one_token_off_and_the_engine_is_asked_from_then_on(self, asking, build, engine):
        prompt = await build(asking)
        assert (prompt.source, prompt.exact) == ("local", True)
        theirs = array("i", [*prompt.token_ids[:3], 9, *prompt.token_ids[4:]])
        difference = audit_tokens(asking, prompt, theirs)
        assert difference == f"token 3: kvpin made {prompt.token_ids[3]}, the engine 9"
        assert (asking.exactness.ok, asking.exactness.source) == (True, "engine")
        assert difference in asking.exactness.detail
        later = await build(asking)
        assert (later.source, later.exact) == ("engine", True)
        assert len(engine.asked) > 9

    async def test_a_prompt_of_before_says_nothing_about_the_engines(self, asking, build):
        prompt = await build(asking)
        longer = prompt.token_ids + array("i", [1])
        assert (
            audit_tokens(asking, prompt, longer)
            == f"kvpin made {len(longer) - 1} tokens, the engine {len(longer)}"
        )
        assert audit_tokens(asking, prompt, longer) is None, "told once"
        assert (asking.differed, asking.exactness.ok) == (2, True)
        assert (await build(asking)).exact

    async def test_an_engine_that_serves_others_than_it_tells_is_not_exact(self, asking, build):
        asking.ask_engines("to try it")
        prompt = await build(asking)
        assert audit_tokens(asking, prompt, prompt.token_ids[1:]) is not None
        assert not asking.exactness.ok
        later = await build(asking)
        assert (later.source, later.exact) == ("engine", False)
        audit_tokens(asking, later, later.token_ids[1:])
        assert await build(asking) is None, "twice is no accident"

    async def test_a_form_that_differs_alone_is_asked_of_the_engine(self, asking, build):
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        prompt = await build(asking, messages=parts)
        assert (prompt.source, prompt.exact) == ("local", True)
        assert audit_tokens(asking, prompt, prompt.token_ids[1:]) is not None
        assert "costs a round trip for each prompt: text parts (it made other ids" in asking.exactness.detail
        later = await build(asking, messages=parts)
        assert (later.source, later.exact) == ("engine", True)
        plain = await build(asking)
        assert (plain.source, plain.exact) == ("local", True)

    async def test_ids_that_the_client_gave_prove_nothing(self, check, info_of, build):
        unchecked, _ = await check(info_of())
        prompt = structs.replace(await build(unchecked), source="client")
        for theirs in (prompt.token_ids, prompt.token_ids[1:]):
            assert audit_tokens(unchecked, prompt, theirs) is None
        assert (unchecked.agreed, unchecked.differed) == (0, 0)


# --- who makes the ids of each form ---------------------------------------------------------------------


TOOLS = frozenset({Form.PLAIN, Form.TOOLS})
PLAIN = frozenset({Form.PLAIN})


def test_a_form_that_nobody_makes_goes_by_load():
    table = FormTable(can_ask=True, detail="no tokenizer yet")
    for form in Form:
        table.probe(form, "token 7 differs" if form is Form.TOOLS else None, "")
    table.audit(TOOLS, "engine", "token 9")
    table.audit(TOOLS, "engine", "token 9")
    assert "these forms are not followed, and go by load: tools (" in table.summary("a", "").detail


def test_unchecked_ids_count_as_right_after_enough_prompts():
    table = FormTable(can_ask=False, detail="")
    table.make_here("the engine cannot be asked", alike=False)
    for _ in range(ENOUGH_AGREED - 1):
        table.audit(PLAIN, "local", None)
    assert not table.rows[Form.PLAIN].ok
    table.audit(PLAIN, "local", None)
    assert table.rows[Form.PLAIN].ok
    assert "20 prompts" in table.summary("a tokenizer", "").detail
    assert not table.is_exact(PLAIN, "local"), "a few prompts do not show all that a template does"


def test_the_first_of_each_form_are_audited_then_one_in_a_hundred_and_more_of_forms_that_came_back():
    audits = Audits()
    sampled = [at for at in range(1, 301) if audits.sample(PLAIN)]
    assert sampled == [*range(1, 17), 100, 200, 300]
    of_tools = [sum(audits.sample(TOOLS) for _ in range(50))]  # however many came without
    audits.healed = 1
    audits.begin()
    of_tools.append(sum(audits.sample({Form.TOOLS}) for _ in range(50)))
    assert of_tools == [16, 32]
