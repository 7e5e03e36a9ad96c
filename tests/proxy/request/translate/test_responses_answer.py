"""Chats' answers as responses, whole and streamed."""

import json

import pytest

from proxy.errors import EngineFailed
from tests.proxy.request.passing import passed
from tests.proxy.request.translate.response_world import (
    SPACE,
    TOOL,
    answered,
    events_from,
    streamed,
    translation,
)
from tests.proxy.request.translate.test_messages import of_calls_by_id


class TestAnswers:
    def test_a_text(self):
        response = answered(translation(metadata={"a": "b"}, temperature=0.5), content="hello")
        (item,) = response["output"]
        assert item.pop("id").startswith("msg_")
        text = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
        assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
        assert response["id"].startswith("resp_")
        written = {"ttl_30m_tokens": 8, "ttl_12h_tokens": 0}
        cached = {"cached_tokens": 32, "cache_write_tokens": 8, "cache_write_tokens_details": written}
        assert response["usage"] == {
            "input_tokens": 40,
            "input_tokens_details": cached,
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 42,
        }
        shown = {"status": "completed", "model": "m", "metadata": {"a": "b"}, "temperature": 0.5, "tools": []}
        assert response.items() >= {**shown, "text": {"format": {"type": "text"}}}.items()

    def test_reasoning_that_the_engine_does_not_count_is_counted_by_its_share_of_the_text(self):
        usage = {"prompt_tokens": 40, "completion_tokens": 20, "completion_tokens_details": None}
        thought = {"reasoning_content": "h" * 30, "content": "o" * 10}
        for told, message, reasoning in (
            (None, thought, 15),
            ({"reasoning_tokens": 0}, thought, 15),
            ({"reasoning_tokens": 9}, thought, 9),
            (None, {"content": "ok"}, 0),
            (None, {"reasoning_content": "h"}, 20),
        ):
            given = usage | {"completion_tokens_details": told}
            answer = answered(translation(), usage=given, **message)
            assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": reasoning}

    def test_reasoning_and_calls(self):
        calls = [
            {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": "{}"}},
            {"type": "function", "function": {"name": "patch", "arguments": '{"input": "x"}'}},
        ]
        tools = [TOOL, {"type": "custom", "name": "patch"}]
        made = translation(tools=tools, include=["reasoning.encrypted_content"])
        response = answered(made, "tool_calls", reasoning="Hm.", content=None, tool_calls=calls)
        thought, call, custom = response["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert thought["encrypted_content"] == "kvpin.SG0u"
        called = {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": "{}"}
        assert call.items() >= called.items()
        assert custom.items() >= {"type": "custom_tool_call", "name": "patch", "input": "x"}.items()
        assert custom["call_id"].startswith("call_")

    @pytest.mark.parametrize(
        ("finish", "status", "reason"),
        [
            ("stop", "completed", None),
            ("tool_calls", "completed", None),
            ("length", "incomplete", "max_output_tokens"),
            ("content_filter", "incomplete", "content_filter"),
        ],
    )
    def test_how_it_ended(self, finish, status, reason):
        response = answered(translation(), finish, content="a")
        assert (response["status"], response["output"][0]["status"]) == (status, status)
        assert response["incomplete_details"] == (reason and {"reason": reason})

    @pytest.mark.parametrize("content", [b"", b"{}", b'{"choices": []}', b'{"choices": 7}', b'"\xff"'])
    def test_what_is_no_chat(self, content):
        with pytest.raises(EngineFailed, match="not that of a chat"):
            passed(translation(), whole=content)


class TestStreams:
    def test_each_item_in_its_events(self):
        call = {"index": 0, "id": "c1", "function": {"name": "tide", "arguments": ""}}
        events = streamed(
            translation(tools=[TOOL]),
            {"role": "assistant", "content": ""},
            {"reasoning_content": "H"},
            {"reasoning_content": "m."},
            {"content": "hel"},
            {"content": "lo"},
            {"tool_calls": [call]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
            finish="tool_calls",
        )
        part = "output_item.added content_part.added"
        done = "content_part.done output_item.done"
        call = "function_call_arguments"
        assert [each["type"].removeprefix("response.") for each in events] == (
            f"created in_progress {part} "
            f"reasoning_text.delta reasoning_text.delta reasoning_text.done {done} "
            f"{part} output_text.delta output_text.delta output_text.done {done} "
            f"output_item.added {call}.delta {call}.delta {call}.done output_item.done completed"
        ).split()
        response = events[-1]["response"]
        done = [each for each in events if each["type"] == "response.output_item.done"]
        assert [each["item"] for each in done] == response["output"]
        assert [each["output_index"] for each in done] == [0, 1, 2]
        assert response["output"][2]["arguments"] == "{}"
        assert events[0]["response"]["output"] == []
        assert events[0]["response"]["usage"] is None
        assert response["usage"]["output_tokens"] == 2

    def test_calls_that_are_written_side_by_side(self):
        def call(index, name=None, arguments=None):
            return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}}]}

        events = streamed(
            translation(tools=[TOOL, {"type": "custom", "name": "patch"}]),
            call(0, "ti"),
            call(0, "tide"),
            call(1, "patch"),
            call(0, None, "{}"),
            call(1, None, '{"input":'),
            call(1, None, '"x"}'),
        )
        tide, patch = events[-1]["response"]["output"]
        assert (tide["name"], tide["arguments"], patch["input"]) == ("tide", "{}", "x")
        inputs = [each for each in events if each["type"].endswith("custom_tool_call_input.delta")]
        assert [each["delta"] for each in inputs] == ["x"]

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_calls_without_an_index_are_told_apart_by_their_ids(self, is_whole):
        events = events_from(translation(tools=[TOOL]), *of_calls_by_id(is_whole=is_whole))
        given = [(item["call_id"], item["arguments"]) for item in events[-1]["response"]["output"]]
        assert given == [("c1", '{"port": "Brest"}'), ("c2", '{"port": "Brest"}')]

    def test_a_refusal(self):
        events = streamed(translation(), {"refusal": "No."})
        assert events[-1]["response"]["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
        assert "response.refusal.done" in [each["type"] for each in events]

    def test_logprobs(self):
        one = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
        chunk = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [one]}}]}
        events = events_from(translation(top_logprobs=1), chunk)
        assert [each["logprobs"] for each in events if each["type"].endswith("text.delta")] == [[one]]

    def test_telemetry_passes(self):
        timings = {"timings": {"prompt_ms": 1.5}}
        chunk = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}], **timings}
        progress = {"choices": [{"delta": {"content": None}}], "prompt_progress": {"total": 3}}
        events = events_from(translation(), progress, chunk)
        shown = [each["type"] for each in events if "prompt_progress" in each]
        assert (shown, events[2]["prompt_progress"]) == (["response.in_progress"], {"total": 3})
        timed = {each["type"] for each in events if "timings" in each}
        assert {"response.output_text.delta", "response.completed"} <= timed
        assert events[-1]["timings"] == {"prompt_ms": 1.5}

    @pytest.mark.parametrize(
        ("error", "code"),
        [({"message": "no room", "code": "full", "param": None}, "full"), ("no room", "server_error")],
    )
    @pytest.mark.parametrize("n_before", [0, 1])
    def test_an_error_is_the_last_event(self, error, code, n_before):
        chunk = {"choices": [{"delta": {"content": "a"}}]}
        first, *_, last = events_from(translation(), *[chunk] * n_before, {"error": error}, chunk)
        assert (last["type"], last["message"], last["code"]) == ("error", "no room", code)
        assert first["type"] == "response.created"


