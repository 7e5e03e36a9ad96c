"""Messages in a shape that a chat template keeps, in the forms of chats and of responses."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_adapter import JsonBody
from proxy.core.message_repair import NO_CONTENT, Repair, may_need, repaired

EVERY = frozenset(Repair)
SYSTEMS = {Repair.DEVELOPER_AS_SYSTEM, Repair.SYSTEMS_JOINED, Repair.LATE_SYSTEM_IN_TURN}
IN_TURN = {Repair.SYSTEM_IN_TURN}
TAKES_TOOLS = EVERY - {Repair.SYSTEM_IN_TURN, Repair.CALL_AS_TEXT}
ALTERNATE, LONE, CALLS = {Repair.TURNS_ALTERNATE}, {Repair.RESULT_IN_TURN}, {Repair.CALL_AS_TEXT}
NULLS = {Repair.NULL_AS_EMPTY}


def said(role, content="Hi", **fields):
    return {"role": role, "content": content, **fields}


def called(*ids, content=None):
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return said("assistant", content, tool_calls=calls)


def result(call, text="7"):
    return said("tool", text, tool_call_id=call)


def text(words, kind="text"):
    return {"type": kind, "text": words}


def marked(words, tag="system"):
    return f"<{tag}>\n{words}\n</{tag}>"


USER, ASSISTANT = said("user", NO_CONTENT), said("assistant", NO_CONTENT)
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "7"}
CUSTOM = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "{}"}
GIVEN = {"type": "custom_tool_call_output", "call_id": "1", "output": "7"}
AS_TEXT, LONE_TEXT = marked("f({})", "tool_call"), marked("7", "tool_result")
A_CUSTOM_CALL = said("assistant", None, tool_calls=[{"id": "1", "custom": {"name": "f", "input": "{}"}}])
INPUT_A = [text("A", "input_text")]


def now(fields, repairs):
    """The fields after the repairs, and the repairs that changed some."""
    changes, applied = repaired(fields, repairs)
    return {name: value for name, value in (fields | changes).items() if value is not None}, applied


@pytest.mark.parametrize(
    ("repairs", "messages", "turns"),
    [
        # A late system message joins the turn before it, or the one after it behind an answer, or is one.
        (SYSTEMS, [said("system"), said("user", "A"), said("system", "B"), said("assistant"), said("user")],
         [said("system"), said("user", f"A\n\n{marked('B')}"), said("assistant"), said("user")]),
        (
            SYSTEMS,
            [said("user"), said("assistant"), said("system", "B"), said("system", "C"), said("user", "D")],
            [said("user"), said("assistant"), said("user", f"{marked('B')}\n\n{marked('C')}\n\nD")],
        ),
        (SYSTEMS, [said("user"), said("assistant"), said("system", "B"), said("assistant")],
         [said("user"), said("assistant"), said("user", marked("B")), said("assistant")]),
        (SYSTEMS, [said("user"), said("assistant"), said("system", "B")],
         [said("user"), said("assistant"), said("user", marked("B"))]),
        (SYSTEMS, [said("user"), called("1"), said("system", "B"), result("1")],
         [said("user"), called("1"), result("1", f"{marked('B')}\n\n7")]),
        (SYSTEMS, [said("user"), called(), result("1"), said("system", "B")],
         [said("user"), called(), result("1", f"7\n\n{marked('B')}")]),
        (SYSTEMS, [said("user", [text("A"), IMAGE]), said("system", [text("B"), text("C")])],
         [said("user", [text("A"), IMAGE, text(f"\n\n{marked(f'B{chr(10) * 2}C')}")])]),
        (SYSTEMS, [said("system", "A"), said("developer", "B"), said("user")],
         [said("system", "A\n\nB"), said("user")]),
        # Turns.
        (ALTERNATE, [said("user", "A"), said("user", "B")], [said("user", "A\n\nB")]),
        (ALTERNATE, [said("user", "A"), said("user", [text("B")])],
         [said("user", [text("A"), text("\n\nB")])]),
        (ALTERNATE, [said("user"), said("assistant", "A"), said("assistant", "B")],
         [said("user"), said("assistant", "A\n\nB")]),
        (ALTERNATE, [said("assistant"), said("user")], [USER, said("assistant"), said("user")]),
        (ALTERNATE, [said("system"), said("assistant")], [said("system"), USER, said("assistant")]),
        (ALTERNATE, [said("user"), called("1", content=""), result("1"), said("user", "B")],
         [said("user"), called("1", content=""), result("1"), ASSISTANT, said("user", "B")]),
        (ALTERNATE, [said("user"), said("assistant", "A", reasoning_content="a"),
          said("assistant", "B", reasoning_content="b")],
         [said("user"), said("assistant", "A\n\nB", reasoning_content="a\n\nb")]),
        # Mistral's templates count a text before a call as a turn, and refuse the assistant's next one.
        (TAKES_TOOLS, [said("user"), said("assistant", "I look."), called("c"), result("c")],
         [said("user"), {**called("c"), "content": "I look."}, result("c")]),
        (TAKES_TOOLS, [said("user"), said("assistant", "I look."), called("c", content="Now."), result("c")],
         [said("user"), called("c", content="I look.\n\nNow."), result("c")]),
        (NULLS, [called("1")], [called("1", content="")]),
        # Calls of tools, and their results.
        (LONE, [said("user"), result("9")], [said("user"), said("user", LONE_TEXT)]),
        (LONE, [result("1", [text("7")])], [said("user", LONE_TEXT)]),
        (CALLS, [{"role": "assistant", "tool_calls": called("1")["tool_calls"]}],
         [said("assistant", AS_TEXT)]),
        (CALLS, [called("1", content=[text("A")])], [said("assistant", [text("A"), text(AS_TEXT)])]),
        (CALLS, [A_CUSTOM_CALL], [said("assistant", AS_TEXT)]),
        (
            EVERY,
            [said("user"), called("1", "2", content="A"), result("1"), result("2"), said("user", "B")],
            [said("user"), said("assistant", f"A\n\n{AS_TEXT}\n\n{AS_TEXT}"),
             said("user", f"{LONE_TEXT}\n\n{LONE_TEXT}\n\nB")],
        ),
    ],
)  # fmt: skip
def test_chats(repairs, messages, turns):
    assert now({"messages": messages}, repairs)[0] == {"messages": turns}
    assert repaired({"messages": turns}, repairs) == ({}, ())  # once is enough


@pytest.mark.parametrize(
    ("repairs", "fields", "changed"),
    [
        (IN_TURN, {"instructions": "A", "input": "C"}, {"input": [said("user", f"{marked('A')}\n\nC")]}),
        (IN_TURN, {"input": "C"}, {"input": "C"}),
        (
            SYSTEMS,
            {"instructions": "A",
             "input": [said("developer", [text("B", "input_text")]), said("user", INPUT_A), OUTPUT,
                       said("developer", "D")]},
            {"instructions": "A\n\nB",
             "input": [said("user", INPUT_A), OUTPUT | {"output": f"7\n\n{marked('D')}"}]},
        ),
        (SYSTEMS, {"input": [said("user", INPUT_A), said("developer", "D")]},
         {"input": [said("user", [*INPUT_A, text(f"\n\n{marked('D')}", "input_text")])]}),
        (TAKES_TOOLS, {"input": [{"type": "reasoning"}, said("user"), CALL, OUTPUT, said("user", "B")]},
         {"input": [{"type": "reasoning"}, said("user"), CALL, OUTPUT, ASSISTANT, said("user", "B")]}),
        (TAKES_TOOLS, {"input": [said("user", INPUT_A), said("user", "B")]},
         {"input": [said("user", [*INPUT_A, text("\n\nB", "input_text")])]}),
        *((EVERY, {"input": [said("user"), call, output]},
           {"input": [said("user"), said("assistant", AS_TEXT), said("user", LONE_TEXT)]})
          for call, output in ((CALL, OUTPUT), (CUSTOM, GIVEN))),
    ],
)  # fmt: skip
def test_responses(repairs, fields, changed):
    assert now(fields, repairs)[0] == changed


@pytest.mark.parametrize(
    ("repairs", "fields"),
    [
        (SYSTEMS, {"messages": [said("system"), said("user"), said("assistant"), said("user")]}),
        (SYSTEMS, {"messages": [said("user"), said("system", [IMAGE])]}),
        (SYSTEMS, {"messages": [said("system", [IMAGE]), said("system", [IMAGE]), said("user")]}),
        (TAKES_TOOLS, {"messages": [
            said("system"), said("user"), called("1", "2", content="A"), result("1"), result("2"),
            called("3", content=""), result("3"), said("assistant"), said("user"),
        ]}),
        (TAKES_TOOLS, {"input": [OUTPUT]}),  # its call may stand in a stored response
        (TAKES_TOOLS, {"input": [said("user"), CUSTOM, GIVEN]}),
        (TAKES_TOOLS, {"input": [said("user"), said("assistant", "I look."), CALL]}),
        (NULLS, {"messages": [said("assistant", None), said("user")]}),
        (SYSTEMS | IN_TURN, {"instructions": "A", "messages": [said("user")]}),  # no field of a chat's
        (LONE, {"messages": [called("9", content=""), result("9")]}),
        (LONE, {"messages": [result("1", [IMAGE])]}),
        (TAKES_TOOLS, {"messages": [
            said("user", None), said("user", 5), {"type": "custom"}, said("ipython"), said("user", "A"), None,
        ]}),
        *((CALLS, {"messages": [said("assistant", None, tool_calls=[{"id": "1", "function": odd}, 3])]})
          for odd in (None, 3, "f", [])),
    ],
)  # fmt: skip
def test_what_needs_nothing_or_has_an_odd_form_stays(repairs, fields):
    assert repaired(fields, repairs) == ({}, ())


@pytest.mark.parametrize("odd", [None, 1, "x", [None], [1, "x", {}], [{"role": 5}], [{"role": ["system"]}]])
def test_odd_messages_are_left_to_others(odd):
    repaired({"messages": odd, "input": odd, "instructions": odd}, EVERY)


def test_each_repair_is_named():
    turns = [said("system", "A"), said("developer", "B"), said("user", "C"), called("1"), result("1")]
    fields, applied = now({"messages": [*turns, said("system", "D")]}, EVERY)
    assert applied == (
        Repair.DEVELOPER_AS_SYSTEM, Repair.SYSTEMS_JOINED, Repair.LATE_SYSTEM_IN_TURN, Repair.SYSTEM_IN_TURN,
        Repair.CALL_AS_TEXT, Repair.RESULT_IN_TURN,
    )  # fmt: skip
    assert [turn["role"] for turn in fields["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("repairs", [SYSTEMS, TAKES_TOOLS, EVERY])
def test_the_history_keeps_its_bytes_from_turn_to_turn(repairs):
    """Of 20 turns, with odd messages among them, every request begins as the one before it."""
    turns, before = [said("system", "S"), said("developer", "D"), said("assistant", "?")], ""
    for at in range(20):
        turns += [said("user", f"q{at}"), said("user", "and"), said("system", f"late {at}")]
        if at % 3 == 0:
            turns += [called(f"{at}"), result(f"{at}"), said("developer", "x")]
        fields, _ = now({"messages": turns}, repairs)
        sent = json.dumps(fields["messages"])[:-1]
        assert sent.startswith(before)
        assert [each["role"] for each in fields["messages"]].count("system") <= 1
        before = sent
        turns.append(said("assistant", f"a{at}"))


@pytest.mark.parametrize(
    ("messages", "needs"),
    [
        ([said("system"), said("user")], False),
        ([said("user")], False),
        ([said("user"), said("system")], True),
        ([said("assistant"), said("system"), said("user")], True),
        ([said("system"), said("user"), said("system")], True),
        ([said("developer"), said("user")], True),
    ],
)
def test_a_usual_chat_is_not_even_decoded(messages, needs):
    raw = json.dumps({"messages": messages}).encode()
    assert may_need(JsonBody(raw), SYSTEMS) == needs
    assert may_need(JsonBody(raw), IN_TURN) == (len(messages) > 1)


ITEMS = (
    *(said(role) for role in ("system", "user", "developer", "assistant", "critic")),
    *(called("1"), result("1"), CALL, OUTPUT, said("system", type="message"), {"type": "reasoning"}, 5),
)


@example("messages", [result("1"), said("system"), said("user")], SYSTEMS, {})
@example("input", [OUTPUT, said("system"), said("user")], SYSTEMS, {})
@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["messages", "input"]),
    st.lists(st.sampled_from(ITEMS), max_size=4),
    st.sets(st.sampled_from(Repair), min_size=1),
    st.sampled_from([{}, {"instructions": "S"}]),
)
def test_a_body_that_needs_nothing_stays(name, items, repairs, more):
    """Among others, a system message behind a tool's result with which the list begins."""
    fields = {**more, name: items}
    if not may_need(JsonBody(json.dumps(fields).encode()), repairs):
        assert repaired(fields, repairs) == ({}, ())


@pytest.mark.parametrize(
    ("repairs", "raw"),
    [
        (CALLS, b'"custom_tool_call"'),
        (LONE, b'"custom_tool_call_output"'),
        (NULLS, b'"tool_calls"'),
    ],
)
def test_bodies_without_tools_are_not_decoded(repairs, raw):
    assert not may_need(JsonBody(b'{"messages":[{"role":"user"}]}'), repairs)
    assert may_need(JsonBody(b'{"x":%b}' % raw), repairs)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        (said("user", "x" * 500), "messages"),
        (said("user", [text("x")]), "messages"),
        (said("system", "x" * 500), "messages"),
        (OUTPUT, "input"),
    ],
)
def test_many_items_take_no_quadratic_time(item, name):
    items = [said("user", [text("A")])] * (name == "messages") + [item] * 20_000
    started = time.thread_time()
    now({name: items}, TAKES_TOOLS)
    assert time.thread_time() - started < 5
