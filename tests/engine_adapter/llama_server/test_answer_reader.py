"""What a lease learns of an answer that passes, and what a client gets who wanted no stream."""

from __future__ import annotations

import json
from array import array

import httpx
import msgspec
import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.llama_server import requests
from engine_adapter.llama_server.answer import CompletionOutput, read_answer, slot_content
from engine_adapter.llama_server.requests import (
    NativeAnswer,
    SlotAnswer,
    SlotsAnswer,
    read_by,
    streaming_body,
)
from tests.engine_adapter.builders import body
from tests.engine_adapter.llama_server.answers import DONE, delta, event, lease_of, native_stream, part

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
WHOLE = b"".join(
    [
        delta(role="assistant", content=None),
        delta(content="he"),
        delta(content="llo"),
        part("stop", delta={}),
        event(id="x", model="m", choices=[], usage=USAGE),
        DONE,
    ]
)


def assemble(path, stream):
    return read_answer(stream).assembled(path)


@pytest.fixture
def lease():
    return lease_of()


def reading(lease, raw, *, assembles):
    """The reader of an answer that came in small pieces."""
    reader = SlotAnswer(CHAT, lease, assembles=assembles)
    for at in range(0, len(raw), 7):
        reader.feed(raw[at : at + 7])
    return reader


def test_it_tells_how_long_its_end_takes(lease):
    reader = SlotAnswer(CHAT, lease, assembles=True)
    reader.feed(WHOLE)
    assert 0 < reader.finish_ms < 1  # on the event loop
    reader.feed(delta(content="x" * 10) * 10_000)
    assert reader.finish_ms > 50


def test_a_lease_learns_what_the_answer_said(lease):
    reader = reading(lease, WHOLE, assembles=False)
    assert (lease.has_begun, lease.answer) == (True, None)
    assert reader.finish() == b""
    assert (lease.answer.prompt_tokens, lease.answer.sampled_tokens) == (9, 2)
    assert (lease.answer.pieces, lease.answer.is_complete) == (["he", "llo"], True)
    assert reader.cached_tokens() == 5


@pytest.mark.parametrize("most", [requests.MAX_BYTES, len(WHOLE) - 1], ids=["short", "long"])
def test_who_wanted_no_stream_gets_one_answer_however_long(lease, monkeypatch, most):
    monkeypatch.setattr(requests, "MAX_BYTES", most)
    reader = reading(lease, WHOLE, assembles=True)
    answer = msgspec.json.decode(reader.finish())
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert (answer["object"], answer["usage"]) == ("chat.completion", USAGE)
    assert (reader.cached_tokens(), lease.answer.is_complete) == (5, True)


def test_a_longer_answer_than_is_read_is_passed_on_and_not_kept(lease, monkeypatch):
    monkeypatch.setattr(requests, "MAX_BYTES", len(WHOLE) - 1)
    reader = reading(lease, WHOLE, assembles=False)
    assert reader.finish() == b""
    assert (lease.has_begun, lease.answer, reader.cached_tokens()) == (True, None, None)
    assert reader._chunks == []


