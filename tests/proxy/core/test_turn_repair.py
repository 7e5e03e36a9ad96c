"""Turns in an order that a chat template takes, in the forms of three APIs."""

import time

import pytest

from engine_adapter import JsonBody
from proxy.core.message_repair import NO_CONTENT, Repair, may_need, repaired


def said(role, content="Hi", **fields):
    return {"role": role, "content": content, **fields}


def called(*ids, content=None):
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return said("assistant", content, tool_calls=calls)


def result(call, text="7"):
    return said("tool", text, tool_call_id=call)


def text(words):
    return {"type": "text", "text": words}


def now(items, *repairs, name="messages"):
    fields, _ = repaired({name: items}, repairs or TAKES_TOOLS)
    return fields.get(name, items)


TAKES_TOOLS = frozenset(Repair) - {Repair.SYSTEM_IN_TURN, Repair.CALL_AS_TEXT}


USER, ASSISTANT = said("user", NO_CONTENT), said("assistant", NO_CONTENT)


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([said("user", "A"), said("user", "B")], [said("user", "A\n\nB")]),
        ([said("user", "A"), said("user", [text("B")])], [said("user", [text("A"), text("\n\nB")])]),
        (
            [said("user"), said("assistant", "A"), said("assistant", "B")],
            [said("user"), said("assistant", "A\n\nB")],
        ),
        ([said("assistant"), said("user")], [USER, said("assistant"), said("user")]),
        ([said("system"), said("assistant")], [said("system"), USER, said("assistant")]),
        (
            [said("user"), called("1", content=""), result("1"), said("user", "B")],
            [said("user"), called("1", content=""), result("1"), ASSISTANT, said("user", "B")],
        ),
    ],
)  # fmt: skip
def test_turns_alternate(items, turns):
    assert now(items, Repair.TURNS_ALTERNATE) == turns
    assert now(turns, Repair.TURNS_ALTERNATE) is turns


def test_a_usual_talk_of_an_agent_stays():
    talk = [said("system"), said("user"), called("1", "2", content="A"), result("1"), result("2")]
    talk += [called("3", content=""), result("3"), said("assistant"), said("user")]
    assert repaired({"messages": talk}, TAKES_TOOLS) == ({}, ())


def test_the_next_request_of_a_talk_begins_alike():
    talk, before = [], []
    for at in range(20):
        talk += (
            [said("user", f"{at}"), said("user", "and")]
            if at
            else [said("assistant", "?"), said("user", "0")]
        )
        turns = now([*talk])
        assert turns[: len(before)] == before
        before = turns
        talk += [called(f"{at}", content=""), result(f"{at}")] if at % 3 else [said("assistant", f"{at}")]


def test_blocks_of_anthropics():
    use = said("assistant", [{"type": "tool_use", "id": "1", "name": "f", "input": {}}])
    known = {"type": "tool_result", "tool_use_id": "1", "content": "7"}
    alone = known | {"tool_use_id": "9"}
    talk = [said("user"), use, said("user", [known, text("Go on.")])]
    assert now(talk) == [*talk[:2], said("user", [known]), ASSISTANT, said("user", [text("Go on.")])]
    (turn,) = now([said("user", [alone, text("Go on.")])])
    assert turn == said("user", [text("<tool_result>\n7\n</tool_result>"), text("Go on.")])
    (*_, turn) = now([said("user"), use, said("user", [alone, known])], Repair.RESULT_IN_TURN)
    assert [block["type"] for block in turn["content"]] == ["tool_result", "text"]


def test_items_of_responses():
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "7"}
    parts = [{"type": "input_text", "text": "A"}]
    items = [said("user", parts), {"type": "reasoning", "summary": []}, call, output, said("user", "B")]
    assert now(items, name="input") == [*items[:4], ASSISTANT, items[4]]
    assert now([items[0], items[4]], name="input") == [
        said("user", [*parts, {"type": "input_text", "text": "\n\nB"}])
    ]
    # Its call may stand in a stored response.
    assert now([output], name="input") == [output]


def test_a_result_without_its_call_is_text():
    turns = now([said("user"), result("9")], Repair.RESULT_IN_TURN)
    assert turns == [said("user"), said("user", "<tool_result>\n7\n</tool_result>")]
    kept = [called("9", content=""), result("9")]
    assert now(kept, Repair.RESULT_IN_TURN) is kept


def test_calls_are_text_where_the_template_has_no_tools():
    talk = [said("user"), called("1", "2", content="A"), result("1"), result("2", "8"), said("user", "B")]
    fields, repairs = repaired({"messages": talk}, frozenset(Repair))
    call = "<tool_call>\nf({})\n</tool_call>"
    results = "<tool_result>\n7\n</tool_result>\n\n<tool_result>\n8\n</tool_result>\n\nB"
    assert fields["messages"] == [
        said("user"),
        said("assistant", f"A\n\n{call}\n\n{call}"),
        said("user", results),
    ]
    assert repairs == (Repair.CALL_AS_TEXT, Repair.RESULT_IN_TURN, Repair.TURNS_ALTERNATE)
    use = said("assistant", [{"type": "tool_use", "id": "1", "name": "f", "input": {}}])
    known = {"type": "tool_result", "tool_use_id": "1", "content": "7"}
    every = frozenset(Repair)
    assert now([said("user"), use, said("user", [known])], *every) == [
        said("user"),
        said("assistant", [text(call)]),
        said("user", [text("<tool_result>\n7\n</tool_result>")]),
    ]
    asked = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "7"}
    custom = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "{}"}
    given = {"type": "custom_tool_call_output", "call_id": "1", "output": "7"}
    assert now([said("user"), custom, given], *every, name="input") == now(
        [said("user"), asked, output], *every, name="input"
    )
    assert now([said("user"), custom, given], name="input") == [said("user"), custom, given]
    assert now([said("user"), asked, output], *every, name="input") == [
        said("user"),
        said("assistant", call),
        said("user", "<tool_result>\n7\n</tool_result>"),
    ]


