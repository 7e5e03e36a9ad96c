"""Repairs of messages, in the forms of three APIs."""

import json

import pytest

from engine_adapter import JsonBody
from proxy.core.message_repair import Repair, may_need, repaired

ALL = {Repair.DEVELOPER_AS_SYSTEM, Repair.SYSTEMS_JOINED, Repair.LATE_SYSTEM_IN_TURN}


def said(role, content="Hi"):
    return {"role": role, "content": content}


def now(fields, repairs):
    """The fields after the repairs, and their names."""
    changes, applied = repaired(fields, repairs)
    merged = {name: value for name, value in (fields | changes).items() if value is not None}
    return merged, [str(each) for each in applied]


def test_a_chat_that_needs_nothing_stays():
    fields = {"messages": [said("system"), said("user"), said("assistant"), said("user")]}
    assert repaired(fields, ALL) == ({}, ())


def test_a_late_system_message_joins_the_turn_before_it():
    turns = [said("system"), said("user", "A"), said("system", "B"), said("assistant"), said("user")]
    fields, applied = now({"messages": turns}, ALL)
    assert applied == ["late_system_in_turn"]
    assert fields["messages"] == [turns[0], said("user", "A\n\n<system>\nB\n</system>"), *turns[3:]]


def test_or_the_one_after_it_behind_an_answer():
    turns = [said("user"), said("assistant"), said("system", "B"), said("system", "C"), said("user", "D")]
    fields, _ = now({"messages": turns}, ALL)
    assert fields["messages"][2:] == [said("user", "<system>\nB\n</system>\n\n<system>\nC\n</system>\n\nD")]


def test_or_a_turn_of_its_own():
    turns = [said("user"), said("assistant"), said("system", "B"), said("assistant")]
    fields, _ = now({"messages": turns}, ALL)
    assert fields["messages"] == [*turns[:2], said("user", "<system>\nB\n</system>"), turns[3]]
    fields, _ = now({"messages": turns[:3]}, ALL)
    assert fields["messages"][2:] == [said("user", "<system>\nB\n</system>")]


def test_a_tools_result_takes_it_too():
    call = {"role": "assistant", "content": None, "tool_calls": []}
    turns = [said("user"), call, {"role": "tool", "tool_call_id": "1", "content": "7"}, said("system", "B")]
    fields, _ = now({"messages": turns}, ALL)
    assert fields["messages"][2]["content"] == "7\n\n<system>\nB\n</system>"
    assert len(fields["messages"]) == 3


def test_parts_stay_parts():
    parts = [{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {"url": "x"}}]
    late = said("system", [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}])
    fields, _ = now({"messages": [said("user", parts), late]}, ALL)
    assert fields["messages"] == [
        said("user", [*parts, {"type": "text", "text": "\n\n<system>\nB\n\nC\n</system>"}])
    ]


def test_a_system_message_with_an_image_stays():
    odd = said("system", [{"type": "image_url", "image_url": {"url": "x"}}])
    assert now({"messages": [said("user"), odd]}, ALL)[0]["messages"] == [said("user"), odd]
    assert repaired({"messages": [odd, odd, said("user")]}, ALL) == ({}, ())


def test_leading_messages_become_one_and_developers_are_systems():
    turns = [said("system", "A"), said("developer", "B"), said("user")]
    fields, applied = now({"messages": turns}, ALL)
    assert applied == ["developer_as_system", "systems_joined"]
    assert fields["messages"] == [said("system", "A\n\nB"), turns[2]]


def test_anthropics_system_prompt_takes_leading_ones():
    blocks = [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]
    turns = [said("system", "B"), said("user", [{"type": "tool_result", "content": "7"}])]
    fields, _ = now({"system": blocks, "messages": turns}, ALL)
    assert fields == {"system": [*blocks, {"type": "text", "text": "\n\nB"}], "messages": turns[1:]}
    fields, _ = now({"system": "A", "messages": turns}, ALL)
    assert fields == {"system": "A\n\nB", "messages": turns[1:]}


def test_responses_have_parts_of_their_own():
    items = [
        said("developer", [{"type": "input_text", "text": "B"}]),
        said("user", [{"type": "input_text", "text": "C"}]),
        {"type": "function_call_output", "call_id": "1", "output": "7"},
        said("developer", "D"),
    ]
    fields, _ = now({"instructions": "A", "input": items}, ALL)
    assert fields["instructions"] == "A\n\nB"
    assert fields["input"][1] == {**items[2], "output": "7\n\n<system>\nD\n</system>"}
    fields, _ = now({"input": [items[1], said("developer", "D")]}, ALL)
    assert fields["input"][0]["content"][-1] == {"type": "input_text", "text": "\n\n<system>\nD\n</system>"}


def test_without_system_messages_all_of_them_are_in_turns():
    turns = [said("system", "A"), said("developer", "B"), said("user", "C"), said("system", "D")]
    fields, applied = now({"messages": turns}, frozenset(Repair))
    assert "system_in_turn" in applied
    (turn,) = fields["messages"]
    assert turn["role"] == "user"
    order = [turn["content"].index(text) for text in ("A", "B", "C", "<system>\nD")]
    assert order == sorted(order)
    fields, _ = now({"system": "A", "messages": [said("user", "C")]}, {Repair.SYSTEM_IN_TURN})
    assert fields == {"messages": [said("user", "<system>\nA\n</system>\n\nC")]}
    fields, _ = now({"instructions": "A", "input": "C"}, {Repair.SYSTEM_IN_TURN})
    assert fields == {"input": [said("user", "<system>\nA\n</system>\n\nC")]}
    assert repaired({"input": "C"}, {Repair.SYSTEM_IN_TURN}) == ({}, ())


def test_results_of_tools_stay_in_front_of_texts():
    result = {"type": "tool_result", "tool_use_id": "1", "content": "7"}
    turns = [said("assistant"), said("system", "B"), said("user", [result])]
    fields, _ = now({"messages": turns}, ALL | {Repair.SYSTEM_IN_TURN})
    assert fields["messages"][-1]["content"][0] == result


@pytest.mark.parametrize("repairs", [ALL, frozenset(Repair)])
def test_the_history_keeps_its_bytes_from_turn_to_turn(repairs):
    """Of 20 turns, with odd messages behind each of them, every request begins as the one before it."""
    turns, before = [said("system", "S"), said("developer", "D")], ""
    for at in range(20):
        turns += [said("user", f"q{at}"), said("system", f"late {at}")]
        if at % 3 == 0:
            turns += [{"role": "assistant", "tool_calls": [{"id": str(at)}]}]
            turns += [{"role": "tool", "tool_call_id": str(at), "content": "7"}, said("developer", "x")]
        fields, _ = now({"messages": turns}, repairs)
        text = json.dumps(fields["messages"])[:-1]
        assert text.startswith(before)
        assert [each["role"] for each in fields["messages"]].count("system") <= 1
        before = text
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
    assert may_need(JsonBody(raw), ALL) == needs
    assert may_need(JsonBody(raw), {Repair.SYSTEM_IN_TURN}) == (len(messages) > 1)


@pytest.mark.parametrize("odd", [None, 1, "x", [None], [1, "x", {}], [{"role": 5}], [{"role": ["system"]}]])
def test_odd_messages_are_left_to_others(odd):
    repaired({"messages": odd, "input": odd, "system": odd, "instructions": odd}, frozenset(Repair))
