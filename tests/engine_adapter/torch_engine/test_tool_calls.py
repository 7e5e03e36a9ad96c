"""Tool calls in text that arrives in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.torch_engine.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    ListedCalls,
    MarkedCalls,
    NamedCall,
    format_of,
)


def read(reader, text, step=1000):
    """Text, calls and finish reason of an answer that arrives in pieces of `step` characters."""
    found = [reader.push(text[at : at + step]) for at in range(0, len(text), step)]
    found.append(reader.finish())
    calls: list[list[str]] = []
    for part in (part for each in found for part in each.calls):
        if part.call_id is not None:
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return "".join(each.text for each in found), [tuple(call) for call in calls], reader.ends_as


STEPS = [1, 3, 1000]
CASES = [
    (
        HERMES,
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "a}\\"b"}}\n</tool_call>\n'
            '<tool_call>{"name":"g","arguments":{}}</tool_call>\n'
        ),
        "Let me see.",
        [("f", '{"x": "a}\\"b"}'), ("g", "{}")],
    ),
    (HERMES, '<tool_call>{"name":"f"}</tool_call> Done.', " Done.", [("f", "{}")]),
    (HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a":1}')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}]', "", [("f", '{"x": [1]}')]),
    (
        MISTRAL,
        'hi [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        "hi",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (MISTRAL, '[TOOL_CALLS]get-x{"a":1}', "", [("get-x", '{"a":1}')]),
    (LLAMA, '\n{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
]
NO_CALLS = [
    (HERMES, 'a < b <tool_calx> {"x"} \n'),
    (HERMES, "<tool_call>nonsense</tool_call> more"),
    (HERMES, '<tool_call>{"name": 5}</tool_call> more'),
    (HERMES, "it ends with <tool_"),
    (MISTRAL, '[TOOL_CALLS]f{"a":}'),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 500),
    (LLAMA, '{"temperature": 5}'),
    (LLAMA, 'text {"name":"f"}'),
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("format_", "text", "shown", "calls"), [*CASES, *((*each, each[1], []) for each in NO_CALLS)]
)
def test_calls_are_found_however_they_arrive_and_what_is_none_stays_text(format_, text, shown, calls, step):
    ends_as = "tool_calls" if calls else None
    assert read(MarkedCalls(format_), text, step) == (shown, calls, ends_as)


BROKEN = '<tool_call>{"x":5}'
PIECES = [
    *(HERMES.opens, HERMES.closes, MISTRAL.opens, LLAMA.opens, "<tool_", "</tool", "[TOOL", "<|py", "[ARGS]"),
    *('{"name":"f"}', '{"name":"f","arguments":{"a":"}"}}', '{"name":"other"}', '{"name":5}', '{"name"'),
    *("f", "g[CALL_ID]x", "{}", "{", "}", '"', "\\", "[", "]", ",", " ", "\n", "no call", "x" * 130),
]


@pytest.mark.parametrize("format_", [HERMES, MISTRAL, LLAMA])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), step=st.integers(1, 40))
def test_how_a_text_arrives_does_not_matter(format_, pieces, step):
    text = "".join(pieces)
    in_pieces, whole = (read(MarkedCalls(format_, names={"f"}), text, each) for each in (step, 10**6))
    assert in_pieces == whole


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("format_", "text", "shown", "calls"),
    [
        (HERMES, '<tool_call>no {"name":"f"} <tool_call>{"name":"f"}', '<tool_call>no {"name":"f"}', "f"),
        (HERMES, '<tool_call>{"x":5}</tool_call> <tool_call>{"name":"f"}', f"{BROKEN}</tool_call>", "f"),
        (HERMES, '<tool_call>{"name":"f"}<tool_call>{"name":"g"}</tool_call>', "", "fg"),
        (HERMES, '<tool_call>{"name":"f"}</tool_<tool_call>{"name":"g"}', "</tool_", "fg"),
        (MISTRAL, "[TOOL_CALLS]f{} and [TOOL_CALLS]g{}", " and", "fg"),
        (LLAMA, ' {"a":1} <|python_tag|>{"name":"f"}', ' {"a":1}', "f"),
    ],
)  # fmt: skip
def test_a_call_after_broken_markup_is_found(format_, text, shown, calls, step):
    found = read(MarkedCalls(format_), text, step)
    assert (found[0], "".join(name for name, _ in found[1])) == (shown, calls)


def test_text_is_given_out_at_once_where_no_call_can_begin():
    reader = MarkedCalls(HERMES)
    assert [reader.push(text).text for text in ("hello", " <", "b")] == ["hello", "", " <b"]


def test_ids_are_unique_and_short_where_templates_insist():
    first, second = (MarkedCalls(MISTRAL).push('[TOOL_CALLS]f{"a":1}').calls[0].call_id for _ in range(2))
    assert first != second
    assert (len(first), first.isalnum()) == (9, True)


def test_a_named_call_streams_its_arguments():
    reader = NamedCall("f")
    assert reader.push("") == ("", ())
    assert [part.arguments for part in reader.push('{"a"').calls] == ['{"a"']
    assert reader.push(":1}").calls[0].call_id is None
    assert reader.finish() == ("", ())
    assert reader.ends_as == "stop"


@pytest.mark.parametrize("step", STEPS)
def test_a_list_of_calls(step):
    text = '[{"name":"f","parameters":{"a":1}},\n {"name":"g","parameters":{}}]'
    assert read(ListedCalls(), text, step) == ("", [("f", '{"a":1}'), ("g", "{}")], "tool_calls")
    broken = '[{"name":"f","parameters":{}}, no, {"name":"g","parameters":{}}]'
    assert read(ListedCalls(), broken, step)[1:] == ([("f", "{}")], "tool_calls")


@pytest.mark.parametrize("cut", ["", "[ ", '[ {"name', '[{"name":"f","parameters":{"a":'])
def test_a_list_that_is_cut_off_is_no_text(cut):
    assert read(ListedCalls(), cut, 3) == ("", [], None)


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("<tool_call>\n<function=x>", None),
        ("<tool_call>{name}<arg_key>", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MISTRAL),
        ("<|python_tag|>", LLAMA),
        ('Respond in the format {"name": function name, "parameters": x}', LLAMA),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_the_chat_template(template, format_):
    assert format_of(template) is format_


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (LLAMA, '{"name": "Ada", "parameters": {"born": 1815}}'),
        (HERMES, 'Hm. <tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS]other{"a": 1}'),
    ],
)
def test_a_call_of_a_function_that_was_not_offered_is_text(format_, text, step):
    assert read(MarkedCalls(format_, names={"f"}), text, step) == (text, [], None)
    assert read(MarkedCalls(format_, names={"other", "Ada"}), text, step)[2] == "tool_calls"
