import asyncio
import base64
import re
import threading
import time
from array import array
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from engine_adapter import (
    Capability,
    ChatError,
    EngineRejected,
    EngineUnavailable,
    JsonBody,
    PromptTableError,
)
from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.prompt.extra_ids import parse_embeddings, prompt_embeds_extra_id
from engine_adapter.prompt.forms import Form, forms_of
from proxy.errors import BadRequest
from proxy.prompt import PromptBuilder, RegisteredTables
from proxy.prompt.render import ChatInput, read_prompt
from proxy.prompt.tokenizer import EngineTokenizer, LocalTokenizer, _any_of
from tests.fakes import prompts_of, use_unchecked
from tests.proxy.prompt.conftest import TokenizingEngine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
VOCAB, HIDDEN = 1000, 4
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]


@pytest.fixture
def tables():
    tables = RegisteredTables()
    tables.put(save({"t": np.ones((4, HIDDEN), np.float32)}), table_id="one", extra_id=1)
    return tables


@pytest.fixture
def build(tables):
    async def build(info, path, *, salt=None, builder=None, **fields):
        builder = builder or prompts_of(info, tables=tables)
        return await builder.build(path, JsonBody(msgspec.json.encode(fields)), salt=salt)

    return build


EMBEDDINGS = save({"t": np.ones((3, HIDDEN), np.float32)})
TEXT = base64.b64encode(EMBEDDINGS).decode()
THEIR_IDS = array("i", [VOCAB, VOCAB + 1, VOCAB + 2])
IDENTITY = prompt_embeds_extra_id(parse_embeddings(EMBEDDINGS, param="data"))


async def test_a_chat_with_embeddings(build, embedded):
    part = {"type": "prompt_embeds", "data": TEXT}
    prompt = await build(embedded, CHAT, messages=[{"role": "user", "content": [part]}])
    at = prompt.token_ids.index(VOCAB)
    assert prompt.token_ids[at : at + 3] == THEIR_IDS
    assert [i for i, extra in enumerate(prompt.extra_ids) if extra == IDENTITY] == [at, at + 1, at + 2]


async def test_a_completion_of_embeddings(build, embedded, engine):
    prompt = await build(embedded, COMPLETIONS, prompt_embeds=TEXT, prompt="", salt="s")
    assert (prompt.token_ids, prompt.extra_ids) == (THEIR_IDS, array("Q", [IDENTITY] * 3))
    assert (prompt.salt, prompt.source, prompt.exact, prompt.whole) == ("s", "client", True, True)
    assert prompt == await build(embedded, COMPLETIONS, prompt_embeds=[TEXT], salt="s")
    assert await build(embedded, COMPLETIONS, prompt_embeds=[TEXT, TEXT]) is None
    assert await build(embedded, COMPLETIONS, prompt_embeds=TEXT, prompt="x") is None
    assert engine.asked == []


async def test_embeddings_need_no_tokenizer_but_the_models_sizes(build, embedded, tables):
    without = PromptBuilder(embedded, tables=tables)
    assert len((await build(None, COMPLETIONS, builder=without, prompt_embeds=TEXT)).token_ids) == 3
    for size in ("vocab_size", "hidden_size"):
        info = replace(embedded, **{size: None})
        assert await build(info, COMPLETIONS, prompt_embeds=TEXT) is None


@pytest.mark.parametrize(("tokens", "leaves"), [(2_000, False), (100_000, True)])
async def test_a_long_list_of_token_ids_is_read_off_the_loop(build, info_of, monkeypatch, tokens, leaves):
    readers = []

    def read(*args):
        readers.append(threading.current_thread())
        return read_prompt(*args)

    monkeypatch.setattr("proxy.prompt.builder.read_prompt", read)
    prompt = await build(info_of(max_model_len=None), COMPLETIONS, prompt=[5] * tokens)
    assert len(prompt.token_ids) == tokens
    assert (readers[0] is not threading.current_thread()) == leaves


@pytest.mark.parametrize(("values", "leaves"), [(5_000, False), (50_000, True)])
async def test_the_form_of_many_values_is_found_off_the_loop(build, info_of, monkeypatch, values, leaves):
    readers = []

    def read(body):
        readers.append(threading.current_thread())
        return forms_of(body)

    monkeypatch.setattr("proxy.prompt.builder.forms_of", read)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * values}}}]
    assert await build(info_of(max_model_len=None), CHAT, messages=HELLO, tools=tools) is not None
    assert [each is threading.current_thread() for each in readers] == [not leaves]


@given(st.sets(st.text("ab[", min_size=1, max_size=6)), st.text("ab["), st.integers(0, 3))
def test_any_of_some_words_is_found(words, text, levels):
    assert bool(re.search(_any_of(words, levels), text)) == any(word in text for word in words)


