import pytest

from proxy.core.differences import Difference, Kind, are_alike, cause_as_sent, difference

SYSTEM = {"role": "system", "content": "You are kind."}
ASKED = {"role": "user", "content": "What time is it?"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OTHER_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
MARK = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}


def text(said, **more):
    return {"type": "text", "text": said, **more}


def said(content, role="user", **more):
    return {"role": role, "content": content, **more}


def chat(*messages, **fields):
    return {"messages": list(messages), **fields}


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ({}, {}),
        (chat(SYSTEM, ASKED), chat(SYSTEM, ASKED)),
        (chat(SYSTEM, ASKED, said("now", "assistant")), chat(SYSTEM, ASKED)),
        (chat(SYSTEM), chat(SYSTEM, ASKED)),
        (chat(said([text("x", **MARK)])), chat(said([text("x")]))),
        (chat(said("x")), chat(said([text("x")]))),
        (chat(ASKED, tools=[]), chat(ASKED, tools=None)),
        (chat(ASKED, tools=[{**TOOLS[0], **MARK}]), chat(ASKED, tools=TOOLS[:1])),
        ({"prompt": "once upon"}, {"prompt": "once upon a time"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 2, 3]}),
        ({"input": "hello"}, {"input": [said("hello")]}),
        (
            {"input": [{"type": "message", "id": "msg_1", "status": "completed", **said([text("x")])}]},
            {"input": "x"},
        ),
        (chat(ASKED, temperature=1), chat(ASKED, temperature=0)),
        ({"input": "and then?", "previous_response_id": "resp_1"}, {"input": "hello"}),
    ],
)
def test_what_is_equal_or_goes_on(now, before):
    assert difference(now, before) is None


BLOCKS, OTHER_BLOCKS = [text("a"), text("b")], [text("a"), text("c")]
RUDE = {"role": "system", "content": "You are rude."}
USE = [{"type": "tool_use", "input": number} for number in range(2)]
FOLLOWS = {"previous_response_id": "resp_1"}
WITHOUT = chat(ASKED)


@pytest.mark.parametrize(
    ("kind", "where", "now", "before"),
    [
        (Kind.SYSTEM, "messages[0], character 8", chat(SYSTEM, ASKED), chat(RUDE, ASKED)),
        (
            Kind.SYSTEM,
            "messages[0].content[1], character 8",
            chat(said([text("a"), text("now 10:31")], "developer")),
            chat(said([text("a"), text("now 10:32")], "developer")),
        ),
        (Kind.SYSTEM, "system.content[1], character 0", {"system": BLOCKS}, {"system": OTHER_BLOCKS}),
        (Kind.SYSTEM, "instructions, character 3", {"instructions": "be kind"}, {"instructions": "be rude"}),
        (Kind.SYSTEM, "instructions", {"input": "x"}, {"instructions": "y", "input": "x"}),
        (Kind.SYSTEM, "system", {"system": "y"}, {"system": None}),
        (Kind.SYSTEM, "instructions, character 0", {"instructions": "x", **FOLLOWS}, {"instructions": "y"}),
        (Kind.INPUT, "input[0], character 0", {"input": "a", **FOLLOWS}, {"input": "b", **FOLLOWS}),
        (Kind.TOOLS, "tools[0]", chat(SYSTEM, tools=TOOLS), chat(ASKED, tools=TOOLS[::-1])),
        (Kind.TOOLS, "tools[0]", chat(ASKED, tools=TOOLS), WITHOUT),
        (Kind.TOOLS, "tools[1]", chat(tools=TOOLS), chat(tools=TOOLS[:1] * 2)),
        (
            Kind.INPUT,
            "messages[1], character 7",
            chat(SYSTEM, said("at 10:31")),
            chat(SYSTEM, said("at 10:32")),
        ),
        (Kind.INPUT, "messages[1]", chat(SYSTEM, said("b")), chat(SYSTEM, said("b", "assistant"))),
        (Kind.INPUT, "messages[0]", chat(said("", tool_calls=[1])), chat(said("", tool_calls=[2]))),
        (Kind.INPUT, "messages[0].content[1]", chat(said([text("a")])), chat(said([text("a"), text("b")]))),
        (
            Kind.MEDIA,
            "messages[0].content[1]",
            chat(said([text("what is this?"), IMAGE])),
            chat(said([text("what is this?"), OTHER_IMAGE])),
        ),
        (
            Kind.INPUT,
            "messages[0].content[1], character 0",
            chat(said([IMAGE, text("a")])),
            chat(said([IMAGE, text("b")])),
        ),
        (Kind.MEDIA, "messages[0].content[0]", chat(said([IMAGE])), chat(said([]))),
        (Kind.INPUT, "messages[0].content[0]", chat(said([USE[0]])), chat(said([USE[1]]))),
        (Kind.INPUT, "input[0], character 5", {"input": "hello"}, {"input": "hello you"}),
        (Kind.INPUT, "prompt, character 2", {"prompt": "abc"}, {"prompt": "abd"}),
        (Kind.INPUT, "prompt[1]", {"prompt": [1, 2]}, {"prompt": [1, 3]}),
        (Kind.OPTION, "reasoning_effort", chat(ASKED, reasoning_effort="low"), WITHOUT),
    ],
)
def test_the_first_difference(kind, where, now, before):
    found = difference(now, before)
    assert (found.kind, str(found)) == (kind, where)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (chat(said("It is 10:31. You are a helper.")), chat(said("It is 9:59. You are a helper.")), True),
        ({"system": [text("You are kind.")]}, chat(SYSTEM), True),
        ({"system": ["You are kind."]}, chat(SYSTEM), True),
        (chat(said("Write a poem.")), chat(said("Is it 10:31?")), False),
        (chat(said(None)), chat(said("")), False),
        ({"prompt": [1, 2]}, {"prompt": [1, 2]}, False),
    ],
)  # fmt: skip
def test_requests_that_begin_alike(now, before, expected):
    assert are_alike(now, before) is are_alike(before, now) is expected


def test_a_tool_whose_fields_come_in_another_order():
    def tool(*names):
        return {"name": "f", "parameters": {name: {"type": "string"} for name in names}}

    now, before = ({"tools": [TOOLS[0], tool(*names)], "input": "Hi"} for names in ("ab", "ba"))
    found = difference(now, before)
    assert found == Difference(Kind.ORDER, "tools", 1)
    assert str(found) == "tools[1], the order of its fields"
    # Whatever else differs is the likelier cause.
    assert difference({**now, "input": "Ho"}, before).kind is Kind.INPUT
    marked = {"tools": [TOOLS[0], {**tool("a", "b"), **MARK}], "input": "Hi"}
    assert difference(now, marked) is None


def test_the_clients_part_in_a_difference_that_kvpin_changed():
    def asks(system, *turns, **more):
        messages = [{"role": "system", "content": system}, *({"role": "user", "content": t} for t in turns)]
        return {"messages": messages, **more}

    at_system, at_input = Difference(Kind.SYSTEM, "messages", 0), Difference(Kind.INPUT, "messages", 1)
    before = asks("Be brief.", "Hi")
    assert cause_as_sent(at_system, asks("Be brief.", "Hi", "And?"), before) is None
    assert cause_as_sent(at_system, asks("Be brief.", "Ho"), before) is None
    assert cause_as_sent(at_input, asks("Be brief.", "Hi", thinking={}), before) is None
    assert cause_as_sent(at_input, asks("Be kind.", "Ho"), before) is at_input
    carried = cause_as_sent(at_input, asks("Be kind.", "Hi"), before)
    assert str(carried) == "messages[0], character 3"
