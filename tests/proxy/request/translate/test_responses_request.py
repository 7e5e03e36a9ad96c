"""Requests for responses as chats: fields, items, turns, and streams over a socket."""

import json
import time
from importlib import import_module

import pytest

from engine_adapter import JsonBody
from engine_adapter.off_loop import MOST_MS, off_loop
from proxy.errors import BadRequest, NotFound
from proxy.request.translate import ResponseStore, ResponseTranslation, responses
from proxy.request.translate.responses import may_name_more
from proxy.request.translate.responses_items import Messages, custom_input, listed, sealed
from proxy.request.translate.responses_store import MAX_ID
from tests.proxy.request.translate.response_world import (
    FUNCTION,
    KEYS,
    ROUTE,
    SPACE,
    TOOL,
    answered,
    ask,
    chat_of,
    events_of,
    serving_chats,
    translation,
)

SCHEMA = {"name": "x", "schema": {}, "strict": True}
TIDE = {"type": "function", "name": "tide"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [TIDE]}


class TestRequests:
    def test_fields_that_are_an_engines_stay(self):
        kept = {"temperature": 0.5, "cache_salt": "s", "chat_template_kwargs": {"a": 1}, "user": "u"}
        kept |= {"prompt_cache_key": "k", "parallel_tool_calls": False}
        dropped = {"metadata": {"a": "b"}, "truncation": "auto", "n": 2, "client_metadata": {}}
        assert chat_of(**kept, **dropped) == {**chat_of(), **kept}

    @pytest.mark.parametrize(
        ("fields", "of_chat"),
        [
            ({"max_output_tokens": 7}, {"max_tokens": 7}),
            ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
            ({"reasoning": {"effort": None}}, {}),
            ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
            ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
            (
                {"text": {"format": {"type": "json_schema", **SCHEMA}}},
                {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            ),
            ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
            ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
            ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
            ({"tools": [TOOL], "tool_choice": "auto"}, {"tools": [FUNCTION]}),
            ({"tools": [{"type": "web_search"}, TOOL, {"type": "mcp"}]}, {"tools": [FUNCTION]}),
            ({"tools": [{"type": "web_search"}]}, {}),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, {}),
            ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [FUNCTION], "tool_choice": "required"}),
            ({"tools": [TOOL], "tool_choice": TIDE}, {"tools": [FUNCTION], "tool_choice": "required"}),
            (
                {"tools": [TOOL, {"type": "function", "name": "log"}], "tool_choice": TIDE},
                {
                    "tools": [FUNCTION, {"type": "function", "function": {"name": "log"}}],
                    "tool_choice": {"type": "function", "function": {"name": "tide"}},
                },
            ),
            (
                {"tools": [TOOL, TOOL | {"name": "other"}], "tool_choice": ALLOWED},
                {"tools": [FUNCTION], "tool_choice": "required"},
            ),
            (
                {"tools": [TOOL | {"strict": True}]},
                {"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}]},
            ),
        ],
    )
    def test_each_field_has_its_place(self, fields, of_chat):
        assert chat_of(**fields) == {**chat_of(), **of_chat}

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": ...}, "input"),
            ({"input": 1}, "input"),
            ({"input": []}, "input"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": "9"}, "max_output_tokens"),
            ({"input": ["a"]}, "input[0]"),
            ({"instructions": 1}, "instructions"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"moderation": {"model": "x"}}, "moderation"),
            ({"tools": {}}, "tools"),
            ({"tools": [{"type": "function"}]}, "tools[0]"),
            ({"tools": [1]}, "tools[0]"),
            ({"tools": [TOOL | {"namespace": {}}], "tool_choice": ALLOWED}, "tools[0].namespace"),
            ({"tools": [SPACE | {"tools": [7]}]}, "tools[0].tools[0]"),
            ({"tools": [SPACE | {"tools": [{"type": "function"}]}]}, "tools[0].tools[0]"),
            ({"tools": [TOOL, TOOL]}, "tools[1]"),
            ({"tools": [SPACE, TOOL | {"name": "sea__tide"}]}, "tools[1]"),
            ({"tools": [SPACE, SPACE | {"name": "sea__"}]}, "tools[1].tools[0]"),
            ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
            ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "search"}}, "tool_choice"),
            ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "log"}}, "tool_choice"),
            ({"tools": [TOOL | {"name": "other"}], "tool_choice": ALLOWED}, "tool_choice"),
            ({"tools": [{"type": "web_search"}], "tool_choice": ALLOWED}, "tool_choice"),
            ({"tool_choice": ALLOWED}, "tool_choice"),
            ({"text": "a"}, "text"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": []}, "metadata"),
            ({"include": "a"}, "include"),
            ({"prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
        ],
    )
    def test_what_is_wrong_is_named(self, fields, param):
        with pytest.raises(BadRequest) as caught:
            translation(**fields)
        assert caught.value.param == param

    def test_a_text_is_no_answer_to_whether_a_response_is_stored(self):
        body = JsonBody(b'{"input": "hi", "store": "false"}')
        with pytest.raises(BadRequest, match=r"^store must be true or false$"):
            ResponseTranslation(body, None, store=ResponseStore())


def test_many_allowed_tools_take_no_quadratic_time():
    tools = [{"type": "function", "name": f"t{number}"} for number in range(10_000)]
    allowed = [{"type": "function", "name": f"x{number}"} for number in range(10_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [*allowed, *tools[:1], {"name": []}]}
    began = time.process_time()
    assert [each["function"]["name"] for each in chat_of(tools=tools, tool_choice=choice)["tools"]] == ["t0"]
    assert time.process_time() - began < 3


def test_a_type_that_is_no_text_is_no_fault():
    item = {"type": [], "role": "user", "content": "hi"}
    assert chat_of(input=[item])["messages"] == [{"role": "user", "content": "hi"}]


def test_an_item_of_another_type_that_has_a_role_is_kept_as_it_came():
    store = ResponseStore()
    items = [
        {"type": "reasoning", "role": "assistant", "summary": []},
        {
            "type": "function_call",
            "role": "assistant",
            "content": None,
            "call_id": "c",
            "name": "f",
            "arguments": "",
        },
        {"role": "user", "content": "hi"},
    ]
    first = answered(translation(store=store, input=items), content="x")
    kept = [json.loads(item) for item in store.of(None).get(first["id"]).turn.asked.values()]
    assert [item["type"] for item in kept] == ["reasoning", "function_call", "message"]
    assert {**kept[1], **items[1]} == kept[1]
    translation(store=store, input="more", previous_response_id=first["id"])


def test_what_is_named_many_times_has_a_limit(monkeypatch):
    monkeypatch.setattr(responses, "MAX_NAMED_BYTES", 10_000)
    store = ResponseStore()
    first = answered(translation(store=store, input="a" * 1000), content="x")
    item = store.of(None).get(first["id"]).turn.asked
    references = [{"type": "item_reference", "id": next(iter(item))}]
    translation(store=store, input=references * 5)
    with pytest.raises(BadRequest) as caught:
        translation(store=store, input=references * 10)
    assert caught.value.param == "input[8].id"
    name = first["id"]
    for _ in range(4):
        made = translation(store=store, input="a" * 1000, previous_response_id=name)
        name = answered(made, content="x")["id"]
    with pytest.raises(BadRequest) as caught:
        translation(store=store, previous_response_id=name)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "context_length_exceeded")


@pytest.mark.parametrize("fields", [{"previous_response_id": "x" * 999}, {"input": [{"id": "x" * 999}]}])
def test_an_error_repeats_the_beginning_of_a_long_id(fields):
    with pytest.raises(NotFound) as caught:
        translation(**fields)
    assert "x" * MAX_ID in str(caught.value)
    assert len(str(caught.value)) < MAX_ID + 60


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"input": "hi"}, False),
        ({"previous_response_id": None}, False),
        ({"previous_response_id": "r"}, True),
        ({"input": [{"id": "m"}]}, True),
        ({"input": "\u00e4"}, True),
    ],
)
def test_what_may_be_longer_than_its_body(fields, may):
    assert may_name_more(JsonBody(json.dumps(fields).encode())) is may


