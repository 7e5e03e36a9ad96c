"""Anthropic's answers, from those of chats."""

import json

import pytest

from engine_adapter import JsonBody
from proxy.errors import EngineFailed
from proxy.request.translate import MessageTranslation
from tests.fakes import ANSWER, DONE, event
from tests.proxy.request.passing import passed

USER = [{"role": "user", "content": "Hi"}]
USAGE = {"choices": None, "usage": ANSWER["usage"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}
MARKED = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}


def made(**fields):
    """A request's translation; fields that are None are left out."""
    body = {"model": "m", "max_tokens": 9, "messages": USER, **fields}
    given = {name: value for name, value in body.items() if value is not None}
    return MessageTranslation(JsonBody(json.dumps(given).encode()))


def told_of(chat, **fields):
    return json.loads(passed(made(**fields), whole=json.dumps(chat).encode()).body)


def whole(said, finish="stop", usage=None, *, fields=None, **choice):
    chat = {"model": "m", "choices": [{"message": said, "finish_reason": finish, **choice}], "usage": usage}
    return told_of(chat, **fields or {})


def chunk(delta=None, finish=None, **fields):
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **fields}


def events_of(raw):
    events = [each.split(b"\n") for each in raw.strip().split(b"\n\n")]
    found = [json.loads(data.removeprefix(b"data: ")) for _, data in events]
    assert [name.decode() for name, _ in events] == [f"event: {each['type']}" for each in found]
    return found


def streamed(*chunks, **fields):
    return events_of(passed(made(**fields), chunks=[*map(event, chunks), DONE]).body)


def brief(event):
    kind = event["type"].rpartition("_")[2]
    given = event.get("delta") or event.get("content_block") or {"": None}
    *_, last = given.values() if kind != "start" else [given["type"]]
    return kind, event.get("index"), given.get("stop_reason", last) if "index" not in event else last


def of_calls_by_id(*, is_whole):
    """Chunks of two calls that only have ids, each `is_whole` or in pieces."""
    for name in ("c1", "c2"):
        if is_whole:
            yield chunk({"tool_calls": [CALL | {"id": name}]})
        else:
            yield chunk({"tool_calls": [{"id": name, "function": {"name": "tide", "arguments": ""}}]})
            for part in ('{"port": ', '"Brest"}'):
                yield chunk({"tool_calls": [{"function": {"arguments": part}}]})
    yield chunk(finish="tool_calls")


class TestWhole:
    @pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
    def test_thoughts_text_and_calls(self, name):
        message = whole({name: "hm", "content": "I look.", "tool_calls": [CALL]}, "tool_calls")
        assert message["content"] == [
            {"type": "thinking", "thinking": "hm", "signature": "kvpin"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "tide", "input": {"port": "Brest"}},
        ]
        assert message["stop_reason"] == "tool_use"

    @pytest.mark.parametrize("arguments", ['{"port": "Br', "[1]", "", None])
    def test_arguments_that_were_cut_off(self, arguments):
        call = {"function": {"name": "tide", "arguments": arguments}}
        (block,) = whole({"tool_calls": [call]}, "length")["content"]
        assert block.pop("id").startswith("toolu_")
        assert block == {"type": "tool_use", "name": "tide", "input": {}}

    @pytest.mark.parametrize(("asked", "told"), [("alias", "alias"), (None, "m")])
    def test_the_model_is_named_as_asked_or_by_the_engine(self, asked, told):
        assert whole({"content": "hi"}, fields={"model": asked})["model"] == told
        first, *_ = streamed(chunk({"content": "hi"}, model="m"), model=asked)
        assert first["message"]["model"] == told

    @pytest.mark.parametrize(
        ("finish", "choice", "reason", "sequence"),
        [
            (None, {}, "end_turn", None),
            ("odd", {}, "end_turn", None),
            ("length", {}, "max_tokens", None),
            ("tool_calls", {}, "tool_use", None),
            ("content_filter", {}, "refusal", None),
            ("stop", {"stop_reason": "\n\n"}, "stop_sequence", "\n\n"),
            ("stop", {"stop_reason": 7}, "end_turn", None),
            ("stop", {"matched_stop": "END"}, "stop_sequence", "END"),
        ],
    )
    def test_why_it_stopped(self, finish, choice, reason, sequence):
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        message = whole({"content": "x"}, finish, **choice)
        assert message.items() >= stop.items()
        if finish:
            last = {"choices": [{"delta": {}, "finish_reason": finish, **choice}]}
            assert streamed(chunk({"content": "x"}), last)[-2]["delta"] == stop

    def test_a_refusal_is_text_and_the_reason(self):
        message = whole({"content": None, "refusal": "I may not."})
        assert (message["content"], message["stop_reason"]) == (
            [{"type": "text", "text": "I may not."}],
            "refusal",
        )
        events = streamed(*(chunk({"refusal": part}) for part in ("I may ", "not.")), chunk(finish="stop"))
        assert [brief(each) for each in events[2:]] == [
            ("start", 0, "text"), ("delta", 0, "I may "), ("delta", 0, "not."), ("stop", 0, None),
            ("delta", None, "refusal"), ("stop", None, None),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("details", "counts"),
        [
            (None, (0, 40, 0)),
            ({"cached_tokens": 32}, (0, 8, 32)),
            ({"cached_tokens": None}, (0, 40, 0)),
            ({"cached_tokens": 32, "cache_write_tokens": 0}, (8, 0, 32)),
            ({"cached_tokens": 16, "created_cache_tokens": 20}, (4, 20, 16)),
        ],
    )
    def test_usage(self, details, counts):
        """Without a mark, nothing counts as written."""
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}
        for fields, expected in ((MARKED, counts), ({}, (sum(counts[:2]), 0, counts[2]))):
            told = whole({"content": "x"}, usage=usage, fields=fields)["usage"]
            names = "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"
            assert told == {**dict(zip(names, expected, strict=True)), "output_tokens": 2}

    @pytest.mark.parametrize("content", [b"{}", b"no", b'{"choices": [{}]}', b'{"choices": 1}', b"\xff"])
    def test_what_is_no_chat(self, content):
        with pytest.raises(EngineFailed, match="not that of a chat"):
            passed(made(), whole=content)


