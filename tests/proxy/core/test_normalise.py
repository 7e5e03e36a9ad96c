"""Each rule changes only what its name says."""

import json
from copy import deepcopy
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.normalise import AGENTS, FINDS_VALUES, Rule, normalised
from proxy.core.prompt_values import HEAD

CHOSEN = tuple(rule for rule in Rule if rule is not Rule.BILLING_LINE)
TOLD = "Values in the instructions above:\n"


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def ask(text, *more):
    return {"messages": [system(text), user("Hi"), *more]}


def changed(fields, *rules):
    before = deepcopy(fields)
    changes, applied, told = normalised(fields, rules)
    assert fields == before
    assert bool(told) <= bool(set(applied) & FINDS_VALUES)
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


def test_what_changes_within_a_session_is_told_behind_the_last_message():
    said = "You are brief.\nContext: {} of {} tokens used\nYou know tides."
    later = {"role": "assistant", "content": "4 m"}
    fields = ask(said.format("40,324", "71,000"), later, user("And?"))
    made = changed(fields, Rule.VOLATILE_LAST)["messages"]
    assert made[0] == system(said.format("[[count 1]]", "[[count 2]]"))
    assert made[1:3] == fields["messages"][1:3]
    assert made[3] == user(f"And?\n\n{TOLD}[[count 1]]: 40,324\n[[count 2]]: 71,000")


def test_what_is_equal_in_a_session_is_told_before_its_first_turn():
    text = "Today is 2026-11-29 (Sunday).\nThe directory is `/home/u/w1`; /home/u/w1 it is."
    later = [user("Hi"), {"role": "assistant", "content": "4 m"}, user("And?")]
    made = changed({"messages": [system(text), *later]}, Rule.PATHS, Rule.DATES)
    told = f"{TOLD}[[date 1]]: 2026-11-29 (Sunday)\n[[path 1]]: /home/u/w1\n\nHi"
    assert made["messages"] == [
        system("Today is [[date 1]].\nThe directory is `[[path 1]]`; [[path 1]] it is."),
        user(told),
        *later[1:],
    ]


def test_values_in_the_descriptions_of_tools_are_told():
    def tool(at):
        where = {"type": "string", "description": f"below {at}", "default": at}
        parameters = {"type": "object", "properties": {"where": where, "description": {"type": "string"}}}
        return {"name": "ls", "description": f"Lists {at}.", "parameters": parameters}

    made = changed({"tools": [tool("/home/u/w1")], "input": "Hi"}, Rule.PATHS)
    expected = tool("[[path 1]]")
    expected["parameters"]["properties"]["where"]["default"] = "/home/u/w1"
    assert made == {"tools": [expected], "input": f"{TOLD}[[path 1]]: /home/u/w1\n\nHi"}


def test_schemas_are_sorted_and_mean_the_same():
    def tool(*names):
        inner = {name: {"type": "string", "enum": ["b", "a"]} for name in names}
        schema = {"required": [*names], "properties": inner, "anyOf": [{"b": 1, "a": 2}]}
        return {"type": "function", "function": {"name": "f", "parameters": schema}}

    one, other = (changed({"tools": [tool(*names)]}, Rule.SCHEMAS_SORTED) for names in ("ab", "ba"))
    assert json.dumps(one) == json.dumps(other)
    assert one["tools"][0]["function"]["parameters"]["properties"]["a"]["enum"] == ["b", "a"]
    assert list(one["tools"][0]["function"]["parameters"]) == ["anyOf", "properties", "required"]
    data = {"required": ["b", "a"], "z": 1}
    named = {
        "default": {"required": ["b", "a"]},
        "required": {"default": data},
        "properties": {"enum": [data]},
    }
    kept = changed(
        {
            "tools": [
                tool() | {"function": {"name": "f", "parameters": {"properties": named, "default": data}}}
            ]
        },
        Rule.SCHEMAS_SORTED,
    )["tools"][0]["function"]["parameters"]
    assert (
        json.dumps(kept["default"])
        == json.dumps(kept["properties"]["required"]["default"])
        == json.dumps(data)
    )
    assert kept["properties"]["default"] == {"required": ["a", "b"]}
    assert json.dumps(kept["properties"]["properties"]["enum"]) == json.dumps([data])
    claude = [{"name": "f", "input_schema": {"b": 1, "a": 2}}]
    assert json.dumps(changed({"tools": claude}, Rule.SCHEMAS_SORTED)["tools"][0]["input_schema"]) == (
        '{"a": 2, "b": 1}'
    )
    assert normalised(one, [Rule.SCHEMAS_SORTED]) == ({}, (), {})


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
    line = "Current time: x" + "x" * HEAD + " 9"
    assert changed(ask(line), Rule.VOLATILE_LAST) == ask(line)


