"""Anthropic's answers, from those of engines."""

import json

import pytest

from proxy.errors import EngineFailed
from proxy.request.translate.messages_answer import MessageAnswer
from tests.proxy.request.translate.message_events import USAGE, chunk, events_of

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}


def told_of(answer, model="m", prewarms=False, marks=False):
    made = MessageAnswer(model, prewarms=prewarms, marks=marks)
    return json.loads(made.answer(json.dumps(answer).encode()))


def whole(said, finish="stop", usage=None, marks=False, **choice):
    answer = {"choices": [{"message": said, "finish_reason": finish, **choice}], "usage": usage}
    return told_of(answer, marks=marks)


def streamed(*chunks, **options):
    """The events of a stream of these chunks, without its first two."""
    stream = MessageAnswer("m", prewarms=options.pop("prewarms", False))
    sent = [stream.event(json.dumps(each).encode()) for each in chunks]
    return events_of(b"".join([*sent, stream.end()]))[2:]


def brief(event):
    """What an event does, to which block, with what."""
    kind = event["type"].rpartition("_")[2]
    given = event.get("delta") or event.get("content_block") or {"": None}
    *_, last = given.values() if kind != "start" else [given["type"]]
    return kind, event.get("index"), given.get("stop_reason", last) if "index" not in event else last


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
        chat = {"model": "m", "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
        assert told_of(chat, asked)["model"] == told
        stream = MessageAnswer(asked, prewarms=False)
        sent = stream.event(json.dumps(chunk({"content": "hi"}, model="m")).encode())
        first, *_ = events_of(sent)
        assert first["message"]["model"] == told

    @pytest.mark.parametrize("content", [None, ""])
    def test_nothing(self, content):
        assert whole({"content": content})["content"] == []

    @pytest.mark.parametrize(
        ("finish", "choice", "reason", "sequence"),
        [
            ("stop", {}, "end_turn", None),
            (None, {}, "end_turn", None),
            ("length", {}, "max_tokens", None),
            ("tool_calls", {}, "tool_use", None),
            ("content_filter", {}, "refusal", None),
            ("stop", {"stop_reason": "\n\n"}, "stop_sequence", "\n\n"),
            ("stop", {"stop_reason": 7}, "end_turn", None),
            ("stop", {"matched_stop": "END"}, "stop_sequence", "END"),
            ("stop", {"matched_stop": 7}, "end_turn", None),
        ],
    )
    def test_why_it_stopped(self, finish, choice, reason, sequence):
        message = whole({"content": "x"}, finish, **choice)
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)

    def test_a_prompt_that_is_prewarmed_has_no_answer(self):
        answer = {
            "choices": [{"message": {"content": "x"}, "finish_reason": "length"}],
            "usage": USAGE["usage"],
        }
        message = told_of(answer, prewarms=True)
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert (message["usage"]["cache_read_input_tokens"], message["usage"]["output_tokens"]) == (32, 0)

    def test_a_call_that_was_asked_for(self):
        assert whole({"tool_calls": [CALL]}, "stop")["stop_reason"] == "tool_use"

    @pytest.mark.parametrize(
        ("details", "counts"),
        [
            (None, (0, 40, 0)),
            ({"cached_tokens": 32}, (0, 8, 32)),
            ({"cached_tokens": None}, (0, 40, 0)),
            ({"cached_tokens": 32, "cache_write_tokens": 0}, (8, 0, 32)),
            ({"cached_tokens": 16, "cache_write_tokens": 20}, (4, 20, 16)),
            ({"cached_tokens": 16, "created_cache_tokens": 20}, (4, 20, 16)),
        ],
    )
    def test_usage(self, details, counts):
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details}
        told = whole({"content": "x"}, usage=usage, marks=True)["usage"]
        assert counts == (
            told["input_tokens"],
            told["cache_creation_input_tokens"],
            told["cache_read_input_tokens"],
        )
        assert told["output_tokens"] == 2

    def test_without_a_mark_nothing_counts_as_written(self):
        details = {"cached_tokens": 16, "cache_write_tokens": 20}
        told = whole({"content": "x"}, usage={"prompt_tokens": 40, "prompt_tokens_details": details})["usage"]
        assert (told["input_tokens"], told["cache_creation_input_tokens"]) == (24, 0)

    @pytest.mark.parametrize("content", [b"{}", b"no", b'{"choices": [{}]}', b'{"choices": 1}', b"\xff"])
    def test_what_is_no_chat(self, content):
        with pytest.raises(EngineFailed):
            MessageAnswer("m", prewarms=False).answer(content)


class TestStream:
    def test_each_kind_of_content_is_a_block(self):
        function = {"name": "tide", "arguments": ""}
        events = streamed(
            chunk({"reasoning_content": "h"}),
            chunk({"reasoning": "m"}),
            chunk({"content": "I "}),
            chunk({"content": "look."}),
            chunk({"tool_calls": [{"index": 0, "id": "c1", "function": function}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"port"'}}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
            chunk({"tool_calls": [{"index": 1, "function": {"name": "wind", "arguments": "{}"}}]}),
            chunk(finish="tool_calls"),
        )
        assert [brief(each) for each in events] == [
            ("start", 0, "thinking"),
            ("delta", 0, "h"),
            ("delta", 0, "m"),
            ("delta", 0, "kvpin"),
            ("stop", 0, None),
            ("start", 1, "text"),
            ("delta", 1, "I "),
            ("delta", 1, "look."),
            ("stop", 1, None),
            ("start", 2, "tool_use"),
            ("delta", 2, '{"port"'),
            ("delta", 2, ":1}"),
            ("stop", 2, None),
            ("start", 3, "tool_use"),
            ("delta", 3, "{}"),
            ("stop", 3, None),
            ("delta", None, "tool_use"),
            ("stop", None, None),
        ]
        calls = [each["content_block"] for each in events if each["type"] == "content_block_start"][2:]
        assert calls[0] == {"type": "tool_use", "id": "c1", "name": "tide", "input": {}}
        assert calls[1]["id"].startswith("toolu_")

    def test_a_prompt_that_is_prewarmed_has_no_answer(self):
        events = streamed(chunk({"content": "x"}, "length"), USAGE, prewarms=True)
        assert [each["type"] for each in events] == ["message_delta", "message_stop"]
        assert (events[0]["usage"]["output_tokens"], events[0]["delta"]["stop_reason"]) == (0, "max_tokens")

    def test_a_stop_sequence(self):
        last = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
        delta = streamed(chunk({"content": "x"}), last)[-2]["delta"]
        assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
