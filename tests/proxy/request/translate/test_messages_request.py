"""Anthropic's requests, as chats."""

import json

import pytest

from engine_adapter import JsonBody
from proxy.errors import BadRequest
from proxy.request.translate import MessageTranslation

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


CALL = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "Brest", "at": 1.0}}
ARGUMENTS = '{"port":"Brest","at":1.0}'
CALLED = {"id": "t1", "type": "function", "function": {"name": "tide", "arguments": ARGUMENTS}}


def result(content=None, **fields):
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def body_of(messages, **fields):
    """A request; messages that are strings are the user's."""
    if isinstance(messages, list | tuple):
        messages = [user(each) if isinstance(each, str) else each for each in messages]
    return JsonBody(json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields}).encode())


def translated(messages=("Hi",), **fields):
    return json.loads(MessageTranslation(body_of(messages, **fields)).chat.raw)


def told(messages=("Hi",), **fields):
    return MessageTranslation(body_of(messages, **fields)).changed


def chat(*messages, **fields):
    return translated(messages, **fields)["messages"]


def test_what_only_anthropics_service_knows_goes():
    fields = {
        "service_tier": "auto", "metadata": {}, "cache_control": {"type": "ephemeral"}, "speed": "fast",
        "inference_geo": "us", "diagnostics": {}, "context_management": {}, "container": None, "n": 2,
    }  # fmt: skip
    assert translated(**fields) == translated()


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
NAMED_SCHEMA = {"name": "answer", "schema": {"type": "object"}, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": NAMED_SCHEMA}
PDF = {"type": "url", "url": "x.pdf"}
BY_URL = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
FOUND_IT = {"type": "search_result", "source": "s", "title": "T", "content": [text("a"), text("b")]}
THOUGHT = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
    text("Yes."),
]


def tool(content):
    return {"role": "tool", "tool_call_id": "t1", "content": content}


@pytest.mark.parametrize(
    ("message", "messages"),
    [
        ({"role": "system", "content": [text("Now "), text("brief.")]},
         [{"role": "system", "content": "Now brief."}]),
        # One text is a string however it is written.
        (user([text("Hi")]), [user("Hi")]),
        (user([text("Hi") | CACHED]), [user("Hi")]),
        (user([]), [user("")]),
        (user([text("a"), IMAGE, BY_URL, text("b")]),
         [user([text("a"), IMAGE_PART, {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                text("b")])]),
        (user([FOUND_IT]), [user("T\ns\na\nb")]),
        (assistant([CALL]), [assistant("") | {"tool_calls": [CALLED]}]),
        (assistant([text("I look."), CALL]), [assistant("I look.") | {"tool_calls": [CALLED]}]),
        (assistant(THOUGHT), [assistant("Yes.") | {"reasoning_content": "hm"}]),
        (user([result("4 m")]), [tool("4 m")]),
        (user([result([text("4"), text("m")])]), [tool("4\nm")]),
        (user([result()]), [tool("")]),
        (user([result([{"type": "tool_reference"}])]), [tool("")]),
        (user([result([text("4 m"), {"type": "browser_state", "tabs": []}])]), [tool("4 m")]),
        (user([result("no boat", is_error=True)]), [tool("Error: no boat")]),
        # What the user says and images of results follow all results.
        (user([result([text("a"), IMAGE]), result("b"), text("And?")]),
         [tool("a"), tool("b"), user([IMAGE_PART, text("And?")])]),
        *((user([{"type": "document", "source": source, "title": "T", "context": "C"}, text("?")]),
           [user([text("T"), text("C"), *parts, text("?")])])
          for source, parts in (
              ({"type": "text", "media_type": "text/plain", "data": "d"}, [text("d")]),
              ({"type": "content", "content": "d"}, [text("d")]),
              ({"type": "content", "content": [text("d"), IMAGE]}, [text("d"), IMAGE_PART]),
          )),
    ],
)  # fmt: skip
def test_each_message(message, messages):
    assert chat("Hi", message, "So?") == [user("Hi"), *messages, user("So?")]


@pytest.mark.parametrize(
    ("system", "said"),
    [("Be brief.", "Be brief."), ([text("Be") | CACHED, text(" brief.")], "Be brief."),
     (None, None), ("", None), ([], None)],
)  # fmt: skip
def test_the_system_prompt(system, said):
    first = [{"role": "system", "content": said}] if said else []
    assert chat("Hi", system=system) == [*first, user("Hi")]


def test_numbers_keep_their_digits():
    body = JsonBody(
        b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "n",'
        b'"input": {"a": 123456789012345678901234567890, "b": 1.10}}]}]}'
    )
    (message,) = json.loads(MessageTranslation(body, counts=True).chat.raw)["messages"]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"a":123456789012345678901234567890,"b":1.10}'


NAMED = {"type": "tool", "name": "n"}


class TestTools:
    def test_offered(self):
        schema = {"type": "object", "properties": {"b": {}, "a": {}}}
        named = {"name": "n", "input_schema": schema}
        full = {**named, "type": "custom", "description": "d", "strict": True, "cache_control": None}
        first, second = translated(tools=[named, full])["tools"]
        offered = {"name": "n", "description": "", "parameters": schema}
        assert first == {"type": "function", "function": offered}
        assert second["function"] == offered | {"description": "d", "strict": True}
        assert translated(tools=[]) == translated()

    @pytest.mark.parametrize(
        ("choice", "n", "fields"),
        [
            ({"type": "auto"}, 1, {}),
            ({"type": "any"}, 2, {"tool_choice": "required"}),
            ({"type": "none"}, 1, {"tool_choice": "none"}),
            (NAMED, 1, {"tool_choice": "required"}),
            (NAMED, 2, {"tool_choice": {"type": "function", "function": {"name": "n"}}}),
            ({"type": "auto", "disable_parallel_tool_use": True}, 1, {"parallel_tool_calls": False}),
        ],
    )
    def test_chosen(self, choice, n, fields):
        tools = [{"name": "n", "input_schema": {}}] * n
        assert translated(tools=tools, tool_choice=choice) == {**translated(tools=tools), **fields}