def test_words_of_any_length_and_number_are_looked_for_fast():
    special = re.compile(
        _any_of({f"[control_{n}]" for n in range(700)} | {"a" * n + "b" for n in range(2000)})
    )
    began = time.thread_time()
    assert special.search("[" * 300_000 + "x") is None
    assert time.thread_time() - began < 0.5
    assert special.search("x[control_699]")


@pytest.mark.parametrize(
    ("arguments", "is_found"),
    [
        ('{"a": "</s>"}', True),
        (r'{"a": "<\/s>"}', True),
        (r'{"a": "<\u002fs>"}', True),
        (r'{"a": "\/s>"}', False),
    ],
)
def test_special_tokens_are_found_as_json_escapes_them(info_of, arguments, is_found):
    local = prompts_of(info_of()).local
    local.tokenizer.special_tokens = frozenset({"</s>"})
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    found = local.forms_in(ChatInput([{"role": "assistant", "tool_calls": calls}]))
    assert (Form.SPECIAL_TOKENS in found) == is_found


def probed(builder):
    """On all probes, the ids made here are the engine's."""
    for form in set(Form) - {Form.OTHER, Form.DOCUMENTS}:
        builder.forms.probe(form, None, "as there")


async def test_who_made_the_ids_and_whether_they_are_exact(build, info_of, tables, engine):
    info = info_of(Capability.TOKENIZE)
    builder = prompts_of(info, tables=tables, engines=lambda _: (engine,))

    async def of(path, **fields):
        prompt = await build(None, path, builder=builder, **fields)
        return prompt.source, prompt.exact

    assert await of(CHAT, messages=HELLO) == ("local", False)
    probed(builder)
    assert await of(CHAT, messages=HELLO) == ("local", True)
    assert await of(CHAT, messages=HELLO, tool_choice="none") == ("engine", True)
    assert await of(COMPLETIONS, prompt="hello") == ("local", True)
    assert await of(COMPLETIONS, prompt=[5, 6]) == ("client", True)
    assert await of(RESPONSES, input="hello") == ("engine", True)


async def test_what_engines_differ_on_is_never_exact_where_none_can_be_asked(build, info_of, tables):
    builder = prompts_of(info_of(), tables=tables)
    probed(builder)
    assert not (await build(None, CHAT, builder=builder, messages=HELLO, tool_choice="none")).exact
    for field in ("chat_template", "documents", "add_special_tokens"):
        assert await build(None, CHAT, builder=builder, messages=HELLO, **{field: "x"}) is None
        assert await build(None, CHAT, builder=builder, messages=HELLO, **{field: None}) is not None


@pytest.mark.parametrize(
    ("path", "fields", "error", "param"),
    [
        (CHAT, {"messages": []}, ChatError, "messages"),
        (CHAT, {"messages": IMAGE}, ChatError, "messages[0].content[0].type"),
        (COMPLETIONS, {"prompt": [VOCAB]}, PromptTableError, "prompt[0]"),
        (COMPLETIONS, {"prompt": [VOCAB], "prompt_table": "two"}, BadRequest, "prompt_table"),
        (COMPLETIONS, {"prompt": "x", "extra_ids": [0]}, PromptTableError, "extra_ids"),
        (COMPLETIONS, {"prompt_embeds": 5}, PromptTableError, "prompt_embeds"),
        (COMPLETIONS, {"prompt_embeds": "UEsDBA=="}, PromptTableError, "prompt_embeds"),
    ],
)
async def test_a_wrong_request_names_its_field(build, embedded, path, fields, error, param):
    with pytest.raises(error) as caught:
        await build(embedded, path, **fields)
    assert caught.value.param == param


