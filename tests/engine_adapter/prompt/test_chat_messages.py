import base64
import copy
import re

import numpy as np
import pytest
from safetensors.numpy import save

from engine_adapter.errors import ChatError, PromptTableError
from engine_adapter.prompt.chat import normalize_messages
from engine_adapter.prompt.template_input import ContentFormat

PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def embeds(rows=2, hidden=4):
    return base64.b64encode(save({"t": np.ones((rows, hidden), np.float32)})).decode()


def content_of(parts, wanted=ContentFormat.STRING):
    normal = normalize_messages([{"role": "user", "content": parts}], wanted, hidden_size=4)
    return normal.messages[0]["content"], normal.embeddings


def text(value):
    return {"type": "text", "text": value}


def test_text_parts_are_joined_with_newlines():
    assert content_of([text("a"), text(""), text("b")])[0] == "a\n\nb"


def test_text_parts_stay_parts_where_the_template_takes_them():
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert content_of([part, text("b")], ContentFormat.PARTS)[0] == [text("a"), text("b")]


def test_embeddings_touch_the_text_beside_them():
    part = {"type": "prompt_embeds", "data": embeds()}
    content, slots = content_of([text("a"), part, part, text("b"), text("c")])
    one, two = slots
    assert content == f"a{one}{two}b\nc"
    assert [(param, embeddings.rows) for param, embeddings in slots.values()] == [
        ("messages[0].content[1].data", 2),
        ("messages[0].content[2].data", 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Paris", "n": 12345678901234567890123}', {"city": "Paris", "n": 12345678901234567890123}),
        ({"already": "an object"}, {"already": "an object"}),
        ('{"city": ', {}),
        ("", {}),
        ("[" * 1_000_000, {}),
    ],
    ids=["an object", "no text", "broken", "empty", "too deep"],
)
def test_tool_call_arguments_become_objects(arguments, expected):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    normal = normalize_messages(messages, ContentFormat.STRING).messages
    assert normal[0]["tool_calls"] == [call | {"function": {"name": "f", "arguments": expected}}]
    assert messages == before


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [text("x"), PNG]}], "messages[0].content[1].type"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_an_error_names_the_field(messages, param):
    with pytest.raises(ChatError) as caught:
        normalize_messages(messages, ContentFormat.STRING)
    assert caught.value.param == param
    assert param.removesuffix(".type") in str(caught.value)


def test_other_part_types_are_told_what_the_engine_takes():
    with pytest.raises(ChatError, match="'image_url': this engine takes text and prompt_embeds"):
        content_of([PNG])


@pytest.mark.parametrize("data", [None, "not base64!", embeds(hidden=5)])
def test_bad_embeddings_name_their_field(data):
    with pytest.raises(PromptTableError) as caught:
        content_of([text("a"), {"type": "prompt_embeds", "data": data}])
    assert caught.value.param == "messages[0].content[1].data"


def test_embeddings_need_a_hidden_size():
    message = {"role": "user", "content": [{"type": "prompt_embeds", "data": embeds()}]}
    with pytest.raises(ChatError, match="cannot be used here"):
        normalize_messages([message], ContentFormat.STRING)


def test_markers_are_found_by_one_pattern_however_many_there_are():
    """An alternative for each of them took time that grows with the square of their number."""
    parts = [{"type": "prompt_embeds", "data": embeds()}] * 12
    normal = normalize_messages([{"role": "user", "content": parts}], ContentFormat.STRING, hidden_size=4)
    assert re.fullmatch(r"\(kvpin[0-9a-f]{32}x\[0-9\]\+x\)", normal.marker_pattern)
    assert re.findall(normal.marker_pattern, normal.messages[0]["content"]) == list(normal.embeddings)