CALL = {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": '{"port": "Brest"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4 m"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm."}]}
OUTPUT_SAID = {"role": "tool", "content": "4 m", "tool_call_id": "c1"}
IMAGE = {"type": "input_image", "image_url": "data:,x", "detail": "auto"}
SHOWN = {"type": "image_url", "image_url": {"url": "data:,x"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
MP3 = {"type": "input_audio", "input_audio": {"data": "AA", "format": "mp3"}}


def messages_of(*items, instructions=None):
    made = Messages(instructions)
    for index, item in enumerate(items):
        made.add(item, f"input[{index}]")
    made.finish()
    assert len(made.places) == len(made.all)
    return made.all


def text(words, kind="input_text"):
    return {"type": kind, "text": words}


def said(*texts):
    content = [text(each, "output_text") for each in texts]
    return {"type": "message", "role": "assistant", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (user("hi"), user("hi")),
        (user([text("hi")]) | {"type": "message", "id": "msg_1", "status": "completed"}, user("hi")),
        (user([text("a"), text("b")]), user([text("a", "text"), text("b", "text")])),
        ({"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "Be brief."}),
        (user([IMAGE]), user([SHOWN])),
        (
            user([IMAGE | {"detail": "low", "uuid": "u"}]),
            user([{"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}, "uuid": "u"}]),
        ),
        (user([AUDIO]), user([AUDIO])),
        (user([{"type": "input_audio", "audio_url": "data:audio/wav;base64,AA"}]), user([AUDIO])),
        (user([{"type": "input_audio", "audio_url": "data:audio/mpeg;base64,AA"}]), user([MP3])),
        (said("a", "b"), assistant("ab")),
        (assistant("ab"), assistant("ab")),
        (said() | {"content": [{"type": "refusal", "refusal": "no"}]}, assistant("no")),
        (CALL, assistant(None, tool_calls=[CALLED])),
        (OUTPUT, OUTPUT_SAID),
        (OUTPUT | {"output": [text("4 m")]}, OUTPUT_SAID),
        (THOUGHT, assistant(None, reasoning_content="Hm.")),
        (
            {"type": "reasoning", "summary": [], "encrypted_content": sealed("Hm.")},
            assistant(None, reasoning_content="Hm."),
        ),
    ],
)
def test_each_item_is_one_message(item, message):
    assert messages_of(item) == [message]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "reasoning", "summary": [], "encrypted_content": "kvpin.?"},
    ],
)
def test_reasoning_that_cannot_be_read_is_left_out(item):
    assert messages_of(item) == []


SEALED = {"type": "encrypted_content", "encrypted_content": "gAAAAx"}
TASK = {"type": "encrypted_content", "encrypted_content": "Find it."}


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ([text("Find it."), text("Now.")], [user("Find it.\nNow.")]),
        ([text("Find it."), SEALED], [user("Find it.")]),
        ([TASK], [user("Find it.")]),  # Codex writes it so for a model that is not OpenAI's
        ([SEALED, 7], []),
    ],
)
def test_what_agents_say_to_one_another_is_the_users(content, messages):
    told = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": content}
    assert messages_of(told) == messages


def test_the_items_of_a_turn_are_one_message():
    calls = [CALLED, CALLED | {"id": "c2"}]
    assert messages_of(THOUGHT, said("Let me see."), CALL, CALL | {"call_id": "c2"}, OUTPUT, said("4 m")) == [
        assistant("Let me see.", reasoning_content="Hm.", tool_calls=calls), OUTPUT_SAID, assistant("4 m"),
    ]  # fmt: skip
    assert len(messages_of(said("a"), said("b"))) == 2
    assert len(messages_of(said("a"), THOUGHT, said("b"))) == 2


def test_a_custom_tool_is_a_function_with_one_argument():
    called = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    made = messages_of(called, result)
    arguments = made[0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"input":"a \\"b\\""}'
    assert custom_input(arguments) == 'a "b"'
    assert custom_input('{"a": 1}') == '{"a": 1}'
    assert made[1] == OUTPUT_SAID | {"content": "done"}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user"}, "input[0]"),
        ({"role": "sorcerer", "content": "a"}, "input[0].role"),
        ({"type": "dream_call", "id": "d_1"}, "input[0]"),
        (CALL | {"arguments": {}}, "input[0]"),
        (user([text("a"), {"type": "input_file", "file_id": "f"}]), "input[0].content[1]"),
        (user([{"type": "input_image", "file_id": "f"}]), "input[0].content[0]"),
        (user([{"type": "input_text", "text": 1}]), "input[0].content[0]"),
        (user(["a"]), "input[0].content[0]"),
        # Each repetition takes memory: the beginning alone is searched.
        (
            user([{"type": "input_audio", "audio_url": f"data:audio/wav{';' * 300};base64,AA"}]),
            "input[0].content[0]",
        ),
        (said() | {"content": [text("a", "other")]}, "input[0].content[0]"),
        (OUTPUT | {"output": [7]}, "input[0].output[0]"),
    ],
)
def test_what_cannot_be_served_is_named(item, param):
    with pytest.raises(BadRequest) as caught:
        messages_of(item)
    assert caught.value.param == param


