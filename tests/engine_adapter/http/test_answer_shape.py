import json

import pytest

from engine_adapter import Opening, Says, what_is_said
from tests.fakes import event

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
CALL = {"function": {"name": "f", "arguments": "{}"}}


def choice(reason="stop", **message):
    return {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}


def chunk(reason=None, **delta):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def said(answer, route=CHAT):
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return what_is_said(route, content, is_json=not isinstance(answer, bytes))


class TestAWholeAnswer:
    @pytest.mark.parametrize(
        "answer",
        [
            {"choices": [choice(content="hi")]},
            {"choices": [choice(content=""), choice(content="hi")]},
            {"choices": [choice(content=None, reasoning_content="hm")]},
            {"choices": [choice(content=None, tool_calls=[CALL])]},
            {"choices": [choice(content=None, refusal="no")]},
            {"choices": [choice(content="", audio={"id": "a"})]},
            {"choices": [choice("length", content="")]},
            {"choices": [choice("content_filter", content="")]},
            {"choices": [choice(content="")], "prompt_logprobs": [None, {"1": {}}]},
            b'{"choices":[{"message":{"content":"x"},"logprobs":{"content":[{"logprob":-Infinity}]}}]}',
        ],
    )
    def test_says_something(self, answer):
        assert said(answer) is Says.SOMETHING

    @pytest.mark.parametrize("text", ["", None])
    def test_may_say_nothing(self, text):
        assert said({"choices": [choice(content=text, tool_calls=[], annotations=[])]}) is Says.NOTHING
        assert said({"choices": [{"text": text, "finish_reason": "stop"}]}, COMPLETIONS) is Says.NOTHING

    @pytest.mark.parametrize(
        "answer",
        [
            {"choices": []},
            {"choices": ["hi"]},
            {"message": {"role": "assistant", "content": "hi"}},
            [{"generated_text": "hi"}],
            b"",
            b"<html>Sign in</html>",
            b'{"choices":[{"message":{"content":"hi"}}]',
            b"[" * 5000 + b"]" * 5000,
        ],
    )
    def test_of_another_form_is_none(self, answer):
        assert said(answer) is Says.NO_ANSWER

    @pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
    def test_may_be_an_error_alone(self, route):
        assert said({"error": {"message": "no"}}, route) is Says.ERROR
        assert said({"error": "no", "choices": [], "output": [], "content": []}, route) is Says.ERROR
        assert said({"error": None}, route) is Says.NO_ANSWER

    @pytest.mark.parametrize(("route", "name"), [(RESPONSES, "output"), (MESSAGES, "content")])
    def test_of_another_api_has_another_list(self, route, name):
        assert said({"error": None, name: [{"type": "text", "text": "hi"}]}, route) is Says.SOMETHING
        assert said({name: []}, route) is Says.NOTHING
        assert said({name: "hi"}, route) is Says.NO_ANSWER
        assert said({"choices": [choice(content="hi")]}, route) is Says.NO_ANSWER

    def test_that_runs_in_the_background_has_said_nothing_yet(self):
        assert said({"status": "queued", "output": []}, RESPONSES) is Says.SOMETHING


def read(*chunks):
    """What the opening says after the last of these chunks, and whether it waits for more."""
    opening = Opening()
    *_, last = (opening.read(each) for each in chunks)
    return last, opening.waits


ROLE, WORD = chunk(role="assistant", content=""), chunk(content="hi")
ERROR, NO_CHOICES = event({"error": {"message": "no"}}), event({"choices": []})


class TestTheOpeningOfAStream:
    @pytest.mark.parametrize(
        "chunks",
        [
            [WORD],
            [ROLE, WORD],
            [b": ping\n\n", WORD],
            [WORD[:20], WORD[20:]],
            [NO_CHOICES, WORD],
            [chunk(tool_calls=[CALL])],
            [event({"choices": [{"text": "hi"}]})],
            [event({"choices": [{"text": "", "prompt_logprobs": [None, {}]}]})],
            [b"data: 1\n\n"],
            [event({"type": "response.created", "response": {"error": None}})],
            [b'data: {"x": "' + b"x" * (65 << 10)],
        ],
    )
    def test_says_something(self, chunks):
        assert read(*chunks)[0] is Says.SOMETHING

    @pytest.mark.parametrize(
        ("chunks", "waits"),
        [
            ([ROLE], False),
            ([ROLE, chunk("stop")], False),
            ([ROLE, ERROR], False),  # the client has the role already
            ([b": ping\n\n"], False),
            ([b"data: [DONE]\n\n"], False),
            ([WORD[:20]], True),
            ([b"ev"], True),
            ([NO_CHOICES], True),
            ([NO_CHOICES, b"data: [DONE]\n\n"], True),
            ([NO_CHOICES, ROLE], False),
        ],
    )
    def test_says_nothing_yet(self, chunks, waits):
        assert read(*chunks) == (Says.NOTHING, waits)

    @pytest.mark.parametrize(
        "error",
        [
            ERROR,
            ERROR + b"data: [DONE]\n\n",
            event({"error": "no"}),
            b"error: " + b'{"message":"no"}\n\n',
            b"event: error\n" + event({"type": "error", "error": {"message": "no"}}),
            event({"type": "error", "message": "no"}),
            b"event: response.failed\n" + event({"response": {"error": {"message": "no"}}}),
            event({"type": "response.failed", "response": {"error": {"message": "no"}}}),
        ],
    )
    def test_is_an_error(self, error):
        for before in (b"", b": ping\n\n", NO_CHOICES):
            assert read(before + error)[0] is Says.ERROR
        assert read(error[:12], error[12:])[0] is Says.ERROR
