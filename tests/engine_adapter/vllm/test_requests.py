import json
from array import array

import pytest

from engine_adapter.body import JsonBody
from engine_adapter.types import KvTarget
from engine_adapter.vllm.requests import RequestShaper

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = KvTarget(array("i", [5, 6, 7]), exact=True)


def sent(shaper, path=TEXT, target=PROMPT, *, tell_reuse=False, **fields):
    body = JsonBody(json.dumps({"prompt": "some text", **fields}).encode())
    hold = shaper.hold(path, body, target, tell_reuse=tell_reuse)
    return json.loads(hold.body.raw), hold


@pytest.fixture
def shaper():
    """One that is past its first samples."""
    shaper = RequestShaper(asks_usage=True)
    for _ in range(16):
        sent(shaper)
    return shaper


def test_the_first_prompts_and_then_one_in_a_hundred_are_compared():
    shaper = RequestShaper(asks_usage=True)
    requests = [sent(shaper)[0] for _ in range(200)]
    compared = [at for at, request in enumerate(requests, 1) if request.get("return_token_ids")]
    assert compared == [*range(1, 17), 100, 200]
    assert {str(request["prompt"]) for request in requests} == {"some text", "[5, 6, 7]"}
    assert all(
        (at in compared) == (request["prompt"] == "some text") for at, request in enumerate(requests, 1)
    )


def test_what_is_not_known_is_not_compared():
    shaper = RequestShaper(asks_usage=True)
    request, hold = sent(shaper, target=None)
    assert request == {"prompt": "some text"}
    assert hold.answer is None


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"suffix": "s"},
        {"truncate_prompt_tokens": 5},
        {"add_special_tokens": False},
        {"prompt_embeds": "x"},
        {"prompt_logprobs": 1},
        {"prompt": ["several", "texts"]},
        {"prompt": [1, 2]},
    ],
)
def test_prompts_that_go_as_they_are(shaper, fields):
    assert sent(shaper, **fields)[0] == {"prompt": "some text"} | fields


@pytest.mark.parametrize(
    "target",
    [
        KvTarget(array("i", [5]), exact=False),
        KvTarget(array("i", [5]), array("Q", [9]), exact=True),
        KvTarget(array("i"), exact=True),
        None,
    ],
)
def test_ids_that_do_not_stand_for_the_text(shaper, target):
    assert sent(shaper, target=target)[0] == {"prompt": "some text"}


def test_chats_keep_their_messages(shaper):
    messages = [{"role": "user", "content": "Hi"}]
    assert sent(shaper, CHAT, messages=messages)[0] == {"prompt": "some text", "messages": messages}


def test_streams_are_asked_for_what_they_reused(shaper):
    request, hold = sent(shaper, CHAT, stream=True)
    assert request["stream_options"] == {"include_usage": True}
    assert hold.answer is not None
    blind = RequestShaper(asks_usage=False)
    assert "stream_options" not in sent(blind, CHAT, stream=True)[0]


@pytest.mark.parametrize(
    ("given", "goes"),
    [
        (None, {"kv_cache_report_mode": "full"}),
        ({"a": 1}, {"kv_cache_report_mode": "full", "a": 1}),
        ({"kv_cache_report_mode": "incremental"}, {"kv_cache_report_mode": "incremental"}),
        ("nonsense", "nonsense"),
    ],
)
def test_reuse_is_announced_beside_what_the_client_wants(shaper, given, goes):
    fields = {} if given is None else {"vllm_xargs": given}
    assert sent(shaper, CHAT, tell_reuse=True, **fields)[0]["vllm_xargs"] == goes


@pytest.mark.parametrize(
    ("path", "fields", "cached"),
    [
        (TEXT, {"prompt_logprobs": 0}, 0),
        (CHAT, {"prompt_logprobs": 1}, 0),
        (TEXT, {"echo": True, "logprobs": 0}, 0),
        (TEXT, {"echo": True}, None),
        (TEXT, {"logprobs": 1}, None),
        (CHAT, {"echo": True, "logprobs": True}, None),
    ],
)
def test_prompts_that_are_computed_whole(shaper, path, fields, cached):
    assert sent(shaper, path, **fields)[1].cached_tokens == cached


def test_other_routes_are_left_alone(shaper):
    request, hold = sent(shaper, "/v1/embeddings", tell_reuse=True)
    assert request == {"prompt": "some text"}
    assert (hold.answer, hold.cached_tokens) == (None, None)


@pytest.mark.parametrize(
    ("fields", "firm"), [({}, True), ({"n": 1}, True), ({"n": 2, "stream": True}, True), ({"n": 2}, False)]
)
def test_what_is_reported_of_several_choices_is_not_that_of_the_first(shaper, fields, firm):
    for path in (TEXT, CHAT):
        assert sent(shaper, path, **fields)[1].firm is firm
