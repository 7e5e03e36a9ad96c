"""Errors about chats, said about the requests that the chats were made of."""

import json

import pytest

from engine_adapter import ChatError, JsonBody
from proxy.request.translate import MessageTranslation
from proxy.request.translate.wording import ANTHROPIC, OPENAI
from tests.proxy.request.translate.response_world import translation

PICTURE = {"type": "image", "source": {"type": "url", "url": "data:,x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4 m"}, PICTURE]}
MESSAGE = {
    "model": "m",
    "max_tokens": 4,
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "See"}, PICTURE]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "tide", "input": {}}]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
    ],
    "tools": [{"name": "tide", "input_schema": {}}],
}
RESPONSE = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4 m"},
    ],
    "tools": [{"type": "web_search"}, {"type": "function", "name": "tide", "parameters": {}}],
}


def of_message():
    return MessageTranslation(JsonBody(json.dumps(MESSAGE).encode())).wording


def of_response(**fields):
    return translation(**{**RESPONSE, **fields}).wording


@pytest.mark.parametrize(
    ("of_chat", "of_the_message", "of_the_response"),
    [
        ("messages[0].content", "system", "instructions"),
        ("messages[1]", "messages[0]", "input[0]"),
        ("messages[1].role", "messages[0].role", "input[0].role"),
        ("messages[1].content[0].type", "messages[0].content[0].type", "input[0].content[0].type"),
        ("messages[2].tool_calls[0].function", "messages[1]", "input[1]"),
        ("messages[3].content", "messages[2].content[0].content", "input[3].output"),
        ("tools[0].function.parameters.type", "tools[0].input_schema.type", "tools[1].parameters.type"),
        ("tools[7].function", "tools", "tools"),
        ("messages[9]", "messages", "input"),
        ("response_format.json_schema", "output_config.format", "text.format"),
        ("temperature", "temperature", "temperature"),
    ],
)
def test_a_field_of_the_chat_is_a_field_of_the_request(of_chat, of_the_message, of_the_response):
    assert (of_message().path(of_chat), of_response().path(of_chat)) == (of_the_message, of_the_response)


def test_the_parts_of_several_blocks():
    """A picture in the result of a tool is a part of the message that follows it."""
    path = of_message().path
    assert path("messages[1].content[1].image_url.url") == "messages[0].content[1].source"
    assert path("messages[4].content[0].image_url") == "messages[2].content[0].source"
    assert path("messages[4].content[1].text") == "messages[2].content[1].text"


def test_a_sentence_names_what_the_client_sent():
    said = "messages[1].content[0] has type 'image_url': this engine takes text"
    assert of_message().text(said) == "messages[0].content[0] has type 'image': this engine takes text"
    assert of_response().text(said).startswith("input[0].content[0] has type 'input_image':")
    assert of_response().text("max_tokens is 9, stop at once") == "max_output_tokens is 9, stop at once"
    assert of_message().text("'image_url' alone says nothing") == "'image_url' alone says nothing"


def test_a_type_is_the_clients_where_the_position_is_the_chats():
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [PICTURE]}]}
    wording = MessageTranslation(JsonBody(json.dumps(body).encode())).wording
    assert wording.text("messages[0].content[0] has type 'image_url'").endswith(" has type 'image'")


def test_an_error_is_reworded_on_its_way():
    def fail():
        with of_message().errors(ChatError):
            raise ChatError("messages[1] must be an object", param="messages[1]")

    with pytest.raises(ChatError, match=r"^messages\[0\] must be an object") as caught:
        fail()
    assert caught.value.param == "messages[0]"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("this model's context is 8192 tokens; the prompt has 9000 tokens", "9000 tokens > 8192 maximum"),
        (
            "this model's context is 8192 tokens; the prompt has at least 9000 tokens",
            "9000 tokens > 8192 maximum",
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.",
            "9000 tokens > 8192 maximum",
        ),
        ("it has 9 tokens", "it has 9 tokens"),
    ],
)
def test_agents_read_how_much_too_long_a_prompt_is(said, told):
    error = {"kind": "invalid_request_error", "code": "context_length_exceeded", "more": {"n_ctx": 8}}
    body = json.loads(ANTHROPIC.error(400, said, **error))
    assert body["error"] == {"type": "invalid_request_error", "message": f"prompt is too long: {told}"}
    shown = json.loads(OPENAI.error(400, said, **error))["error"]
    assert (shown["message"], shown["param"], shown["n_ctx"]) == (said, None, 8)
