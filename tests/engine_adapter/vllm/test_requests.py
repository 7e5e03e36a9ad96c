import base64
import hashlib
import io
import json
from array import array

import pytest
import torch

from engine_adapter.errors import EngineRejected
from engine_adapter.types import KvTarget
from engine_adapter.vllm.requests import RequestShaper, has_embeddings, longest_chat, render
from tests.engine_adapter.builders import body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = KvTarget(array("i", [5, 6, 7]), exact=True)


def sent(shaper, path=TEXT, target=PROMPT, *, tell_reuse=False, **fields):
    asked = body(**{"prompt": "some text"} | fields)
    hold = shaper.hold(path, asked, target, tell_reuse=tell_reuse)
    return json.loads(hold.body.raw), hold


@pytest.fixture
def shaper():
    return RequestShaper(asks_usage=True, longest_chat=3)


def test_an_audited_prompt_goes_as_text_and_its_ids_are_asked_for(shaper):
    audited = KvTarget(PROMPT.token_ids, audit=True)
    request, hold = sent(shaper, target=audited)
    assert request == {"prompt": "some text", "return_token_ids": True}
    assert hold.answer is not None
    assert sent(shaper)[0] == {"prompt": [5, 6, 7]}


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((TEXT, {name: 1}) for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs")),
        (TEXT, {"suffix": "s"}),
        (TEXT, {"add_special_tokens": False}),
        (TEXT, {"prompt_embeds": "x"}),
        (TEXT, {"prompt": ["several", "texts"]}),
        (TEXT, {"prompt": [1, 2]}),
        # vLLM needs the text of these chats.
        *((CHAT, MESSAGES | {name: True}) for name in ("echo", "return_prompt_text", "use_beam_search")),
        *((CHAT, MESSAGES | {name: 1}) for name in ("prompt_logprobs", "truncate_prompt_tokens")),
        (CHAT, MESSAGES | {"return_token_offsets": True}),
        (CHAT, MESSAGES | {"kv_transfer_params": {"do_remote_decode": True}}),
    ],
)
def test_prompts_that_go_as_they_are(shaper, path, fields):
    assert sent(shaper, path, **fields)[0] == {"prompt": "some text"} | fields


@pytest.mark.parametrize(
    "target",
    [
        KvTarget(array("i", [5]), exact=False),
        KvTarget(array("i", [5]), array("Q", [9]), exact=True),
        KvTarget(array("i"), exact=True),
        None,
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_ids_that_do_not_stand_for_the_text(shaper, path, target):
    assert sent(shaper, path, target=target)[0] == {"prompt": "some text"}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"tools": [{}], "tool_choice": "auto"}])
def test_chats_go_as_messages_and_token_ids(shaper, fields):
    request = sent(shaper, CHAT, **MESSAGES, **fields)[0]
    assert request.pop("kv_transfer_params") == {"prompt_token_ids": [5, 6, 7]}
    assert request.items() >= MESSAGES.items()


def test_chats_with_tools_need_a_server_that_renders_them():
    shaper = RequestShaper(asks_usage=True, longest_chat=3, renders=False)
    assert "kv_transfer_params" in sent(shaper, CHAT, **MESSAGES)[0]
    for fields in ({"tools": [{}]}, {"tool_choice": "none"}):
        assert "kv_transfer_params" not in sent(shaper, CHAT, **MESSAGES, **fields)[0]


@pytest.mark.parametrize(
    ("version", "context", "longest"),
    [
        ("0.27.0", 100, 99),
        ("0.32.0+cpu", 100, 99),
        ("1.0", 100, 99),
        ("0.26.0", 100, 0),
        ("", 100, 0),
        ("0.32.0", None, 0),
    ],
)
def test_the_version_says_which_chats_may_go_as_ids(version, context, longest):
    assert longest_chat(version, context) == longest


def test_a_chat_that_leaves_no_room_for_an_answer_goes_without_ids():
    shaper = RequestShaper(asks_usage=True, longest_chat=2)
    assert "kv_transfer_params" not in sent(shaper, CHAT, **MESSAGES)[0]


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


PLACE = 4096
ROWS = torch.randn(70, 8)


def encoded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def chat(*parts):
    return body(messages=[{"role": "user", "content": list(parts)}])


def part(tensor):
    return {"type": "prompt_embeds", "data": encoded(tensor)}


def keys_of(embeddings, block):
    """As `_gen_prompt_embeds_extra_hash_keys` of vLLM 0.32 makes them."""
    blocks = [(start, embeddings[start : start + block]) for start in range(0, len(embeddings), block)]
    return tuple((start, hashlib.sha256(rows.numpy().tobytes()).digest()) for start, rows in blocks)


def telling(*token_ids):
    """A server that makes these token ids of a chat."""

    async def tokenize(path, asked):
        if path == TEXT:
            assert asked.get("prompt") == "<prompt_embeds>"
            return array("i", [PLACE])
        return array("i", token_ids)

    return tokenize


@pytest.mark.parametrize(
    "given", [encoded(ROWS), [encoded(ROWS)], encoded(ROWS[None])], ids=["text", "list", "batch"]
)
async def test_a_completion(given):
    rendered = await render(TEXT, body(prompt_embeds=given), block=32, tokenize=telling())
    assert rendered.token_ids == array("i", [0] * 70)
    assert rendered.embeds == keys_of(ROWS, 32)


async def test_a_chat_with_text_between():
    zeros = torch.zeros(100, 8)
    ids = [*range(1, 81), PLACE, PLACE, PLACE, 81, 82, PLACE, PLACE, 83]
    rendered = await render(CHAT, chat(part(ROWS[:3]), part(ROWS[3:5])), block=16, tokenize=telling(*ids))
    assert rendered.token_ids == array("i", [0 if token == PLACE else token for token in ids])
    whole = torch.cat([zeros[:80], ROWS[:3], zeros[:2], ROWS[3:5], zeros[:1]])
    assert rendered.embeds == keys_of(whole, 16)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (TEXT, body(prompt_embeds=[encoded(ROWS), encoded(ROWS)])),
        (TEXT, body(prompt_embeds=encoded(ROWS), prompt="and a text")),
        (TEXT, body(prompt_embeds=[])),
        (TEXT, body(prompt_embeds="no base64")),
        (TEXT, body(prompt_embeds="AAAA")),
        (CHAT, chat(part(ROWS[:3]))),  # the server has room for two
        (CHAT, chat(part(ROWS[:1]), part(ROWS[:1].half()))),
        (CHAT, chat({"type": "prompt_embeds", "data": "AAAA"})),
    ],
)
async def test_what_cannot_be_known(path, asked):
    with pytest.raises(EngineRejected):
        await render(path, asked, block=32, tokenize=telling(1, PLACE, PLACE, 2))


def test_which_requests_have_embeddings():
    assert has_embeddings(TEXT, body(prompt_embeds="AAAA"))
    assert has_embeddings(CHAT, chat({"type": "text", "text": "Hi"}, part(ROWS)))
    for path, asked in (
        (TEXT, body(prompt="prompt_embeds", prompt_embeds=None)),
        (CHAT, chat({"type": "text", "text": "prompt_embeds"})),
        (CHAT, chat({"type": "text", "text": '"prompt_embeds"'})),
        (CHAT, body(messages=5, kind="prompt_embeds")),
        (CHAT, body(messages=[{"role": "user", "content": "Hi"}], kind="prompt_embeds")),
        ("/v1/responses", body(prompt_embeds="AAAA")),
    ):
        assert not has_embeddings(path, asked)
