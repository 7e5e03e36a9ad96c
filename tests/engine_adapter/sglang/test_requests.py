import json
from array import array

import pytest
from starlette.responses import JSONResponse

from engine_adapter import EngineRejected, EngineSpec, JsonBody, KvTarget
from engine_adapter.http.control import ControlClient
from engine_adapter.sglang.answer import DetailsAnswer
from engine_adapter.sglang.requests import (
    CHAT,
    COMPLETIONS,
    hold_request,
    tokenize,
    tokenizes_chats,
)
from engine_adapter.types import token_array
from tests.engine_adapter.builders import body
from tests.engine_adapter.sglang.test_findings import server
from tests.engines import served
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.text import encode

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
IDS = token_array(range(100, 140))
EXACT = KvTarget(IDS, exact=True)


def held(path, fields, prompt=None, *, jinja=True, **info):
    hold = hold_request(server(**info), path, JsonBody(json.dumps(fields).encode()), prompt, jinja=jinja)
    return hold, json.loads(hold.body.raw)


class TestTokens:
    def test_take_the_place_of_what_they_were_made_of(self):
        _, chat = held(CHAT, MESSAGES, EXACT)
        assert chat == MESSAGES | {"input_ids": IDS.tolist()}
        _, text = held(COMPLETIONS, {"prompt": "hi"}, EXACT)
        assert text == {"prompt": IDS.tolist()}

    @pytest.mark.parametrize(
        ("path", "fields", "options"),
        [
            (CHAT, MESSAGES, {"jinja": False}),
            (CHAT, MESSAGES | {"add_generation_prompt": False}, {}),
            (COMPLETIONS, {"prompt": "hi", "echo": True}, {}),
            (COMPLETIONS, {"prompt": [1, 2]}, {}),
            (COMPLETIONS, {"prompt": "hi", "add_special_tokens": False}, {}),
            (COMPLETIONS, {"prompt": "hi"}, {"completion_template": "t"}),
            ("/v1/responses", {"input": "hi"}, {}),
        ],
    )
    def test_do_not_where_more_than_the_prompt_comes_of_it(self, path, fields, options):
        assert held(path, fields, EXACT, **options)[1] == fields

    def test_do_not_where_they_are_not_known_to_be_the_engines(self):
        for prompt in (None, KvTarget(IDS), KvTarget(exact=True)):
            assert held(CHAT, MESSAGES, prompt)[1] == MESSAGES


class TestNamespaces:
    def test_an_extra_key_goes_into_the_salt(self):
        salted = MESSAGES | {"cache_salt": "kvpin-one"}
        _, one = held(CHAT, salted | {"extra_key": "a"})
        _, two = held(CHAT, salted | {"extra_key": "b"})
        _, none = held(CHAT, MESSAGES | {"extra_key": "a"})
        assert not any("extra_key" in body for body in (one, two, none))
        assert one["cache_salt"].startswith("kvpin-one-extra-")
        assert len({one["cache_salt"], two["cache_salt"], none["cache_salt"], "kvpin-one"}) == 4

    def test_one_for_each_prompt_of_a_batch(self):
        _, body = held(COMPLETIONS, {"prompt": ["x", "y", "z"], "extra_key": ["a", "b", ""]})
        first, second, third = body["cache_salt"]
        assert (first == second, third) == (False, "")

    def test_no_keys_leave_the_salt(self):
        _, body = held(COMPLETIONS, {"prompt": ["x"], "extra_key": [], "cache_salt": "kvpin-one"})
        assert body == {"prompt": ["x"], "cache_salt": "kvpin-one"}

    @pytest.mark.parametrize("key", ["", None, 3, [1]])
    def test_what_is_no_key_is_left_to_the_engine(self, key):
        body = MESSAGES | {"extra_key": key}
        assert held(CHAT, body)[1] == body

    @pytest.mark.parametrize(
        "path", ["/v1/messages", "/v1/score", "/v1/embeddings", "/classify", "/encode", "/v1/rerank"]
    )
    def test_a_salt_is_not_ignored(self, path):
        with pytest.raises(EngineRejected, match=f"no cache_salt on {path}") as caught:
            held(path, MESSAGES | {"cache_salt": "s"})
        assert (caught.value.status, caught.value.headers) == (403, {"x-should-retry": "false"})
        assert held(path, MESSAGES)[1] == MESSAGES

    def test_a_salt_on_a_route_without_a_model_is_nothing(self):
        body = {"text": "x", "cache_salt": "s"}
        assert held("/tokenize", body)[1] == body


class TestAdapters:
    NAMES = frozenset({"calm", "org:loud"})

    def test_are_named_where_sglang_looks_for_them(self):
        for path in (CHAT, COMPLETIONS):
            fields = {"model": "calm", "prompt": "x"}
            assert held(path, fields, loras=self.NAMES)[1] == fields | {"lora_path": "calm"}
        _, body = held(CHAT, {"model": "org:loud"}, loras=self.NAMES)
        assert body == {"model": "m:org:loud"}
        _, body = held("/v1/messages", {"model": "calm"}, loras=self.NAMES)
        assert body == {"model": "m:calm"}

    def test_are_not_silently_left_out(self):
        with pytest.raises(EngineRejected, match="no LoRA adapters on /v1/responses") as caught:
            held("/v1/responses", {"model": "calm"}, loras=self.NAMES)
        assert (caught.value.status, caught.value.param) == (400, "model")

    @pytest.mark.parametrize("model", ["m", None, 7])
    def test_the_model_itself(self, model):
        assert held(CHAT, {"model": model}, loras=self.NAMES)[1] == {"model": model}


