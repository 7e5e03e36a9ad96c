"""Structures that llguidance keeps: what may come next, and what is refused."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import suppress

import numpy as np
import pytest

from engine_adapter.prompt.chat import ChatTokenizer
from engine_adapter.torch_engine.grammar import (
    MAX_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_WAITING,
    Grammars,
    Structure,
    structure_of,
    tool_use_of,
)
from engine_adapter.torch_engine.protocol import ApiError, CompletionRequest
from engine_adapter.torch_engine.requests import RequestRefused
from engine_adapter.torch_engine.tool_calls import HERMES, MISTRAL, ListedCalls, MarkedCalls

VOCAB, END = 4096, 2
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}


@pytest.fixture
def grammars(tokenizer):
    grammars = Grammars(tokenizer, vocab_size=VOCAB, ends=frozenset({END}))
    yield grammars
    grammars.close()


def allowed(state, vocab=VOCAB):
    words = np.zeros(-(-vocab // 32), dtype="<i4")
    state.allow(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little")).tolist()


def any_answer(grammar, tokenizer, seed=0, most=2000):
    """A random answer; its end token is left out."""
    chance = random.Random(seed)  # noqa: S311 - a test
    state, ids = grammar.begin([]), []
    while len(ids) < most:
        token = chance.choice(allowed(state))
        state.accept(token)
        if token == END:
            return tokenizer.decode(ids)
        ids.append(token)
    pytest.fail("no end")


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "(ab|c){2}"}, {"abab", "abc", "cab", "cc"}),
        ({"structured_outputs": {"regex": "ab|c"}}, {"ab", "c"}),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, {"a", "b"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"guided_grammar": 'start: "a" | "b"'}, {"a", "b"}),
    ],
)
async def test_other_structures(grammars, tokenizer, fields, answers):
    grammar = await grammars.compile(structure_of(CompletionRequest(**fields)))
    assert {any_answer(grammar, tokenizer, seed) for seed in range(20)} <= answers


async def test_an_answer_goes_on_where_it_was(grammars, tokenizer):
    grammar = await grammars.compile(structure_of(CompletionRequest(guided_regex="abc")))
    state = grammar.begin(tokenizer.encode("ab", add_special_tokens=False))
    assert [tokenizer.decode([token]) for token in allowed(state)] == ["c"]
    state.accept(tokenizer.encode("c", add_special_tokens=False)[0])
    assert allowed(state) == [END]
    state.accept(END)
    state.accept(END)  # after the end, nothing is wrong
    with pytest.raises(RequestRefused):
        grammar.begin(tokenizer.encode("x", add_special_tokens=False))


async def test_strict_tools_bind_calls_and_leave_text_free(grammars, tokenizer):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": POINT}}
    use = tool_use_of([tool], "auto", parallel=None, format_=HERMES)
    grammar = await grammars.compile(use.structure)

    def after(text):
        ids = allowed(grammar.begin(tokenizer.encode(text, add_special_tokens=False)))
        return {tokenizer.decode([token]) for token in ids if token != END}, END in ids

    texts, may_end = after("Hello")
    assert may_end
    assert len(texts) > 300
    texts, may_end = after('Hello <tool_call>\n{"name": "f", "arguments": {"x": 1, "kind": "')
    assert not may_end
    assert texts <= {"a", "b", 'a"', 'b"', 'a",', 'b",'}


async def test_marks_that_are_tokens_of_their_own(tokenizer_dir):
    tokenizer = ChatTokenizer.load(str(tokenizer_dir))
    tokenizer.transformers.add_tokens(["<tool_call>", "</tool_call>"])
    opens = tokenizer.transformers.convert_tokens_to_ids("<tool_call>")
    vocab = max(len(tokenizer.transformers), VOCAB)
    grammars = Grammars(tokenizer, vocab_size=vocab, ends=frozenset({END}))
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": POINT}}
    use = tool_use_of([tool], "auto", parallel=None, format_=HERMES)
    grammar = await grammars.compile(use.structure)
    assert opens in allowed(grammar.begin([]), vocab)
    assert END not in allowed(grammar.begin([opens]), vocab)
    grammars.close()


@pytest.mark.parametrize(
    "structure",
    [
        Structure("json", '{"type": "string", "pattern": "("}', "p"),
        Structure("json", "{", "p"),
        Structure("json", '{"$ref": "http://127.0.0.1:9/other"}', "p"),
        Structure("regex", "(", "p"),
        Structure("grammar", "start: start2", "p"),
        Structure("json", '{"a":' * 5000 + "1" + "}" * 5000, "p"),
    ],
)
async def test_a_structure_that_is_wrong_is_refused(grammars, structure):
    with pytest.raises(ApiError) as caught:
        await grammars.compile(structure)
    assert (caught.value.status, caught.value.param) == (400, "p")
    assert "\n" not in str(caught.value)


HOSTILE = {
    "large counts": {"type": "array", "minItems": 10**9, "items": {"type": "array", "maxItems": 10**9}},
    "ambiguous": {"type": "string", "pattern": "^(a|b|ab)*c{1,500}(a?){200}a{200}$"},
    "anyOf": {
        "anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(900)]
    },
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_structure_is_refused_or_served_but_never_hangs(grammars, tokenizer, schema):
    with suppress(ApiError, RequestRefused, pytest.fail.Exception):  # the last: no end after 200 tokens
        grammar = await grammars.compile(Structure("json", json.dumps(schema), "response_format"))
        any_answer(grammar, tokenizer, most=200)
    grammar = await grammars.compile(structure_of(CompletionRequest(guided_regex="ab")))
    assert any_answer(grammar, tokenizer) == "ab"


async def test_a_salt_does_not_tell_which_structures_another_one_uses(grammars):
    structure = structure_of(CompletionRequest(guided_regex="x{5}"))
    own = await grammars.compile(structure, "a")
    assert await grammars.compile(structure, "a") is own
    assert await grammars.compile(structure, "b") is not own
    assert await grammars.compile(structure) is not own


async def test_few_structures_may_wait(grammars):
    asked = [
        grammars.compile(structure_of(CompletionRequest(guided_regex=f"b{{{n}}}")))
        for n in range(MAX_WAITING + 1)
    ]
    *served, last = await asyncio.gather(*asked, return_exceptions=True)
    assert not any(isinstance(each, Exception) for each in served)
    assert last.status == 503


async def test_without_llguidance_one_sentence_says_so(grammars, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars.load()
    with pytest.raises(ApiError, match="llguidance, which is not installed") as caught:
        await grammars.compile(structure_of(CompletionRequest(guided_regex="a")))
    assert caught.value.status == 501


async def test_a_model_without_an_end_is_refused(tokenizer):
    grammars = Grammars(tokenizer, vocab_size=VOCAB, ends=frozenset())
    with pytest.raises(ApiError, match="no end token"):
        await grammars.compile(structure_of(CompletionRequest(guided_regex="a")))
    grammars.close()


BOMB = "((a{99}){99}){99}"


@pytest.mark.parametrize("pattern", [BOMB, "(a{999}){99}"])
async def test_a_pattern_that_is_too_complex_is_refused_before_it_runs(grammars, pattern):
    """Such a pattern compiles: llguidance builds it when the first masks are computed."""
    for _ in range(2):  # it is not kept
        with pytest.raises(ApiError, match="guided_regex cannot be used: it is too complex; use") as caught:
            await grammars.compile(Structure("regex", pattern, "guided_regex"))
        assert caught.value.status == 400


async def test_a_pattern_that_becomes_too_complex_is_refused(grammars, tokenizer):
    """llguidance meets the repeats only after the letters before them."""
    grammar = await grammars.compile(Structure("regex", "[a-z]{40}" + BOMB, "guided_regex"))
    with pytest.raises(RequestRefused, match="guided_regex cannot be followed: it is too complex; use fewer"):
        any_answer(grammar, tokenizer)


async def test_a_structure_takes_a_share_of_the_steps(grammars, monkeypatch):
    """Its CPU time is measured: whatever costs so much, it is not the others' time."""
    now = iter(range(100))
    monkeypatch.setattr("engine_adapter.torch_engine.grammar.time.thread_time", lambda: next(now) * 0.1)
    state = (await grammars.compile(structure_of(CompletionRequest(guided_regex="a{9}")))).begin([])
    for _ in range(5):
        allowed(state)
    with pytest.raises(RequestRefused, match="too complex"):
        allowed(state)


