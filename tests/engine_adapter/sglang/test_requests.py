import json
from array import array
from contextlib import aclosing

import pytest
from starlette.responses import JSONResponse

from engine_adapter import EngineRejected, EngineSpec, JsonBody, KvTarget
from engine_adapter.http.control import ControlClient
from engine_adapter.prompt.template_input import ContentFormat
from engine_adapter.sglang.requests import (
    CHAT,
    COMPLETIONS,
    SGLANG_INPUT,
    DetailsAnswer,
    check_is_one,
    hold_request,
    rendezvous_of,
    tokenize,
    tokenizes_chats,
)
from engine_adapter.types import token_array
from tests.engine_adapter.builders import body
from tests.engine_adapter.sglang.test_findings import server
from tests.engines import engine_spec, served
from tests.fake_engines.sglang import running_sglang
from tests.fake_engines.text import encode

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
IDS = token_array(range(100, 140))
EXACT = KvTarget(IDS, exact=True)


def held(path, fields, prompt=None, *, jinja=True, **info):
    hold = hold_request(server(**info), path, body(**fields), prompt, jinja=jinja)
    return hold, json.loads(hold.body.raw)


@pytest.mark.parametrize(
    ("path", "fields", "prompt", "options", "goes"),
    [
        (CHAT, MESSAGES, EXACT, {}, {"input_ids": IDS.tolist()}),
        (COMPLETIONS, {"prompt": "hi"}, EXACT, {}, {"prompt": IDS.tolist()}),
        # They are not known to be the engine's.
        *((CHAT, MESSAGES, prompt, {}, {}) for prompt in (None, KvTarget(IDS), KvTarget(exact=True))),
        # More than the prompt comes of the text.
        (CHAT, MESSAGES, EXACT, {"jinja": False}, {}),
        (CHAT, MESSAGES | {"add_generation_prompt": False}, EXACT, {}, {}),
        (COMPLETIONS, {"prompt": "hi", "echo": True}, EXACT, {}, {}),
        (COMPLETIONS, {"prompt": [1, 2]}, EXACT, {}, {}),
        (COMPLETIONS, {"prompt": "hi", "add_special_tokens": False}, EXACT, {}, {}),
        (COMPLETIONS, {"prompt": "hi"}, EXACT, {"completion_template": "t"}, {}),
        ("/v1/responses", {"input": "hi"}, EXACT, {}, {}),
    ],
)
def test_tokens_take_the_place_of_what_they_were_made_of(path, fields, prompt, options, goes):
    assert held(path, fields, prompt, **options)[1] == fields | goes


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
        _, body = held(COMPLETIONS, {"prompt": ["x"], "extra_key": [], "cache_salt": "kvpin-one"})
        assert body == {"prompt": ["x"], "cache_salt": "kvpin-one"}

    @pytest.mark.parametrize(
        "path", ["/v1/messages", "/v1/score", "/v1/embeddings", "/classify", "/encode", "/v1/rerank"]
    )
    def test_a_salt_is_not_ignored(self, path):
        with pytest.raises(EngineRejected, match=f"no cache_salt on {path}") as caught:
            held(path, MESSAGES | {"cache_salt": "s"})
        assert (caught.value.status, caught.value.headers) == (403, {"x-should-retry": "false"})
        assert held(path, MESSAGES)[1] == MESSAGES


DETAILS = "return_cached_tokens_details"
LORAS = {"loras": frozenset({"calm", "org:loud"})}
NO_REPORT = {"enable_cache_report": False}
SAME: dict[str, object] = {}


@pytest.mark.parametrize(
    ("path", "fields", "info", "changes"),
    [
        # What is no extra key is left to the engine.
        *((CHAT, MESSAGES | {"extra_key": key}, {}, SAME) for key in ("", None, 3, [1])),
        # A salt on a route without a model is nothing.
        ("/tokenize", {"text": "x", "cache_salt": "s"}, {}, SAME),
        # LoRA adapters are named where SGLang looks for them.
        *((path, {"model": "calm"}, LORAS, {"lora_path": "calm"}) for path in (CHAT, COMPLETIONS)),
        (CHAT, {"model": "org:loud"}, LORAS, {"model": "m:org:loud"}),
        ("/v1/messages", {"model": "calm"}, LORAS, {"model": "m:calm"}),
        *((CHAT, {"model": model}, LORAS, SAME) for model in ("m", None, 7)),
        # Cached tokens: usage is asked for where it tells them, details where it does not.
        (CHAT, MESSAGES | {"stream": True}, {}, {"stream_options": {"include_usage": True}}),
        *((path, {"stream": True}, NO_REPORT, {DETAILS: True}) for path in (CHAT, COMPLETIONS)),
        (CHAT, MESSAGES, NO_REPORT | {"version": "0.5.9"}, SAME),
        (CHAT, MESSAGES, NO_REPORT | {"disable_radix_cache": True}, SAME),
        ("/v1/responses", {"input": "x"}, NO_REPORT, SAME),
        (CHAT, MESSAGES, {}, SAME),
    ],
)
def test_what_a_server_is_sent(path, fields, info, changes):
    hold, goes = held(path, fields, **info)
    assert goes == fields | changes
    assert isinstance(hold.answer, DetailsAnswer) is (DETAILS in changes)
    assert (hold.answer is not None) is bool({DETAILS, "stream_options"} & changes.keys())


