from array import array

import msgspec
import pytest

from engine_adapter import JsonBody
from engine_adapter.options import PromptFields
from proxy.errors import BadRequest
from proxy.prompt.render import AskedInput, CompletionInput, EmbeddedInput, read_native, read_prompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = PromptFields(text="text", ids="input_ids", unless=frozenset({"image_data"}))
COMPLETION = PromptFields(text="prompt", ids="prompt")


def body_of(fields):
    return JsonBody(msgspec.json.encode(fields))


def read(path, **fields):
    return read_prompt(path, body_of(fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"add_generation_prompt": None, "continue_final_message": None}, (True, False)),
    ],
)
def test_how_a_chat_ends(fields, expected):
    source = read(CHAT, messages=[], **fields)
    assert (source.add_generation_prompt, source.continue_final_message) == expected


@pytest.mark.parametrize(
    ("content", "is_text"),
    [
        ("x", True),
        (None, True),
        ([{"type": "text", "text": "x"}], True),
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}], False),
        ([{"type": "prompt_embeds", "data": ""}], False),
        (["x"], False),
    ],
)
def test_whether_a_chat_is_text(content, is_text):
    assert read(CHAT, messages=[{"role": "user", "content": content}]).is_text is is_text


IDS = array("i", [1, 2, 2**31 - 1])


@pytest.mark.parametrize(
    ("prompt", "expected"), [("text", "text"), (["text"], "text"), ([*IDS], IDS), ([[*IDS]], IDS)]
)
def test_a_completion_with_one_prompt(prompt, expected):
    same = CompletionInput(prompt=expected, add_special_tokens=True, explicit=None, table=None)
    assert read(COMPLETIONS, prompt=prompt) == same
    assert read_native(COMPLETION, body_of({"prompt": prompt})) == same


@pytest.mark.parametrize("prompt", [None, [], [[]], ["a", "b"], [[1], [2]], {"text": "x"}, 5])
def test_prompts_that_are_not_followed(prompt):
    assert read(COMPLETIONS, prompt=prompt) is None


@pytest.mark.parametrize("field", ["input_embeds", "truncate_prompt_tokens", "lora_path", "extra_key"])
def test_prompts_and_adapters_told_in_an_engines_own_way_are_not_followed(field):
    for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": []})):
        assert read(path, **fields, **{field: "x"}) is None
        assert read(path, **fields, **{field: None}) is not None


def test_a_completion_of_embeddings():
    for given in ("x", ["x"]):
        for beside in ({}, {"prompt": None}, {"prompt": ""}, {"prompt": []}):
            assert read(COMPLETIONS, prompt_embeds=given, **beside) == EmbeddedInput("x")
    for several in ({"prompt_embeds": ["x", "y"]}, {"prompt_embeds": "x", "prompt": "y"}):
        assert read(COMPLETIONS, **several) == EmbeddedInput(None)
    assert read(COMPLETIONS, prompt="x", prompt_embeds=[]).prompt == "x"
    assert read(COMPLETIONS, prompt="x", prompt_embeds=None).prompt == "x"
    assert read(COMPLETIONS, prompt_embeds="x", lora_path="y") is None
    assert read(CHAT, messages=[], prompt_embeds="x") is None


def test_ids_from_the_server_that_computed_the_prompt_are_not_read():
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert read(CHAT, **chat, kv_transfer_params={"prompt_token_ids": [1, 2]}) is None
    assert read(CHAT, **chat, kv_transfer_params={"max_load_tokens": 5}) is not None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, 2, 2**31]}, "prompt[2]"),
        (COMPLETIONS, {"prompt": [[1, 2**40]]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "x", "extra_ids": 3}, "extra_ids"),
        (COMPLETIONS, {"prompt": "x", "prompt_table": 3}, "prompt_table"),
        (COMPLETIONS, {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        (CHAT, {"add_generation_prompt": "no"}, "add_generation_prompt"),
        (CHAT, {"continue_final_message": 1}, "continue_final_message"),
    ],
)
def test_what_no_engine_can_take_names_its_field(path, fields, param):
    with pytest.raises(BadRequest) as caught:
        read(path, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "prompt"),
    [({"text": "hi", "input_ids": [1]}, array("i", [1])), ({"text": "hi", "image_data": None}, "hi")],
)
def test_the_one_prompt_of_a_native_route(body, prompt):
    assert read_native(GENERATE, body_of(body)) == CompletionInput(prompt, True, None, None)


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (None, {"prompt": "hi"}),
        (COMPLETION, {}),
        (COMPLETION, {"prompt": ["a", "b"]}),
        (COMPLETION, {"prompt": {"prompt_string": "a", "multimodal_data": []}}),
        (COMPLETION, {"prompt": [True]}),
        (GENERATE, {"text": "hi", "image_data": "data:"}),
    ],
)
def test_what_only_the_engine_knows_of_a_native_route(fields, body):
    assert read_native(fields, body_of(body)) is None


def test_texts_and_ids_of_one_prompt_are_joined_by_the_engine():
    for prompt in ([1, "a"], [["a", 1]]):
        assert read_native(COMPLETION, body_of({"prompt": prompt})) == AskedInput("prompt")


def test_an_id_out_of_range_on_a_native_route():
    with pytest.raises(BadRequest, match="token id"):
        read_native(COMPLETION, body_of({"prompt": [-1]}))