def test_a_type_that_is_not_served_is_told_apart_from_wrong_fields():
    with pytest.raises(BadRequest, match=r"items of type 'dream_call' are unknown"):
        messages_of({"type": "dream_call"})
    with pytest.raises(BadRequest, match="an item of type 'function_call' with these fields"):
        messages_of(CALL | {"arguments": {}})
    with pytest.raises(BadRequest, match=r"input\[0\]: this is no item"):
        messages_of({"id": "a"})


def test_images_of_results_follow_all_results_of_the_turn():
    shot = OUTPUT | {"output": [text("4 m"), IMAGE]}
    assert messages_of(shot, OUTPUT) == [OUTPUT_SAID, OUTPUT_SAID, user([SHOWN])]
    assert messages_of(shot, OUTPUT, user("And?"))[2:] == [user([SHOWN]), user("And?")]
    assert messages_of(shot, OUTPUT, said("High."))[2:] == [user([SHOWN]), assistant("High.")]
    assert messages_of(OUTPUT | {"output": [IMAGE]})[0]["content"] == ""


def test_places_of_images_and_of_what_follows_them():
    made = Messages(None)
    made.add(OUTPUT | {"output": [text("4 m"), IMAGE]}, "input[0]")
    made.add(user([text("a"), IMAGE]), "input[1]")
    assert [place.parts for place in made.places[1:]] == [
        ["input[0].output[1]"],
        ["input[1].content[0]", "input[1].content[1]"],
    ]