SEARCHES = {"type": "web_search_20250305", "name": "w"}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "tides"}}
HIT = {"type": "web_search_result", "url": "http://t", "title": "Tides", "encrypted_content": "Eo8"}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [HIT]}


class TestOfAService:
    """What only Anthropic's service runs or reads."""

    def test_tools_are_left_out(self):
        own = {"name": "n", "input_schema": {}}
        tools = [SEARCHES, own, {"type": "dream_20990101", "name": "d"}]
        assert translated(tools=tools) == translated(tools=[own])
        assert translated(tools=tools[:1], tool_choice={"type": "any"}) == translated()
        assert told(tools=tools) == ("tool:web_search", "tool:dream")

    def test_a_history_goes_on_as_text(self):
        blocks = [text("Let me see."), SEARCH, FOUND, text("High."), {"type": "redacted_thinking"}]
        (said,) = chat(assistant(blocks))
        assert said["content"] == "Let me see.\nweb_search\ntides\n\nhttp://t\nTides\nHigh."
        services = "server_tool_use", "web_search_tool_result", "redacted_thinking"
        assert told([assistant(blocks)]) == tuple(f"block:{each}" for each in services)
        shown = [text("4 m"), {"type": "browser_state", "tabs": []}]
        assert told([user([result(shown)])]) == ("block:browser_state",)

    def test_a_compaction_and_an_upload(self):
        first, _ = chat(assistant([{"type": "compaction", "content": "We spoke."}]), "Hi")
        assert first["content"] == "\nWe spoke.\n"
        assert chat(user([{"type": "container_upload", "file_id": "f"}, text("a")])) == [user("a")]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        *(({"thinking": {"type": kind}}, {"chat_template_kwargs": {"enable_thinking": is_on}})
          for kind, is_on in (("enabled", True), ("disabled", False))),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": None}, {}),
        # What the client gives the template counts.
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True, "a": 1}},
         {"chat_template_kwargs": {"enable_thinking": True, "a": 1}}),
        ({"stop_sequences": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"stop_sequences": []}, {}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"format": SCHEMA}}, {"response_format": FORMAT}),
        ({"output_format": SCHEMA}, {"response_format": FORMAT}),
    ],
)  # fmt: skip
def test_fields_with_other_names(fields, wanted):
    assert translated(**fields) == {**translated(), **wanted}


@pytest.mark.parametrize(
    ("last", "is_continued"),
    [(assistant("The sea"), True), ("Hi", False), (assistant(""), False), (assistant([CALL]), False)],
)
def test_the_assistants_last_message_is_continued(last, is_continued):
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert (translated(["Hi", last]).items() >= goes_on.items()) is is_continued


def test_the_next_turn_begins_with_the_same_messages():
    turns = ["Hi", assistant([text("a"), CALL]), user([result("4"), text("So?")])]
    first = chat(*turns[:1], system="s")
    second = chat(*turns, assistant([text("b")]), "Go on", system="s")
    assert second[: len(first)] == first
    third = chat(*turns, assistant([text("b")]), "Go on", assistant("c"), "More", system="s")
    assert third[: len(second)] == second


def refused(fields):
    with pytest.raises(BadRequest) as caught:
        translated(**fields)
    assert caught.value.param in str(caught.value)
    return caught.value.param, str(caught.value)


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "user"}, "content", "missing"),
        ({"role": "cook", "content": "x"}, "role", "cook"),
        (user([{"type": "sound"}]), "content[0].type", "sound"),
        (user([text("a"), {"type": "text"}]), "content[1].text", "missing"),
        (user([{"type": "thinking", "thinking": "x"}]), "content[0].type", "'thinking'"),
        (assistant([IMAGE]), "content[0].type", "'image'"),
        ({"role": "system", "content": [IMAGE]}, "content[0].type", "'image'"),
        (user([{**IMAGE, "source": {"type": "file", "file_id": "f"}}]), "content[0].source.type", "file"),
        (user([{"type": "document", "source": PDF}]), "content[0].source", "PDFs"),
    ],
)
def test_a_message_that_cannot_be_served_is_named(message, param, says):
    named, said = refused({"messages": [message]})
    assert named == f"messages[0].{param}"
    assert says in said


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": None}, "messages", "must be a list"),
        ({"messages": []}, "messages", "at least one"),
        ({"max_tokens": -1}, "max_tokens", "must be a whole number of at least 0"),
        ({"tools": [SEARCHES], "tool_choice": {"type": "tool", "name": "w"}}, "tool_choice.name", "'w'"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema", "missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", "missing"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type", "maybe"),
        ({"container": "c"}, "container", "Anthropic's own service"),
        ({"mcp_servers": [{}]}, "mcp_servers", "Anthropic's own service"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": 1}, "chat_template_kwargs", "object"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(fields, param, says):
    named, said = refused(fields)
    assert named == param
    assert says in said


def test_text_that_is_no_text():
    with pytest.raises(BadRequest) as caught:
        MessageTranslation(JsonBody(b'{"messages": [{"role": "user", "content": "\xff"}]}'))
    assert caught.value.code == "invalid_json"