def tool_with_definition(name, kind, key, field="at"):
    point = {"type": "object", "properties": {field: {"$ref": f"#/{key}/point"}}, "required": [field]}
    return {
        "function": {"name": name, "strict": True, "parameters": {key: {"point": {"type": kind}}, **point}}
    }


@pytest.mark.parametrize(("choice", "key"), [("auto", "$defs"), ("required", "definitions")])
async def test_definitions_of_the_same_name_stay_apart(grammars, tokenizer, key, choice):
    tools = [tool_with_definition("f", "integer", key), tool_with_definition("g", "boolean", key)]
    grammar = await grammars.compile(tool_use_of(tools, choice, parallel=None, format_=HERMES).structure)
    begins, field = ("<tool_call>", "arguments") if choice == "auto" else ("[", "parameters")

    def follows(name, text):
        answered = f'{begins}{{"name": "{name}", "{field}": {{"at": {text}'
        grammar.begin(tokenizer.encode(answered, add_special_tokens=False))

    follows("f", "12")
    follows("g", "true")
    for name, text in (("f", "true"), ("g", "12")):
        with pytest.raises(RequestRefused):
            follows(name, text)


@pytest.mark.parametrize("field", ["default", "const", "$ref"])
async def test_fields_may_have_the_names_of_keywords(grammars, tokenizer, field):
    tools = [tool_with_definition("f", "integer", "$defs", field)]
    grammar = await grammars.compile(tool_use_of(tools, "required", parallel=None, format_=None).structure)
    begin = f'[{{"name": "f", "parameters": {{"{field}": '
    grammar.begin(tokenizer.encode(begin + "12", add_special_tokens=False))
    with pytest.raises(RequestRefused):
        grammar.begin(tokenizer.encode(begin + "true", add_special_tokens=False))