def test_adapters_are_not_silently_left_out():
    with pytest.raises(EngineRejected, match="no LoRA adapters on /v1/responses") as caught:
        held("/v1/responses", {"model": "calm"}, **LORAS)
    assert (caught.value.status, caught.value.param) == (400, "model")


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


@pytest.fixture(scope="module")
def running():
    with running_sglang() as running:
        yield running


@pytest.fixture
async def control(running):
    async with aclosing(ControlClient(EngineSpec("sglang", running.url, "e"))) as control:
        yield control


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
    with served(JSONResponse({"object": "error", "message": "no tokenizer", "code": 500}, 500)) as url:
        async with aclosing(ControlClient(EngineSpec("sglang", url, "e"))) as other:
            assert not await tokenizes_chats(other)


HALF = {
    "kv_events": None,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
    "disaggregation_transfer_backend": "nixl",
}


def rendezvous(url="http://gpu-1:30000", rank=None, **fields):
    options = {} if rank is None else {"dp_rank": rank}
    return rendezvous_of(server(**HALF | fields), engine_spec("sglang", url, **options))


class TestMeet:
    def test_in_a_room_at_the_prefill_server(self):
        met = rendezvous("http://[::1]:30000").meet()
        assert (met["bootstrap_host"], met["bootstrap_port"]) == ("::1", 8998)
        assert 0 < met["bootstrap_room"] < 2**63

    @pytest.mark.parametrize("rank", range(3))
    def test_the_room_leads_to_the_rank(self, rank):
        one = rendezvous(rank=rank, dp_size=3)
        rooms = [one.meet()["bootstrap_room"] for _ in range(20)]
        assert {room % 3 for room in rooms} == {rank}
        assert max(rooms) < 2**63

    def test_only_servers_with_the_same_way_to_move_kv(self):
        assert rendezvous().name == rendezvous(disaggregation_mode="decode").name
        assert rendezvous().name != rendezvous(disaggregation_transfer_backend="mooncake").name

    def test_a_whole_server_meets_nobody(self):
        assert rendezvous(disaggregation_mode="null") is None

    def test_only_for_answers(self):
        assert "/v1/completions" in rendezvous().routes
        assert "/tokenize" not in rendezvous().routes


class TestOne:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"text": "a", "sampling_params": {"n": 1}}',
            b'{"input_ids": [1, 2]}',
            b'{"text": "a", "sampling_params": null}',
        ],
    )
    def test_one_answer_to_one_prompt(self, body):
        check_is_one(server(**HALF), "/generate", JsonBody(body))

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            (b'{"text": ["a"]}', "text"),
            (b'{"input_ids": [[1], [2]]}', "input_ids"),
            (b'{"text": "a", "sampling_params": {"n": 2}}', "sampling_params"),
            (b'{"text": "a", "sampling_params": [{}]}', "sampling_params"),
        ],
    )
    def test_no_more(self, body, field):
        with pytest.raises(EngineRejected, match=f"{field} asks for several answers") as caught:
            check_is_one(server(**HALF), "/generate", JsonBody(body))
        assert (caught.value.status, caught.value.param) == (400, field)
        check_is_one(server(**HALF | {"disaggregation_mode": "null"}), "/generate", JsonBody(body))


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (FUNCTION, FUNCTION),
        ({"name": "f"}, {"name": "f", "description": None, "parameters": None}),
        (FUNCTION | {"strict": None, "unknown": 1}, FUNCTION),
        (FUNCTION | {"strict": True}, FUNCTION | {"strict": True}),
        ("no function", "no function"),
    ],
)
def test_a_tool_has_the_fields_of_its_model_in_the_clients_order(function, given):
    (tool,) = SGLANG_INPUT.tools([{"function": function}])
    expected = {"type": "function", "function": given, "defer_loading": None}
    assert (tool, list(tool)) == (expected, list(expected))
    assert list(tool["function"]) == list(given)


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"role": "user", "content": "hi", "name": "ada"}, {"role": "user", "content": "hi"}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"content": "4", "role": "tool", "tool_call_id": "c"},
            {"role": "tool", "content": "4", "tool_call_id": "c"},
        ),
        (
            {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "tool", "content": "a b"},
        ),
    ],
)
def test_a_message_has_the_fields_of_its_model_that_are_given(message, given):
    assert list(SGLANG_INPUT.message(message, ContentFormat.STRING).items()) == list(given.items())


def test_a_call_has_an_index():
    call = {"type": "function", "function": {"arguments": {"a": 1}, "name": "f"}, "id": "c"}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (given,) = SGLANG_INPUT.message(message, ContentFormat.STRING)["tool_calls"]
    function = {"name": "f", "arguments": {"a": 1}}
    assert str(given) == str({"id": "c", "index": None, "type": "function", "function": function})


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat.STRING),
        ("{% for m in messages %}{% for c in m.content %}x{% endfor %}{% endfor %}", ContentFormat.PARTS),
        ("{% for c in message['content'] | list %}x{% endfor %}", ContentFormat.PARTS),
        (
            "{% for turn in messages %}{% for c in turn.content %}x{% endfor %}{% endfor %}",
            ContentFormat.STRING,
        ),
        ("{{ messages }} {# no vision #}", ContentFormat.PARTS),
        ("{% for", ContentFormat.STRING),
    ],
)
def test_parts_go_to_templates_that_name_media_or_loop_over_a_content_of_a_known_name(template, form):
    assert SGLANG_INPUT.content_format(template) is form