async def test_a_prompt_beyond_the_context_is_refused_where_it_is_known(build, info_of, engine, tables):
    builder = prompts_of(info_of(max_model_len=3), tables=tables, engines=lambda _: [engine])
    for path, field, value in (
        (COMPLETIONS, "prompt", [1] * 4), (CHAT, "messages", HELLO), (RESPONSES, "input", "hello"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match="context is 3 tokens; the prompt has ") as caught:
            await build(None, path, builder=builder, **{field: value})
        assert (caught.value.param, caught.value.code) == (field, "context_length_exceeded")
        assert caught.value.more == {}
    for limit in (4, None):
        prompt = await build(info_of(max_model_len=limit), COMPLETIONS, prompt=[1] * 4)
        assert len(prompt.token_ids) == 4


async def test_without_a_tokenizer_only_token_ids_are_followed(build, info_of, tables, engine):
    builder = prompts_of(info_of(tokenizer=None), tables=tables)
    assert builder.local is None
    assert builder.reason == "no tokenizer is known for this model"
    assert await build(None, CHAT, builder=builder, messages=HELLO) is None
    assert await build(None, COMPLETIONS, builder=builder, prompt="hello") is None
    assert await build(None, COMPLETIONS, builder=builder, prompt=[5]) is not None
    assert builder.decode(array("i", [5])) is None
    assert prompts_of(info_of()).decode(engine.tokenizer.encode("hi", add_special_tokens=False)) == "hi"


async def test_a_tokenizer_that_is_loaded_is_not_used_before_it_is_checked(build, info_of, engine, tables):
    builder = PromptBuilder(info_of(Capability.TOKENIZE), tables=tables, engines=lambda _: [engine])

    async def load(source):
        return engine.tokenizer

    await builder.load("here", load)
    assert (await build(None, CHAT, builder=builder, messages=HELLO)).source == "engine"
    use_unchecked(builder)
    assert (await build(None, CHAT, builder=builder, messages=HELLO)).source == "local"


async def test_the_engine_can_be_asked_instead(build, embedded, engine, tables):
    engines = [engine]
    builder = prompts_of(embedded, tables=tables, engines=lambda _: engines)
    ours = engine.tokenizer.chat(HELLO).token_ids.tolist()
    response = await build(None, RESPONSES, builder=builder, input="hello", salt="s")  # asked in any case
    assert (response.token_ids.tolist(), response.extra_ids, response.salt) == (ours, None, "s")
    builder.ask_engines("to try it")
    engine.alter = lambda path, body, ids: [1, *ids]
    prompt = await build(None, CHAT, builder=builder, messages=HELLO, salt="s")
    assert (prompt.token_ids.tolist(), prompt.salt) == ([1, *ours], "s")
    engines.clear()
    assert await build(None, COMPLETIONS, builder=builder, prompt=[5]) is not None
    assert await build(None, CHAT, builder=builder, messages=HELLO) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "documents": [{"text": "a"}]},
        {"messages": HELLO, "reasoning_effort": "low"},
        {"messages": HELLO, "response_format": {"type": "json_object"}},
        {"prompt": "hello", "add_special_tokens": False},
    ],
)
async def test_what_engines_differ_on_is_asked_of_one(build, info_of, engine, tables, fields):
    """One that renders with our own code does not differ."""
    path = COMPLETIONS if "prompt" in fields else CHAT
    able = frozenset({Capability.TOKENIZE})
    builder = prompts_of(info_of(*able), tables=tables, engines=lambda _: [engine])
    engine.alter = lambda path, body, ids: [599, *ids]
    assert (await build(None, path, builder=builder, **fields)).token_ids[0] == 599
    assert (await build(None, CHAT, builder=builder, messages=HELLO)).token_ids[0] != 599
    assert len(engine.asked) == 1
    own = prompts_of(info_of(*able, renders_alike=True), tables=tables, engines=lambda _: [engine])
    assert (await build(None, path, builder=own, **fields)).token_ids[0] != 599


# --- where the work is done, and which engines are asked ------------------------------------------------


@pytest.mark.parametrize(("size", "inline"), [(10, True), (1_000_000, False)])
async def test_long_work_leaves_the_event_loop(tokenizer_dir, size, inline):
    threads = []

    class Watched(ChatTokenizer):
        def encode(self, text, *, add_special_tokens):
            threads.append(threading.current_thread())
            return super().encode(text, add_special_tokens=add_special_tokens)

    local = LocalTokenizer(Watched.load(str(tokenizer_dir)), vocab_size=None, hidden_size=None)
    threads.clear()  # the search for a cut encodes, too
    body = JsonBody(msgspec.json.encode({"messages": [{"role": "user", "content": "a" * size}]}))
    chat = await local.chat(source := read_prompt(CHAT, body), body)
    assert chat.token_ids == local.tokenizer.chat(source.messages).token_ids
    await local.text(read_prompt(COMPLETIONS, JsonBody(msgspec.json.encode({"prompt": "a" * size}))))
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [inline, True, inline]


ASKED = JsonBody(b'{"prompt": "hello"}')


async def test_engines_are_asked_until_one_answers(engine):
    gone, refusing = (TokenizingEngine(engine.tokenizer) for _ in range(2))
    gone.error, refusing.error = EngineUnavailable("gone"), EngineRejected("no", status=400)
    assert await EngineTokenizer().ask([gone, engine, refusing], COMPLETIONS, ASKED) is not None
    assert await EngineTokenizer().ask([refusing, engine], COMPLETIONS, ASKED) is None
    assert await EngineTokenizer().ask((), COMPLETIONS, ASKED) is None
    assert [len(each.asked) for each in (gone, engine, refusing)] == [1, 1, 1]


async def test_an_engine_that_does_not_answer_in_time_leaves_the_prompt_unknown(engine, monkeypatch):
    async def hang(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr("proxy.prompt.tokenizer.ANSWER_S", 0.01)
    engine.tokenize = engine.render = hang
    assert await EngineTokenizer().ask([engine], COMPLETIONS, ASKED) is None
    assert await EngineTokenizer().render([engine], CHAT, ASKED) is None