async def test_references_to_a_whole_schema_stay_within_its_function(grammars, tokenizer):
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}, "word": {"const": {"$ref": "#"}}}}
    tools = [{"function": {"name": "f", "parameters": tree | {"additionalProperties": False}}}]
    grammar = await grammars.compile(tool_use_of(tools, "required", parallel=None, format_=None).structure)
    begin = '[{"name": "f", "parameters": {"child": {'
    grammar.begin(tokenizer.encode(begin + '"child": {"word": {"$ref": "#"}', add_special_tokens=False))
    with pytest.raises(RequestRefused):
        grammar.begin(tokenizer.encode(begin + '"name"', add_special_tokens=False))


# --- the structure that a request asks for --------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOLS = [{"function": {"name": "f", "parameters": SCHEMA}}, {"function": {"name": "g"}}]
STRICT = [{"function": {"name": "f", "strict": True, "parameters": SCHEMA}}, TOOLS[1]]


def use(tools=TOOLS, choice=None, parallel=None, format_=HERMES):
    return tool_use_of(tools, choice, parallel=parallel, format_=format_)


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}, "response_format"),
        ({"response_format": FORMAT}, "json", SCHEMA, "response_format"),
        ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA, "guided_json"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA, "structured_outputs.json"),
        ({"guided_json_object": True}, "json", {"type": "object"}, "guided_json_object"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_fallback": True, "structural_tag": None}},
            *("json", SCHEMA, "structured_outputs.json"),
        ),
    ],
)
def test_structures_of_json(fields, kind, text, param):
    found = structure_of(CompletionRequest(**fields))
    assert (found.kind, json.loads(found.text), found.param) == (kind, text, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_schema": SCHEMA}}, "structured_outputs.json_schema"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a" * (MAX_BYTES + 1)}, "guided_regex"),
        ({"guided_grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_grammar"),
    ],
)
def test_what_cannot_be_asked_for_is_named(fields, param):
    with pytest.raises(ApiError) as caught:
        structure_of(CompletionRequest(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_decides(choice):
    found = use(choice=choice)
    assert found.structure is None
    assert isinstance(found.reader(), MarkedCalls)
    assert use(choice=choice, format_=None).reader is None
    assert use(STRICT, choice).structure is not None
    assert use(STRICT, choice, format_=MISTRAL).structure is None  # its calls have no mark at the end


@pytest.mark.parametrize(("parallel", "most"), [(None, None), (True, None), (False, 1)])
def test_a_call_is_required(parallel, most):
    found = use(choice="required", parallel=parallel)
    assert json.loads(found.structure.text).get("maxItems") == most
    assert isinstance(found.reader(), ListedCalls)


def test_a_tool_that_is_nested_too_deeply():
    """The body can be read to 1,000 levels. Python's limit of calls is reached before."""
    deep: dict = {}
    for _ in range(5000):
        deep = {"properties": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(ApiError, match="tools is nested too deeply") as refused:
        use(tools, "required")
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}),
        (TOOLS, "sometimes"),
        (TOOLS, {"type": "allowed_tools"}),
    ],
)
def test_a_choice_that_cannot_be_kept(tools, choice):
    with pytest.raises(ApiError) as caught:
        use(tools, choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"function": {}}, {"function": {"name": 1}}])
def test_a_tool_without_a_named_function(tool):
    with pytest.raises(ApiError, match="must be an object with a name") as caught:
        use(tools=[*TOOLS, tool], choice="auto")
    assert caught.value.param == f"tools[{len(TOOLS)}].function"