@pytest.mark.parametrize("between", [(said("High."),), (user("Well?"),), (user("a"), said("b")), ()])
def test_a_growing_talk_keeps_the_messages_of_each_request(between):
    """Also where a request failed, so that no answer stands between an image and what the user says next."""
    shot, talk, before = OUTPUT | {"output": [text("4 m"), IMAGE]}, [user("How high?")], []
    for _ in range(20):
        for more in ([CALL, shot, OUTPUT], between, [user("And now?")]):
            talk += more
            made = messages_of(*talk)
            assert made[: len(before)] == before
            before = made


def test_what_a_service_did_is_text_of_the_answer():
    searched = {"type": "web_search_call", "id": "ws", "action": {"type": "search", "query": "tides"}}
    compacted = [{"type": f"{kind}compaction", "encrypted_content": "x"} for kind in ("", "context_")]
    history = [user("a"), THOUGHT, searched, *compacted, said("High."), user("b")]
    assert messages_of(*history)[1] == assistant("\ntides\nHigh.", reasoning_content="Hm.")
    assert messages_of(*history)[:2] == messages_of(*history[:-1])


def test_listed_items_have_ids_and_parts():
    given = {"id": "msg_1", "status": "completed"}
    assert listed(user("a"), "msg_1") == user([text("a")]) | {"type": "message", **given}
    assert listed(assistant("a"), "msg_1")["content"] == [text("a", "output_text") | {"annotations": []}]
    assert listed(CALL, "msg_1") == {**given, **CALL}
    for empty in (None, ""):
        assert listed(CALL | {"id": empty, "status": empty}, "msg_1") == {**given, **CALL}
    for item in (user("a"), assistant("a"), CALL, OUTPUT, said("a"), THOUGHT):
        assert messages_of(listed(item, "x_1")) == messages_of(item)


def test_many_items_of_services_take_no_quadratic_time():
    messages, started = Messages(None), time.thread_time()
    for number in range(5_000):
        messages.add({"type": "web_search_call", "query": "x" * 400}, f"input[{number}]")
        messages.add({"role": "assistant", "content": "x" * 400}, f"input[{number}]")
    messages.finish()
    assert [len(each["content"]) for each in messages.all] == [5_000 * 802]
    assert time.thread_time() - started < 3


@pytest.fixture
async def client(engine):
    async with serving_chats(engine) as client:
        yield client


