"""What is assembled equals what the server answers when it is not asked for a stream."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.llama_server.assemble import assemble, streaming_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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
    "two choices": {"max_tokens": 5, "n": 2},
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
    "two choices": {"max_tokens": 5, "n": 2},
    "two prompts": {"max_tokens": 5, "prompt": ["one", "and another"]},
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
    fields = {**FIXED, **fields} if "n" in fields else {**FIXED, "id_slot": SLOT, **fields}
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


def chunk(index=0, finish_reason=None, **fields):
    choice = {"index": index, "finish_reason": finish_reason, **fields}
    return b"data: " + msgspec.json.encode({"choices": [choice], "id": "x", "object": "chunk"}) + b"\n\n"


def call(index, **fields):
    return chunk(delta={"tool_calls": [{"index": index, **fields}]})


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"code":%s,"message":"no room","type":"server_error"}}\n\n'


def test_parallel_tool_calls_come_in_parts_and_a_name_may_grow():
    stream = b"".join(
        (
            chunk(delta={"role": "assistant", "content": None}),
            call(0, id="a", type="function", function={"name": "get"}),
            call(0, id="a", type="function", function={"name": "get_weather"}),
            call(0, function={"arguments": '{"city":'}),
            call(1, function={"name": "other", "arguments": "{}"}),
            call(0, function={"arguments": '"Paris"}'}),
            chunk(delta={}, finish_reason="tool_calls"),
            DONE,
        )
    )
    (choice,) = json.loads(assemble(CHAT, stream))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
                "id": "a",
            },
            {"type": "function", "function": {"name": "other", "arguments": "{}"}},
        ],
    }


@pytest.mark.parametrize(
    ("code", "error"),
    [(b"422", EngineRejected), *((code, EngineUnavailable) for code in (b"503", b"7", b"null"))],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_error_in_the_stream_is_raised(path, code, error):
    with pytest.raises(error, match=r"^no room$") as raised:
        assemble(path, chunk(text="a", delta={"content": "a"}) + ERROR % code + DONE)
    assert getattr(raised.value, "status", 422) == 422


ENDED = chunk(text="a", finish_reason="stop")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        DONE,
        chunk(text="a"),
        chunk(text="a") + DONE,
        ENDED,
        ENDED + DONE.strip(),
        ENDED + chunk(index=1, text="b") + DONE,
        chunk(index=1, text="b", finish_reason="stop") + DONE,
    ],
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


def test_comments_and_empty_events_are_passed_over():
    assert json.loads(assemble(COMPLETIONS, b":\n\ndata: null\n\n" + ENDED + b":\n\n" + DONE))["choices"] == [
        {"text": "a", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]


def body(**fields):
    return JsonBody(msgspec.json.encode(fields))


def test_a_body_is_made_a_stream_with_usage():
    for path in (CHAT, COMPLETIONS):
        made = json.loads(streaming_body(path, body(a=1, stream=False, stream_options=None)).raw)
        assert made == {"a": 1, "stream": True, "stream_options": {"include_usage": True}}


def test_what_is_a_stream_or_cannot_be_one_stays_as_it_is(llama):
    assert streaming_body(CHAT, body(stream=True)) is None
    assert streaming_body("/v1/embeddings", body(input="a")) is None
    refused = {"messages": USER, "tools": [TOOL], "logprobs": True, "max_tokens": 1}
    assert streaming_body(CHAT, body(**refused)) is None
    for stream, status in ((True, 400), (False, 200)):
        answer = httpx.post(f"{llama.url}{CHAT}", json={**refused, "stream": stream}, trust_env=False)
        assert answer.status_code == status