class TestStream:
    def test_each_kind_of_content_is_a_block(self):
        function = {"name": "tide", "arguments": ""}
        events = streamed(
            chunk({"role": "assistant", "content": ""}),
            *(chunk({name: part}) for name, part in (("reasoning_content", "h"), ("reasoning", "m"))),
            *(chunk({"content": part}) for part in ("I ", "look.")),
            chunk({"tool_calls": [{"index": 0, "id": "c1", "function": function}]}),
            *(chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
              for part in ('{"port"', ":1}")),
            chunk({"tool_calls": [{"index": 1}]}),  # it has no name yet
            chunk({"tool_calls": [{"index": 1, "function": {"name": "wind", "arguments": "{}"}}]}),
            chunk(finish="tool_calls"),
            USAGE,
        )  # fmt: skip
        nothing = dict.fromkeys(
            ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), 0
        )
        begun = {"type": "message", "role": "assistant", "model": "m", "content": [], "usage": nothing}
        begun |= {"stop_reason": None, "stop_sequence": None}
        assert events[0]["message"].pop("id").startswith("msg_")
        assert events[:2] == [{"type": "message_start", "message": begun}, {"type": "ping"}]
        assert [brief(each) for each in events[2:]] == [
            ("start", 0, "thinking"), ("delta", 0, "h"), ("delta", 0, "m"), ("delta", 0, "kvpin"),
            ("stop", 0, None),
            ("start", 1, "text"), ("delta", 1, "I "), ("delta", 1, "look."), ("stop", 1, None),
            ("start", 2, "tool_use"), ("delta", 2, '{"port"'), ("delta", 2, ":1}"), ("stop", 2, None),
            ("start", 3, "tool_use"), ("delta", 3, "{}"), ("stop", 3, None),
            ("delta", None, "tool_use"), ("stop", None, None),
        ]  # fmt: skip
        calls = [each["content_block"] for each in events if each["type"] == "content_block_start"][2:]
        assert calls[0] == {"type": "tool_use", "id": "c1", "name": "tide", "input": {}}
        assert calls[1]["id"].startswith("toolu_")
        counted = nothing | {"input_tokens": 8, "cache_read_input_tokens": 32, "output_tokens": 2}
        assert events[-2]["usage"] == counted

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_calls_without_an_index_are_told_apart_by_their_ids(self, is_whole):
        events = streamed(*of_calls_by_id(is_whole=is_whole))
        calls = [each["content_block"]["id"] for each in events if each["type"] == "content_block_start"]
        given = [each["delta"]["partial_json"] for each in events if each["type"] == "content_block_delta"]
        assert (calls, "".join(given)) == (["c1", "c2"], '{"port": "Brest"}{"port": "Brest"}')
        assert {each["index"] for each in events if "index" in each} == {0, 1}

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            ({"code": "time_limit"}, "timeout_error"),
            ({"code": "overloaded"}, "overloaded_error"),
            ({"code": 7}, "api_error"),
            ({"type": "overloaded_error"}, "overloaded_error"),
            ({"type": "timeout_error"}, "timeout_error"),
        ],
    )
    def test_a_code_decides_the_type_of_an_error(self, error, kind):
        failed = {"error": {"message": "boom", **error}, "request_id": "r"}
        *_, before, last = streamed(chunk({"content": "x"}), failed, chunk({"content": "y"}, "stop"))
        assert before["delta"]["text"] == "x"
        assert last == {"type": "error", "error": {"type": kind, "message": "boom"}, "request_id": "r"}


def test_a_prompt_that_is_prewarmed_has_no_answer():
    message = whole({"content": "x"}, "length", USAGE["usage"], fields={"max_tokens": 0})
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    events = streamed(chunk({"content": "x"}, "length"), USAGE, max_tokens=0)
    assert [each["type"] for each in events] == ["message_start", "ping", "message_delta", "message_stop"]
    for told in (message, events[2]):
        assert told["usage"]["output_tokens"] == 0
        assert told["usage"]["cache_read_input_tokens"] == 32