SLOT = 2
# Without the cache, so that an answer is computed the same way twice.
FIXED = {"temperature": 0, "seed": 1, "cache_prompt": False}
USER = [{"role": "user", "content": "Zażółć gęślą jaźń"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Kraków"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALLING = {"role": "assistant", "content": "<tool_call>\n{"}
THOUGHT = 'root ::= "<think>\\n" [a-z]{3,9} "\\n</think>\\n\\n" [a-z]{3,9}'
CHARACTERS = "root ::= ([a-z] [é🙂漢]){4}"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer <tool_call>
{"name": name, "arguments": arguments}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CHATS = {
    "short": {"max_tokens": 8},
    "one token": {"max_tokens": 0},
    "to the end of the turn": {"max_tokens": 400},
    "stop string": {"max_tokens": 60, "stop": [" re", "e"]},
    "characters of several tokens": {"max_tokens": 60, "grammar": CHARACTERS},
    "logprobs": {"max_tokens": 5, "logprobs": True, "top_logprobs": 2},
    "timings, progress": {"max_tokens": 5, "timings_per_token": True, "return_progress": True},
    "told not to stream": {"max_tokens": 5, "stream": False, "stream_options": {"include_usage": False}},
    "schema": {
        "max_tokens": 30,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}},
    },
}
TEXTS = {
    "short": {"max_tokens": 8},
    "one token": {"max_tokens": 0},
    "to the end of the turn": {"max_tokens": 400, "logprobs": 1},
    "stop string": {"max_tokens": 60, "stop": [" re", "e"]},
    "characters of several tokens": {"max_tokens": 60, "grammar": CHARACTERS, "logprobs": 2},
}


def comparable(answer):
    """An answer without what differs from one to the next: names, times."""
    answer = {name: value for name, value in answer.items() if name not in ("id", "created")}
    if "timings" in answer:
        answer["timings"] = {name: n for name, n in answer["timings"].items() if name.endswith("_n")}
    for choice in answer.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id")
    return answer


def both(url, path, fields):
    """The server's own answer, and the one assembled from its stream."""
    fields = {**FIXED, "id_slot": SLOT, **fields}
    streamed = streaming_body(path, JsonBody(msgspec.json.encode(fields)))
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        whole = client.post(path, json=fields)
        stream = client.post(path, content=streamed.raw)
    assert (whole.status_code, stream.status_code) == (200, 200)
    assert stream.headers["content-type"].startswith("text/event-stream")
    return comparable(whole.json()), comparable(json.loads(assemble(path, stream.content)))


@pytest.mark.parametrize("name", CHATS)
def test_chats(llama, name):
    whole, assembled = both(llama.url, CHAT, {"messages": USER, **CHATS[name]})
    assert assembled == whole


@pytest.mark.parametrize("name", TEXTS)
def test_completions(llama, name):
    whole, assembled = both(llama.url, COMPLETIONS, {"prompt": "größer", **TEXTS[name]})
    assert assembled == whole


def test_reasoning_and_tool_calls(start_llama, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    url = start_llama("--chat-template-file", str(template)).url

    thinks = {"messages": USER, "max_tokens": 60, "grammar": THOUGHT}
    whole, assembled = both(url, CHAT, thinks)
    assert whole["choices"][0]["message"].keys() == {"role", "content", "reasoning_content"}
    assert assembled == whole

    calls = {"messages": [*USER, CALLING], "tools": [TOOL], "tool_choice": "required"}
    for max_tokens, count, reason in ((40, 1, "length"), (80, 1, "length"), (300, 2, "tool_calls")):
        whole, assembled = both(url, CHAT, {**calls, "max_tokens": max_tokens})
        choice = whole["choices"][0]
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (count, reason)
        assert assembled == whole


def call(index, **fields):
    return delta(tool_calls=[{"index": index, **fields}])


ERROR = b'data: {"error":{"code":%s,"message":"no room","type":"server_error"}}\n\n'


def test_parallel_tool_calls_come_in_parts_and_a_name_may_grow():
    stream = b"".join(
        (
            delta(role="assistant", content=None),
            call(0, id="a", type="function", function={"name": "get"}),
            call(0, id="a", type="function", function={"name": "get_weather"}),
            call(0, function={"arguments": '{"city":'}),
            call(1, function={"name": "other", "arguments": "{}"}),
            call(0, function={"arguments": '"Paris"}'}),
            part(delta={}, finish_reason="tool_calls"),
            DONE,
        )
    )
    (choice,) = json.loads(assemble(CHAT, stream))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    weather = {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    assert choice["message"]["tool_calls"] == [
        {"type": "function", "function": weather, "id": "a"},
        {"type": "function", "function": {"name": "other", "arguments": "{}"}},
    ]


@pytest.mark.parametrize(("code", "status"), [(b"422", 422), (b"503", 503), (b"7", 500), (b"null", 500)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_error_in_the_stream_is_raised(path, code, status):
    with pytest.raises(EngineRejected, match=r"^no room$") as raised:
        assemble(path, part(text="a", delta={"content": "a"}) + ERROR % code + DONE)
    assert raised.value.status == status
    assert "x-should-retry" not in raised.value.headers


UNPARSED = [
    event(error={"code": 500, "message": f"{said}: <tool", "type": "server_error"})
    for said in (
        "Failed to parse input at pos 12",
        "The model produced output that does not match the expected peg-native format",
    )
]


@pytest.mark.parametrize("error", UNPARSED)
def test_what_was_parsed_of_an_answer_is_the_answer(lease, error):
    begun = delta(role="assistant", content=None) + delta(content="Let me look")
    reader = reading(lease, begun + call(0, id="a", function={"name": "get"}) + error, assembles=True)
    answer = json.loads(reader.finish())
    (choice,) = answer["choices"]
    assert (answer["id"], choice["finish_reason"]) == ("x", "stop")
    assert choice["message"]["content"] == "Let me look"
    assert reader.note == "llama-server could not parse the whole answer: its end is missing"
    assert lease.answer.error is not None  # its slot is read from the file


@pytest.mark.parametrize("error", UNPARSED)
def test_an_answer_of_which_nothing_was_parsed_is_not_made_again(lease, error):
    reader = reading(lease, delta(role="assistant", content=None) + error, assembles=True)
    with pytest.raises(EngineRejected) as raised:
        reader.finish()
    assert (raised.value.status, raised.value.headers) == (500, {"x-should-retry": "false"})


ENDED = part(text="a", finish_reason="stop")


@pytest.mark.parametrize(
    "stream",
    [b"", DONE, part(text="a"), part(text="a") + DONE, ENDED],
    ids=["empty", "no choice", "cut", "no finish reason", "no end"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_breaks_off_is_an_error(path, stream):
    with pytest.raises(EngineUnavailable, match="ended its answer too early"):
        assemble(path, stream)


@pytest.mark.parametrize(
    "payload", [b"{", b"[]", b'"\xff"', b"[" * 5000, b'{"choices":7}', b'{"choices":[{"text":7}]}']
)
def test_a_chunk_that_cannot_be_read_is_an_error(payload):
    with pytest.raises(EngineUnavailable, match="an unreadable chunk"):
        assemble(COMPLETIONS, b"data: " + payload + b"\n\n" + ENDED + DONE)


def test_what_is_a_stream_or_cannot_be_one_stays_as_it_is(llama):
    assert streaming_body(CHAT, body(stream=True)) is None
    assert streaming_body("/v1/embeddings", body(input="a")) is None
    refused = {"messages": USER, "tools": [TOOL], "logprobs": True, "max_tokens": 1}
    assert streaming_body(CHAT, body(**refused)) is None
    for stream, status in ((True, 400), (False, 200)):
        answer = httpx.post(f"{llama.url}{CHAT}", json={**refused, "stream": stream}, trust_env=False)
        assert answer.status_code == status


PROMPT = array("i", [1, 2, 3])
COUNTS = {"tokens_evaluated": 3, "tokens_predicted": 3}
END = COUNTS | {"stop": True, "truncated": False, "timings": {"cache_n": 2, "prompt_n": 1}}


def test_a_whole_answer_tells_all_tokens_and_the_client_gets_what_it_asked_for():
    raw = msgspec.json.encode({"content": "abc", "tokens": [7, 8, 9], **END})
    for hides, tokens in ((True, b"[]"), (False, b"[7,8,9]")):
        held = lease_of(PROMPT)
        reader = NativeAnswer(held, hides_tokens=hides)
        assert reader.feed(raw) + reader.finish() == raw.replace(b"[7,8,9]", tokens)
        assert (held.has_begun, reader.cached_tokens(), reader.prompt_tokens()) == (True, 2, None)
        assert slot_content(PROMPT, held.answer, held.answer.token_ids) == (array("i", [1, 2, 3, 7, 8]), 0)


@pytest.mark.parametrize("raw", [b"{}", b'{"content":"a"}', b"[]", b"no json"])
def test_other_answers_pass(lease, raw):
    assert NativeAnswer(lease, hides_tokens=True).feed(raw) == raw
    assert not lease.answer.is_complete


@pytest.mark.parametrize(
    ("tokens", "end", "told", "content"),
    [
        pytest.param([(7, 1), (8, 2), (9, 3)], END, [7, 8, 9], ([1, 2, 3, 7, 8], 0), id="all"),
        # A character of several tokens has one event, with the last of them.
        pytest.param([(7, 1), (9, 3)], END, [7], ([1, 2, 3, 7], 1), id="up to the first it leaves out"),
        pytest.param([(7, 1)], END | {"truncated": True}, [7], ([], 5), id="none after it dropped some"),
    ],
)
def test_which_tokens_a_stream_tells(tokens, end, told, content):
    answer = read_answer(native_stream(*tokens, **end))
    assert (answer.is_complete, list(answer.token_ids)) == (True, told)
    known, unknown = slot_content(PROMPT, answer, answer.token_ids)
    assert (list(known), unknown) == content


@pytest.mark.parametrize("name", END)
def test_an_answer_whose_client_chose_its_fields_tells_no_more_than_is_there(name):
    fields = {key: value for key, value in END.items() if key != name}
    answer = CompletionOutput()
    answer.read(msgspec.json.encode({"tokens": [7, 8, 9], **fields}))
    assert answer.is_complete is (name in ("truncated", "timings"))
    assert (answer.error is None) is (name != "truncated")


def test_token_ids_are_asked_for_where_that_changes_nothing_for_the_client():
    for path in ("/completion", "/completions", "/infill"):
        sent, reader = read_by(path, body(prompt="a"), lease_of(PROMPT))
        assert sent.get("return_tokens") is True
        assert reader.feed(b'{"tokens":[7]}') == b'{"tokens":[]}'
    for fields in ({"stream": True}, {"return_tokens": True}, {"response_fields": ["content"]}):
        asked = body(prompt="a", **fields)
        sent, reader = read_by("/completion", asked, lease_of(PROMPT))
        assert sent.raw == asked.raw
        assert reader.feed(b'{"tokens":[7]}') == b'{"tokens":[7]}'


def test_slots_show_nothing_of_requests():
    slot = {"id": 0, "is_processing": False, "prompt": "secret", "generated": "x", "params": {"stop": ["y"]}}
    reader = SlotsAnswer()
    shown = reader.feed(msgspec.json.encode([slot])) + reader.finish()
    assert msgspec.json.decode(shown) == [{"id": 0, "is_processing": False}]
    assert (reader.cached_tokens(), reader.prompt_tokens()) == (None, None)
    assert reader.feed(b"") == b"", "the answer to HEAD"
    with pytest.raises(EngineUnavailable, match="not a list of slots"):
        reader.feed(b'{"prompt": "secret"}')
