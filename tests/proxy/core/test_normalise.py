"""Each rule changes only what its name says."""

import json
from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.normalise import HEAD, Rule, normalised

CHOSEN = tuple(rule for rule in Rule if rule is not Rule.BILLING_LINE)
MOVING = (Rule.VOLATILE_LAST, Rule.PATHS)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def ask(text, *more):
    return {"messages": [system(text), user("Hi"), *more]}


def changed(fields, *rules):
    before = deepcopy(fields)
    changes, applied = normalised(fields, rules)
    assert fields == before
    assert bool(changes) == bool(applied)
    return {**fields, **changes}


@pytest.mark.parametrize("number", ["a5145", "00000"])
@pytest.mark.parametrize(
    "write",
    [
        lambda line: {"system": [{"type": "text", "text": line}, {"type": "text", "text": "You are"}]},
        lambda line: {"system": f"{line}\nYou are"},
        lambda line: {"messages": [system(f"{line}You are")]},
    ],
)
def test_the_billing_line_is_dropped(write, number):
    line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={number};"
    made = changed(write(line), Rule.BILLING_LINE)
    assert "cch" not in json.dumps(made)
    assert changed(made, Rule.BILLING_LINE) == made
    assert changed({"system": "Mind the " + line}, Rule.BILLING_LINE) == {"system": "Mind the " + line}


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("It is 2026-11-25T23:05:44.123Z.", "It is 2026-11-25."),
        ("It is 2026-11-25 23:05 UTC, say", "It is 2026-11-25, say"),
        ("Now: 2026-11-25T23:05:44+01:00\nBe brief.", "Now: 2026-11-25\nBe brief."),
        ("Wed, 25 Nov 2026 23:05:44 GMT", "Wed, 25 Nov 2026"),
        ("Wednesday, November 25, 2026, 11:05 PM", "Wednesday, November 25, 2026"),
    ],
)
def test_a_date_with_a_time_is_cut_to_the_day(text, day):
    assert changed(ask(text), Rule.DATE_TO_DAY) == ask(day)
    assert changed({"instructions": text}, Rule.DATE_TO_DAY) == {"instructions": day}


@pytest.mark.parametrize("text", ["2026-11-25", "at 23:05:44", "12026-11-25T23:05", "10.1.2026-11:22"])
def test_what_is_no_date_with_a_time_stays(text):
    assert changed(ask(text), Rule.DATE_TO_DAY) == ask(text)


def test_dates_of_the_conversation_stay():
    said = {"messages": [user("2026-11-25T23:05:44Z"), system("2026-11-25T23:05:44Z")]}
    assert changed(said, Rule.DATE_TO_DAY) == said


def test_tools_are_sorted_by_name():
    chats = [{"type": "function", "function": {"name": name}} for name in "ba"]
    assert changed({"tools": chats}, Rule.TOOLS_SORTED) == {"tools": chats[::-1]}
    others = [{"name": "b"}, {"name": "a"}, {"type": "web_search"}]
    assert changed({"tools": others}, Rule.TOOLS_SORTED) == {"tools": [others[2], others[1], others[0]]}


@pytest.mark.parametrize(
    "line",
    [
        "Current time: 23:05",
        "- Today's date is Wednesday",
        "Date: 25.11.2026",
        "The report of 2026-11-25T23:05",
        "Context: 40,324 of 71,000 tokens used",
        "Current branch: main",
    ],
)
def test_a_volatile_line_moves_to_the_end(line):
    fields = ask(
        f"You are brief.\n{line}\nYou know tides.", {"role": "assistant", "content": "4 m"}, user("And?")
    )
    made = changed(fields, Rule.VOLATILE_LAST)
    assert made["messages"][0] == system("You are brief.\nYou know tides.")
    assert made["messages"][1:3] == fields["messages"][1:3]
    assert made["messages"][3] == user(f"And?\n\n{line}")


@pytest.mark.parametrize(
    "line", ["Working directory: /home/u/w1", "  - cwd: C:\\work", "Primary working directory: /w/a"]
)
def test_the_line_with_the_directory_moves_to_the_end(line):
    made = changed(ask(f"You are brief.\n{line}"), Rule.PATHS)
    assert made["messages"] == [system("You are brief.\n"), user(f"Hi\n\n{line}")]
    assert changed(ask(f"You are brief.\n{line}"), Rule.VOLATILE_LAST) == ask(f"You are brief.\n{line}")


def test_rules_look_at_the_heads_of_lines():
    """One call of a pattern keeps the interpreter's lock."""
    filler = "x" * (HEAD - 22) + " "
    for time in ("2026-11-25 23:05:44", "2026-11-25 23:05"):
        for cut in range(24):
            line = filler[cut:] + time
            made = changed(ask(line), Rule.DATE_TO_DAY)["messages"][0]["content"]
            assert made == filler[cut:] + "2026-11-25"
            assert changed(ask("y" * HEAD + line), Rule.DATE_TO_DAY) == ask("y" * HEAD + line)
    for cut in range(1, 40):  # a time that the head cuts stays whole
        line = "x" * (HEAD - cut) + " 2026-11-25 23:05:44 and more"
        made = changed(ask(line), Rule.DATE_TO_DAY)["messages"][0]["content"]
        assert made in (line, line.replace(" 23:05:44", ""))
    line = "x" * HEAD + " 2026-11-25T23:05"
    assert changed(ask(line), Rule.VOLATILE_LAST) == ask(line)