def test_all_of_gits_status_moves():
    text = "You are brief.\ngitStatus: This is the status.\n\nStatus:\n M a.py\n"
    made = changed(ask(text), Rule.VOLATILE_LAST)
    assert made["messages"][0] == system("You are brief.\ngitStatus: [[git 1]]")
    assert made["messages"][1]["content"].endswith(": This is the status.\n\nStatus:\n M a.py")


END = f"{TOLD}[[time 1]]: 1"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"input": "Hi"}, "Hi\n\n" + END),
        (
            {"input": [user([{"type": "input_text", "text": "Hi"}])]},
            {"type": "input_text", "text": "\n\n" + END},
        ),
        ({"messages": [user([{"type": "text", "text": "Hi"}])]}, {"type": "text", "text": "\n\n" + END}),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "4"}]}, "4\n\n" + END),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "4"}]}, "4\n\n" + END),
    ],
)
def test_the_end_of_each_apis_prompt(fields, end):
    made = changed({"instructions": "Be brief.\nDate: 1", **fields}, Rule.VOLATILE_LAST)
    assert made["instructions"] == "Be brief.\nDate: [[time 1]]"
    (value,) = (made[name] for name in fields)
    if isinstance(value, list):
        value = value[-1].get("output") or value[-1]["content"]
    assert (value[-1] if isinstance(value, list) else value) == end


def test_a_late_system_message_may_stand_behind_the_last_turn():
    late = {"role": "system", "content": "late"}
    made = changed({"messages": [system("Date: 1"), user("Hi"), late]}, Rule.VOLATILE_LAST)
    assert made["messages"] == [system("Date: [[time 1]]"), user("Hi\n\n" + END), late]


@pytest.mark.parametrize(
    "messages", [[], [user(None)], [{"role": "assistant", "content": "The"}], ["Hi"], [{"role": [1]}]]
)
def test_values_stay_where_no_text_can_tell_them(messages):
    fields = {"system": "Date: 1, in /home/u/w1", "messages": messages}
    assert changed(fields, Rule.VOLATILE_LAST, Rule.PATHS) == fields


def test_the_rules_that_changed_something_are_named():
    fields = ask("Now 2026-11-25T23:05:44Z\ncwd: /a")
    _, applied, told = normalised(fields, CHOSEN)
    assert applied == (Rule.DATE_TO_DAY, Rule.PATHS, Rule.DATES)
    assert told == {"[[path 1]]": "/a", "[[date 1]]": "2026-11-25"}
    assert normalised(ask("Be brief."), CHOSEN) == ({}, (), {})


# --- whatever is sent ---------------------------------------------------------------------------------

LINES = st.sampled_from(
    [
        "You are brief.",
        "Now 2026-11-25T23:05:44Z",
        "cwd: /home/u",
        "It is /home/u/w1, since 2026-11-25.",
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


@given(fields=REQUESTS, rules=st.sets(st.sampled_from(sorted(FINDS_VALUES))))
def test_values_put_back_give_the_prompt_that_was_sent(fields, rules):
    made, applied, told = normalised(fields, rules)
    assert bool(applied) == bool(told)
    text = json.dumps({**fields, **made})
    for reference, value in told.items():
        assert reference in text
        text = text.replace(reference, json.dumps(value)[1:-1])
    heads = json.loads(text)
    for name in ("system", "tools"):
        assert heads.get(name) == fields.get(name)
    for before, after in zip(fields["messages"], heads["messages"], strict=True):
        if before["role"] in ("system", "developer", "assistant"):
            assert before == after


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


@pytest.mark.parametrize("line", ["\n", "\r\n", "/1:\n"])
def test_very_many_lines_take_no_long_time(line):
    fields = {"instructions": line * 100_000 + "Now in /home/me/x", "input": "Hi"}
    started = thread_time()
    normalised(fields, AGENTS | {Rule.DATE_TO_DAY})
    assert thread_time() - started < 10  # less than 1 s on a machine without other work
