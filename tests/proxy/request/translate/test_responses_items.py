"""Items of the Responses API as messages of a chat."""

from time import thread_time

import pytest

from proxy.errors import BadRequest
from proxy.request.translate.responses_items import Messages, custom_arguments, custom_input, listed, sealed

CALL = {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": '{"port": "Brest"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4 m"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Hm."}]}
OUTPUT_SAID = {"role": "tool", "content": "4 m", "tool_call_id": "c1"}
IMAGE = {"type": "input_image", "image_url": "data:,x", "detail": "auto"}
SHOWN = {"type": "image_url", "image_url": {"url": "data:,x"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}


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
    assert arguments == custom_arguments('a "b"') == '{"input":"a \\"b\\""}'
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
    compacted = {"type": "compaction", "encrypted_content": "x"}
    history = [user("a"), THOUGHT, searched, compacted, said("High."), user("b")]
    assert messages_of(*history)[1] == assistant("\ntides\nHigh.", reasoning_content="Hm.")
    assert messages_of(*history)[:2] == messages_of(*history[:-1])


def test_listed_items_have_ids_and_parts():
    given = {"id": "msg_1", "status": "completed"}
    assert listed(user("a"), "msg_1") == user([text("a")]) | {"type": "message", **given}
    assert listed(assistant("a"), "msg_1")["content"] == [text("a", "output_text") | {"annotations": []}]
    assert listed(CALL, "msg_1") == {**given, **CALL}
    for item in (user("a"), assistant("a"), CALL, OUTPUT, said("a"), THOUGHT):
        assert messages_of(listed(item, "x_1")) == messages_of(item)


def test_many_items_of_services_take_no_quadratic_time():
    messages, started = Messages(None), thread_time()
    for number in range(5_000):
        messages.add({"type": "web_search_call", "query": "x" * 400}, f"input[{number}]")
        messages.add({"role": "assistant", "content": "x" * 400}, f"input[{number}]")
    messages.finish()
    assert [len(each["content"]) for each in messages.all] == [5_000 * 802]
    assert thread_time() - started < 3