def test_all_of_gits_status_moves():
    text = "You are brief.\ngitStatus: This is the status.\n\nStatus:\n M a.py\n"
    made = changed(ask(text), Rule.VOLATILE_LAST)
    assert made["messages"][0] == system("You are brief.\n")
    assert made["messages"][1]["content"].endswith("\n\nStatus:\n M a.py")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"input": "Hi"}, "Hi\n\nDate: 1"),
        (
            {"input": [user([{"type": "input_text", "text": "Hi"}])]},
            {"type": "input_text", "text": "Date: 1"},
        ),
        ({"messages": [user([{"type": "text", "text": "Hi"}])]}, {"type": "text", "text": "Date: 1"}),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "4"}]}, "4\n\nDate: 1"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "4"}]}, "4\n\nDate: 1"),
    ],
)
def test_the_end_of_each_apis_prompt(fields, end):
    made = changed({"instructions": "Be brief.\nDate: 1", **fields}, Rule.VOLATILE_LAST)
    assert made["instructions"] == "Be brief.\n"
    (value,) = (made[name] for name in fields)
    if isinstance(value, list):
        value = value[-1].get("output") or value[-1]["content"]
    assert (value[-1] if isinstance(value, list) else value) == end


@pytest.mark.parametrize(
    "messages",
    [[], [user(None)], [{"role": "assistant", "content": "The"}], ["Hi"], [{"role": [1]}]],
)
def test_lines_stay_where_no_text_can_follow(messages):
    fields = {"system": "Date: 1", "messages": messages}
    assert changed(fields, Rule.VOLATILE_LAST) == fields


def test_the_rules_that_changed_something_are_named():
    fields = ask("Now 2026-11-25T23:05:44Z\ncwd: /a")
    _, applied = normalised(fields, CHOSEN)
    assert applied == (Rule.DATE_TO_DAY, Rule.PATHS)
    assert normalised(ask("Be brief."), CHOSEN) == ({}, ())


# --- whatever is sent ---------------------------------------------------------------------------------

LINES = st.sampled_from(
    [
        "You are brief.",
        "Now 2026-11-25T23:05:44Z",
        "cwd: /home/u",
        "Current time: 9",
        "x-anthropic-billing-header: cch=1;",
        "",
    ]
) | st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=20
)
TEXTS = st.lists(LINES, max_size=6).map("\n".join)
CONTENTS = TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": CONTENTS}
    ),
    max_size=5,
)
TOOLS = st.lists(st.fixed_dictionaries({"name": st.text(max_size=3)}), max_size=5)
REQUESTS = st.fixed_dictionaries({"messages": MESSAGES}, optional={"system": CONTENTS, "tools": TOOLS})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | LINES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "type", "content", "text", "name", "output"]), inner)
    ),
    max_leaves=15,
)


def lines_of(fields):
    """How often each line stands anywhere in the prompt; how lines are joined does not count."""
    found = Counter()
    for message in [system(fields.get("system") or ""), *fields["messages"]]:
        content = message["content"]
        for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
            found.update(line for line in text.split("\n") if line)
    return found


@given(fields=REQUESTS, rule=st.sampled_from(MOVING))
def test_moving_loses_no_line_and_touches_only_the_ends(fields, rule):
    made = changed(fields, rule)
    assert lines_of(made) == lines_of(fields)
    assert made.get("tools") == fields.get("tools")
    head = next(
        (i for i, each in enumerate(fields["messages"]) if each["role"] not in ("system", "developer")), 0
    )
    assert made["messages"][head:-1] == fields["messages"][head:-1]


@given(fields=REQUESTS)
def test_sorting_changes_the_order_alone(fields):
    made = changed(fields, Rule.TOOLS_SORTED)
    assert made["messages"] == fields["messages"]
    names = [tool["name"] for tool in fields.get("tools", ())]
    assert [tool["name"] for tool in made.get("tools", ())] == sorted(names)


@given(fields=REQUESTS, rule=st.sampled_from([Rule.DATE_TO_DAY, Rule.BILLING_LINE]))
def test_cutting_only_takes_characters_out_of_the_system_prompt(fields, rule):
    made = changed(fields, rule)
    for before, after in zip(fields["messages"], made["messages"], strict=True):
        if before["role"] not in ("system", "developer"):
            assert after == before
        rest = iter(json.dumps(before))
        assert all(char in rest for char in json.dumps(after))


@given(
    fields=st.dictionaries(st.sampled_from(["system", "instructions", "tools", "messages", "input"]), JSON)
)
def test_whatever_is_sent_is_read(fields):
    changed(fields, *Rule)