@pytest.mark.parametrize(("ttl", "counts"), [("30m", (10, 0)), ("12h", (0, 10)), (None, (10, 0))])
def test_written_tokens_count_under_the_time_that_was_asked_for(ttl, counts):
    usage = answered(translation(prompt_cache_options={"ttl": ttl}), usage={"prompt_tokens": 10})["usage"]
    written = usage["input_tokens_details"]["cache_write_tokens_details"]
    assert (written["ttl_30m_tokens"], written["ttl_12h_tokens"]) == counts


def test_a_prewarm_computes_one_token_and_shows_none():
    asked = {"prompt_cache_options": {"prewarm": True}, "max_output_tokens": 50}
    assert json.loads(translation(**asked).chat.raw)["max_tokens"] == 1
    events = streamed(translation(**asked), {"content": "a"}, finish="length")
    kinds = [each["type"].rpartition(".")[2] for each in events]
    assert kinds == ["created", "in_progress", "completed"]
    for response in (events[-1]["response"], answered(translation(**asked), "length", content="a")):
        assert (response["status"], response["output"]) == ("completed", [])
        assert (response["usage"]["output_tokens"], response["usage"]["total_tokens"]) == (0, 40)


class TestNamespaces:
    TOOLS = (SPACE, {"type": "web_search"}, TOOL)

    def test_each_tool_is_a_function(self):
        chosen = {"type": "function", "name": "tide", "namespace": "sea"}
        space = SPACE | {"tools": [*SPACE["tools"], {"type": "mcp"}]}
        made = translation(tools=[space, *self.TOOLS[1:]], tool_choice=chosen)
        chat = json.loads(made.chat.raw)
        assert [tool["function"]["name"] for tool in chat["tools"]] == ["sea__tide", "sea__log", "tide"]
        assert chat["tool_choice"]["function"]["name"] == "sea__tide"
        assert made.changed == ("tool:mcp", "tool:web_search")
        assert made.wording.path("tools[2].function.parameters") == "tools[2].parameters"
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "sea"}]}
        chat = json.loads(translation(tools=self.TOOLS, tool_choice=allowed).chat.raw)
        assert [tool["function"]["name"] for tool in chat["tools"]] == ["sea__tide", "sea__log"]

    def test_the_model_is_told_the_grammar_of_a_custom_tool(self):
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
        tools = [
            {"type": "custom", "name": "a", "description": "Logs.", "format": grammar},
            {"type": "custom", "name": "b", "format": grammar},
            {"type": "custom", "name": "c", "format": {"type": "text"}},
        ]
        functions = [tool["function"] for tool in json.loads(translation(tools=tools).chat.raw)["tools"]]
        told = "The input follows this grammar (lark):\nstart: WORD"
        assert [each.get("description") for each in functions] == [f"Logs.\n\n{told}", told, None]

    def test_calls_have_namespace_and_name_again(self):
        named = (("sea__tide", "{}"), ("sea__log", '{"input":"x"}'), ("tide", "{}"))
        calls = [
            {"index": at, "id": f"c{at}", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(named)
        ]
        function, custom = "function_call", "custom_tool_call"
        wanted = [(function, "tide", "sea"), (custom, "log", "sea"), (function, "tide", None)]

        def named_in(items):
            return [(each["type"], each["name"], each.get("namespace")) for each in items]

        response = answered(translation(tools=self.TOOLS), tool_calls=calls)
        assert named_in(response["output"]) == wanted
        events = streamed(translation(tools=self.TOOLS), {"tool_calls": calls})
        for kind in ("response.output_item.added", "response.output_item.done"):
            assert named_in([event["item"] for event in events if event["type"] == kind]) == wanted