def test_a_null_beside_calls_is_empty():
    assert now([called("1")], Repair.NULL_AS_EMPTY) == [called("1", content="")]
    kept = [said("assistant", None), said("user")]
    assert now(kept, Repair.NULL_AS_EMPTY) is kept


def test_other_forms_stay():
    odd = [said("user", None), said("user", 5), {"type": "custom"}, said("ipython"), said("user", "A"), None]
    assert now(odd) is odd


@pytest.mark.parametrize(
    ("repair", "raw"),
    [
        (Repair.CALL_AS_TEXT, b'"custom_tool_call"'),
        (Repair.RESULT_IN_TURN, b'"custom_tool_call_output"'),
        (Repair.RESULT_IN_TURN, b'"tool_result"'),
        (Repair.NULL_AS_EMPTY, b'"tool_calls"'),
    ],
)
def test_bodies_without_tools_are_not_decoded(repair, raw):
    assert not may_need(JsonBody(b'{"messages":[{"role":"user"}]}'), {repair})
    assert may_need(JsonBody(b'{"x":%b}' % raw), {repair})


def test_calls_in_other_forms_are_kept_as_text():
    call = called("1")
    as_text = "<tool_call>\nf({})\n</tool_call>"
    without = {name: value for name, value in call.items() if name != "content"}
    assert now([without], Repair.CALL_AS_TEXT) == [said("assistant", as_text)]
    parts = {**call, "content": [text("A")]}
    assert now([parts], Repair.CALL_AS_TEXT) == [said("assistant", [text("A"), text(as_text)])]
    custom = said("assistant", None, tool_calls=[{"id": "1", "custom": {"name": "f", "input": "{}"}}])
    assert now([custom], Repair.CALL_AS_TEXT) == [said("assistant", as_text)]


@pytest.mark.parametrize("function", [None, 3, "f", []])
def test_calls_of_an_unknown_form_stay(function):
    odd = [said("assistant", None, tool_calls=[{"id": "1", "function": function}, 3])]
    assert now(odd, Repair.CALL_AS_TEXT) is odd


def test_lone_results_may_be_parts():
    marked = "<tool_result>\n7\n</tool_result>"
    assert now([result("1", [text("7")])], Repair.RESULT_IN_TURN) == [said("user", marked)]
    block = {"type": "tool_result", "tool_use_id": "1", "content": [text("7")]}
    assert now([said("user", [block])], Repair.RESULT_IN_TURN) == [said("user", [text(marked)])]
    image = [result("1", [{"type": "image_url", "image_url": {"url": "data:"}}])]
    assert now(image, Repair.RESULT_IN_TURN) is image


@pytest.mark.parametrize(
    ("item", "name"),
    [
        (said("user", "x" * 500), "messages"),
        (said("user", [text("x")]), "messages"),
        (said("system", "x" * 500), "messages"),
        ({"type": "function_call_output", "call_id": "1", "output": ""}, "input"),
    ],
)
def test_many_items_take_no_quadratic_time(item, name):
    items = [said("user", [text("A")] if name == "messages" else "A"), *[item] * 20_000]
    started = time.thread_time()
    now(items[name == "input" :], name=name)
    assert time.thread_time() - started < 5


def test_turns_that_become_one_keep_all_their_reasoning():
    answers = [said("assistant", "A", reasoning_content="a"), said("assistant", "B", reasoning_content="b")]
    one = said("assistant", "A\n\nB", reasoning_content="a\n\nb")
    assert now([said("user"), *answers], Repair.TURNS_ALTERNATE) == [said("user"), one]


def test_what_the_assistant_says_before_its_call_is_one_message_with_it():
    """Mistral's templates count the text as a turn, and refuse the assistant's next one."""
    told = said("assistant", "I look.", reasoning_content="Hm.")
    rest = [result("c"), said("assistant", "7."), said("user", "Thanks")]
    both = {**told, "tool_calls": called("c")["tool_calls"]}
    for call in (called("c"), called("c", content="")):
        assert now([said("user"), told, call, *rest]) == [said("user"), both, *rest]
    more = {**both, "content": "I look.\n\nNow."}
    assert now([said("user"), told, called("c", content="Now."), *rest]) == [said("user"), more, *rest]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    blocks = [said("user"), said("assistant", "I look."), said("assistant", [use])]
    assert now(blocks) == [said("user"), said("assistant", [text("I look."), use])]
    items = [
        said("user"),
        said("assistant", "I look."),
        {"type": "function_call", "call_id": "c", "name": "f"},
    ]
    assert now(items, name="input") == items