class TestState:
    def test_the_next_turn_has_the_same_beginning(self):
        store = ResponseStore()
        calls = [{"id": "c1", "function": {"name": "tide", "arguments": "{}"}}]
        first = translation(store=store, instructions="Be brief.", tools=[TOOL])
        response = answered(first, reasoning_content="Hm.", content="a", tool_calls=calls)
        result = {"type": "function_call_output", "call_id": "c1", "output": "4 m"}
        by_name = translation(store=store, input=[result], previous_response_id=response["id"])
        items = [{"role": "user", "content": "hi"}, *response["output"], result]
        by_items = translation(store=store, input=items)
        references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
        by_reference = translation(store=store, input=[items[0], *references, result])
        assert by_name.chat.raw == by_items.chat.raw == by_reference.chat.raw
        assert json.loads(by_name.chat.raw)["messages"][0] == {"role": "user", "content": "hi"}

    @pytest.mark.parametrize("content", [{}, {"content": []}, {"content": None, "encrypted_content": None}])
    def test_reasoning_that_is_named_alone_is_that_of_the_answer(self, content):
        """LangChain keeps a stream's first event of it, which is empty, and OpenAI knows it by its id."""
        store = ResponseStore()
        response = answered(translation(store=store), reasoning_content="Hm.", content="a")
        thought, item = response["output"]
        bare = {"type": "reasoning", "id": thought["id"], "summary": [], **content}
        made = translation(store=store, input=[bare, item])
        assert json.loads(made.chat.raw)["messages"] == [assistant("a", reasoning_content="Hm.")]
        assert json.loads(made.source.raw)["input"][0] == thought
        for other in (translation("else", store, input=[bare, item]), translation(input=[bare, item])):
            assert json.loads(other.chat.raw)["messages"] == [assistant("a")]

    def test_a_bare_reasoning_never_becomes_another_item(self):
        """A client may give any item any id."""
        store, given = (
            ResponseStore(),
            [user("a") | {"id": "x"}, {"type": "reasoning", "id": "x", "summary": []}],
        )
        for _ in range(2):
            made = translation(store=store, input=given)
            assert json.loads(made.chat.raw)["messages"] == [user("a")]
            assert made.source is None
            answered(made)

    def test_the_source_has_the_items_that_a_request_names(self):
        store = ResponseStore()
        response = answered(translation(store=store), content="a")
        (item,) = response["output"]
        made = translation(store=store, input=[{"id": item["id"]}, {"role": "user", "content": "b"}])
        assert made.source is not None
        named, plain = json.loads(made.source.raw)["input"]
        assert (named["role"], named["content"][0]["text"]) == ("assistant", "a")
        assert plain == {"role": "user", "content": "b"}
        assert translation(store=store, previous_response_id=response["id"]).source is None

    def test_items_that_have_the_same_id_are_all_kept(self):
        store = ResponseStore()
        first = answered(translation(store=store, input=[user("a") | {"id": "x"}, user("b") | {"id": "x"}]))
        kept = store.of(None).get(first["id"]).turn.asked
        assert [json.loads(item)["id"] for item in kept.values()] == list(kept)
        by_name = translation(store=store, input="c", previous_response_id=first["id"])
        assert json.loads(by_name.chat.raw)["messages"] == [user("a"), user("b"), user("c")]
        twice = answered(translation(store=store, input=[{"id": "x"}, {"id": "x"}]))
        by_name = translation(store=store, input="c", previous_response_id=twice["id"])
        assert json.loads(by_name.chat.raw)["messages"] == [user("a"), user("a"), user("c")]

    def test_what_is_told_is_about_the_requests_own_items(self):
        store = ResponseStore()
        searched = {"type": "web_search_call", "id": "ws", "action": {"query": "tides"}}
        made = translation(store=store, input=[searched, {"role": "user", "content": "Well?"}])
        assert made.changed == ("item:web_search_call",)
        parts = (SEALED, TASK, text(""), "odd", {"type": "input_image", "image_url": "data:"})
        agents = [{"type": "agent_message", "content": [text("a"), part]} for part in parts]
        changed = [("part:encrypted_content",), (), (), (), ("part:input_image",)]
        assert [translation(input=[each]).changed for each in agents] == changed
        response = answered(made, content="High.")
        assert translation(store=store, previous_response_id=response["id"]).changed == ()

    def test_what_is_not_to_be_stored_is_not(self):
        store = ResponseStore()
        body = JsonBody(b'{"model": "m", "input": "hi", "store": false}')
        response = answered(ResponseTranslation(body, None, store=store), content="a")
        assert store.of(None).get(response["id"]) is None
        assert store.of(None).bytes == 0


async def test_a_stream_over_a_socket(client):
    answer = await ask(client, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.content)
    assert events[-1]["type"] == "response.completed"
    kept = await client.get(f"{ROUTE}/{events[-1]['response']['id']}", headers=KEYS["a"])
    assert kept.json() == events[-1]["response"]


async def test_what_names_a_kept_response_is_read_off_the_loop(client, monkeypatch):
    """The conversation may be much longer than the request."""
    ready, expected = import_module("proxy.steps.preparation"), []

    async def noting(work, *, ms):
        expected.append(ms)
        return await off_loop(work, ms=ms)

    monkeypatch.setattr(ready, "off_loop", noting)
    first = (await ask(client)).json()["id"]
    assert (await ask(client, previous_response_id=first)).status_code == 200
    assert expected[0] < MOST_MS < expected[1]