class TestCachedTokens:
    def test_usage_is_asked_for_where_it_tells_them(self):
        hold, body = held(CHAT, MESSAGES | {"stream": True})
        assert body["stream_options"] == {"include_usage": True}
        assert hold.answer is not None
        assert held(CHAT, MESSAGES)[0].answer is None

    def test_details_are_asked_for_where_it_does_not(self):
        for path in (CHAT, COMPLETIONS):
            hold, body = held(path, {"stream": True}, enable_cache_report=False)
            assert body == {"stream": True, "return_cached_tokens_details": True}
            assert isinstance(hold.answer, DetailsAnswer)
        assert held("/v1/responses", {"input": "x"}, enable_cache_report=False)[0].answer is None

    @pytest.mark.parametrize("fields", [{"version": "0.5.9"}, {"disable_radix_cache": True}])
    def test_nothing_is_asked_for_where_there_is_nothing(self, fields):
        hold, body = held(CHAT, MESSAGES, enable_cache_report=False, **fields)
        assert (body, hold.answer) == (MESSAGES, None)


class TestForesight:
    @pytest.mark.parametrize(
        ("path", "fields", "info", "cached"),
        [
            (CHAT, MESSAGES, {}, None),
            (CHAT, MESSAGES | {"n": 1}, {}, None),
            (CHAT, MESSAGES | {"n": 2}, {}, 32),
            (COMPLETIONS, {"prompt": "x", "n": 3}, {"kv_events": None, "page_size": 1}, 39),
            (COMPLETIONS, {"prompt": "x", "n": 3}, {"kv_events": None, "page_size": None}, None),
            (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, {}, 0),
            (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 0}, {}, None),
            (COMPLETIONS, {"prompt": "x"}, {"completion_template": "t"}, 0),
            (COMPLETIONS, {"prompt": [1]}, {"completion_template": "t"}, None),
        ],
    )
    def test_what_the_index_cannot_tell(self, path, fields, info, cached):
        hold, _ = held(path, fields, EXACT, **info)
        assert hold.cached_tokens == cached
        assert hold.firm is (cached is None)
        assert held(path, fields, None, **info)[0].cached_tokens is None


USER = {"role": "user", "content": "Weather in Paris?"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def running():
    with running_sglang() as running:
        yield running


@pytest.fixture
async def control(running):
    control = ControlClient(EngineSpec("sglang", running.url, "e"))
    yield control
    await control.aclose()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True},
        {"messages": [USER], "add_generation_prompt": False},  # chats have no such field
        {"messages": [USER], "prompt": "x", "add_special_tokens": True},
        {"messages": [USER], "input_ids": [5, 6, 7]},
    ],
)
async def test_are_those_that_the_chat_is_served_with(control, fields):
    tokens = await tokenize(control, CHAT, body(**fields))
    sent = fields | {"model": "tiny", "max_tokens": 1}
    answer = await control.call("POST", CHAT, json=sent)
    again = await control.call("POST", CHAT, json=sent | {"input_ids": tokens.tolist()})
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens) - 1
    assert again["choices"] == answer["choices"]


async def test_fields_that_do_not_make_the_prompt_are_not_sent(control):
    """The route refuses some of them, above all `stream`."""
    asked = body(messages=[USER], stream=True, stream_options={"include_usage": True}, n=2, max_tokens=0)
    assert await tokenize(control, CHAT, asked) == await tokenize(control, CHAT, body(messages=[USER]))


async def test_of_a_text(control):
    expected = array("i", encode("Hello there"))
    for prompt in ("Hello there", ["Hello there"]):
        # SGLang's completions always add special tokens.
        assert await tokenize(control, COMPLETIONS, body(prompt=prompt, add_special_tokens=False)) == expected


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400),
        (COMPLETIONS, {"prompt": [1, 2]}, 400),
        (COMPLETIONS, {}, 400),
        (CHAT, {"messages": []}, 400),
        ("/v1/responses", {"input": "hi"}, 404),
    ],
)
async def test_that_are_not_told(control, path, fields, status):
    with pytest.raises(EngineRejected) as caught:
        await tokenize(control, path, body(**fields))
    assert caught.value.status == status


async def test_a_server_without_a_tokenizer(control):
    assert await tokenizes_chats(control)
    with served(_nothing) as url:
        other = ControlClient(EngineSpec("sglang", url, "e"))
        assert not await tokenizes_chats(other)
        await other.aclose()


async def _nothing(scope, receive, send):
    error = {"object": "error", "message": "no tokenizer", "type": "x", "param": None, "code": 500}
    await JSONResponse(error, 500)(scope, receive, send)
