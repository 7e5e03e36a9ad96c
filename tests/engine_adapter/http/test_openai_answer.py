"""What is asked of an answer beyond what its client asked, and that its client sees none of it."""

import json
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import JsonBody, Opening, Says, what_is_said
from engine_adapter.hold import Hold
from engine_adapter.http.openai_answer import OpenAIAnswer, hold_openai, tell_cached
from tests.fakes import DONE, event
from tests.holding import read_by

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# As a real vLLM 0.32 streams them, with usage and ids asked for and without.
CARD = {"id": "c-1", "object": "chat.completion.chunk", "created": 1795251698, "model": "tiny"}
COUNTS = {"prompt_tokens": 11, "total_tokens": 17, "completion_tokens": 6}
USAGE = event(
    {**CARD, "choices": [], "usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 8}}}
).replace(b'": ', b'":')


def compact(content) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chat_chunk(index=0, *, ids=None, first=None, text=None, finish=None, **more):
    delta = {"role": "assistant", "content": ""} if first is not None else {}
    if text is not None:
        delta = {"content": text}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    if first is not None:
        return compact({**CARD, "choices": [choice], "prompt_token_ids": first or None, "prompt_text": None})
    return compact({**CARD, "choices": [{**choice, "token_ids": ids, **more}]})


def completion_chunk(index, text, *, prompt=None, ids=None, finish=None):
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return compact({**CARD, "choices": [{**choice, "prompt_token_ids": prompt, "token_ids": ids}]})


PROMPT = [1, 2029, 201, 2810]
LOGPROBS = {"content": [{"token": "é", "logprob": -1e-05, "bytes": [1]}]}
TEXT = 'say "usage": {"x": 1} – é\n\ndata: no'
# (as the engine streams it when asked for ids, as it does when not)
CHATS = [
    (
        chat_chunk(first=PROMPT) + chat_chunk(1, first=PROMPT)
        + chat_chunk(ids=[5]) + chat_chunk(1, text=TEXT, ids=[6])
        + chat_chunk(text="ed", ids=[7], logprobs=LOGPROBS) + chat_chunk(ids=[8], finish="length")
        + chat_chunk(1, ids=[9], finish="stop", stop_reason=2),
        chat_chunk(first=[]) + chat_chunk(1, first=[])
        + chat_chunk(1, text=TEXT)
        + chat_chunk(text="ed", logprobs=LOGPROBS) + chat_chunk(finish="length")
        + chat_chunk(1, finish="stop", stop_reason=2),
    ),
    (
        completion_chunk(0, " a", prompt=PROMPT, ids=[5]) + completion_chunk(1, "", prompt=PROMPT, ids=[6])
        + completion_chunk(0, TEXT, ids=[7], finish="length") + completion_chunk(1, "", finish="stop"),
        completion_chunk(0, " a") + completion_chunk(1, "")
        + completion_chunk(0, TEXT, finish="length") + completion_chunk(1, "", finish="stop"),
    ),
]  # fmt: skip


USAGE_TOO, IDS_TOO = {"ask_usage": True}, {"ask_tokens": True}


def body_of(**fields) -> JsonBody:
    return JsonBody(json.dumps({"model": "m", **fields}).encode())


def sent(hold) -> dict:
    return json.loads(hold.body.raw)


@st.composite
def splits(draw, raw: bytes) -> list[bytes]:
    cuts = sorted({0, len(raw), *draw(st.lists(st.integers(0, len(raw)), max_size=12))})
    return [raw[a:b] for a, b in pairwise(cuts)]


class TestRequest:
    @pytest.mark.parametrize(
        ("path", "options", "asked"),
        [
            (CHAT, {}, {"include_usage": True}),
            (COMPLETIONS, {"stream_options": {}}, {"include_usage": True}),
            (CHAT, {"stream_options": {"include_usage": False, "x": 1}}, {"x": 1, "include_usage": True}),
            (CHAT, {"stream_options": {"continuous_usage_stats": True}}, {"include_usage": True}),
        ],
    )
    def test_a_stream_is_asked_for_usage(self, path, options, asked):
        hold = hold_openai(path, body_of(stream=True, **options), ask_usage=True)
        assert sent(hold)["stream_options"] == asked
        assert hold.answer is not None

    @pytest.mark.parametrize("fields", [{}, {"stream": True}, {"return_token_ids": False}])
    def test_ids_are_asked_for(self, fields):
        hold = hold_openai(CHAT, body_of(**fields), ask_tokens=True)
        assert sent(hold) == {"model": "m", **fields, "return_token_ids": True}

    @pytest.mark.parametrize(
        ("path", "fields", "ask"),
        [
            (CHAT, {"stream": True}, {}),
            # Usage comes anyway.
            (CHAT, {"stream": True, "stream_options": {"include_usage": True}}, USAGE_TOO),
            (CHAT, {"stream": True, "stream_options": "wrong: the engine's to tell"}, USAGE_TOO),
            (CHAT, {"stream": False}, USAGE_TOO),
            (COMPLETIONS, {}, USAGE_TOO),
            ("/v1/responses", {"stream": True}, USAGE_TOO),
            ("/v1/messages", {"stream": True}, USAGE_TOO),
            # Ids cannot be had, or change the answer.
            ("/v1/responses", {}, IDS_TOO),
            (COMPLETIONS, {"echo": True}, IDS_TOO),
            (CHAT, {"echo": True}, IDS_TOO),
        ],
    )
    def test_where_nothing_is_asked_it_goes_as_it_came(self, path, fields, ask):
        body = body_of(**fields)
        hold = hold_openai(path, body, **ask)
        assert (hold.body, hold.answer, hold.note) == (body, None, "")


class TestUsageOfAStream:
    @pytest.fixture
    def answer(self):
        return hold_openai(CHAT, body_of(stream=True), ask_usage=True).answer

    @pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"])
    @given(data=st.data())
    def test_is_held_back_however_the_stream_is_cut(self, ends, data):
        answer = hold_openai(CHAT, body_of(stream=True), ask_usage=True).answer
        text = CHATS[data.draw(st.integers(0, 1))][1].replace(b"\n\n", ends)
        chunks = data.draw(splits(text + USAGE.replace(b"\n\n", ends) + DONE.replace(b"\n\n", ends)))
        assert read_by(answer, chunks) == text + DONE.replace(b"\n\n", ends)
        assert (answer.cached_tokens(), answer.prompt_tokens()) == (8, None)

    @pytest.mark.parametrize("usage", [None, {"completion_tokens": 1}])
    @pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"])
    def test_of_many_events_each_byte_is_looked_at_once(self, ends, usage):
        class Events(bytes):
            looked_at = 0

            def rfind(self, what, start, stop):
                found = bytes.rfind(self, what, start, stop)
                self.looked_at += stop - max(found, start)
                return found

        answer = hold_openai(CHAT, body_of(stream=True), ask_usage=True, ask_tokens=True).answer
        events = Events(chat_chunk(text="a", usage=usage).replace(b"\n\n", ends) * 1000)
        answer.feed(events)
        assert events.looked_at < 8 * len(events)

    def test_a_chunk_that_says_more_passes(self, answer):
        counts = {"prompt_tokens_details": {"cached_tokens": 3}}
        both = compact({**CARD, "choices": [{"delta": {}, "finish_reason": "stop"}], "usage": counts})
        filtered = compact({**CARD, "choices": [], "prompt_filter_results": [{"usage": {"x": 1}}]})
        role = compact({**CARD, "choices": [{"delta": {"role": "assistant"}}], "usage": counts})
        failed = compact({"error": {"message": "no"}, "usage": counts})
        for chunk in (both, filtered, role, failed):
            assert answer.feed(chunk) == chunk
        assert answer.cached_tokens() == 3

    @pytest.mark.parametrize(
        "choices",
        [
            {"choices": [{"index": 0, "delta": {}}]},
            {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": None}]},
            {"choices": [{"index": 0, "text": ""}]},
            {"choices": [{}]},
            {"choices": None},
            {},
        ],
    )
    def test_usage_in_other_shapes_is_read_and_held_back(self, answer, choices):
        usage = compact(
            {**CARD, **choices, "usage": {**COUNTS, "prompt_tokens_details": {"cached_tokens": 8}}}
        )
        assert read_by(answer, [chat_chunk(text="a"), usage, DONE]) == chat_chunk(text="a") + DONE
        assert answer.cached_tokens() == 8
        asked = {"stream_options": {"include_usage": True}}
        shown = hold_openai(CHAT, body_of(stream=True, **asked), ask_usage=True, ask_tokens=True).answer
        assert json.loads(read_by(shown, [usage]).partition(b"data: ")[2])["usage"]

    def test_what_the_last_usage_leaves_open_an_earlier_one_says(self, answer):
        counts = {"prompt_tokens_details": {"cached_tokens": 3}}
        first = compact({**CARD, "choices": [{"delta": {"content": "a"}}], "usage": counts})
        assert read_by(answer, [first, compact({"choices": [], "usage": COUNTS})]) == first
        assert answer.cached_tokens() == 3

    @pytest.mark.parametrize("last", [USAGE[:-2], USAGE[:-1]])
    def test_a_stream_without_its_last_line_end(self, answer, last):
        assert read_by(answer, [chat_chunk(text="a"), last]) == chat_chunk(text="a")
        assert answer.cached_tokens() == 8

    @pytest.mark.parametrize(
        "odd",
        [
            b": ping\n\n",
            b'data: {"usage": {broken\n\n',
            b"\n\n",
            b"data: x",
        ],
    )
    def test_what_is_no_chunk_passes(self, answer, odd):
        assert read_by(answer, [odd]) == odd


class TestTokenIds:
    @pytest.mark.parametrize(("asked", "plain"), CHATS, ids=["chat", "completion"])
    @given(data=st.data())
    def test_and_usage_with_them(self, asked, plain, data):
        answer = hold_openai(CHAT, body_of(stream=True), ask_tokens=True, ask_usage=True).answer
        assert read_by(answer, data.draw(splits(asked + USAGE + DONE))) == plain + DONE
        assert (answer.prompt_tokens(), answer.cached_tokens()) == (array("i", PROMPT), 8)

    def test_what_else_is_in_an_event_keeps_its_bytes(self):
        more, choice = '"system_fingerprint" : "fp_1.0","created":1.50', '{"index":0,"delta":{"content":"a"},'
        asked = f'data: {{{more},"choices":[{choice}"token_ids":[5]}}]}}\n\n'
        plain = asked.replace("[5]", "null").replace(" : ", ":")
        bare = f'data: {{{more},"choices":[]}}\n\n'
        answer = OpenAIAnswer(streams=True, hides_usage=True, reads_tokens=True, hides_tokens=True)
        assert answer.feed(asked.encode()) == plain.encode()
        assert answer.feed(bare.encode() + USAGE + DONE) == bare.encode() + DONE

    @pytest.mark.parametrize(("asked", "plain"), CHATS, ids=["chat", "completion"])
    def test_stay_where_the_client_asked_itself(self, asked, plain):
        hold = hold_openai(CHAT, body_of(stream=True, return_token_ids=True), ask_tokens=True)
        assert sent(hold)["return_token_ids"] is True
        assert read_by(hold.answer, [asked, DONE]) == asked + DONE != plain
        assert hold.answer.prompt_tokens() == array("i", PROMPT)

    @pytest.mark.parametrize("in_choice", [False, True], ids=["chat", "completion"])
    @pytest.mark.parametrize("client_asked", [False, True])
    def test_of_a_json_answer(self, in_choice, client_asked):
        choice = {"index": 0, "logprobs": LOGPROBS, "token_ids": [5, 6]}
        answer = {
            "id": "x",
            "choices": [choice, choice],
            "usage": {"prompt_tokens_details": {"cached_tokens": 8}},
        }
        for fields in (choice,) if in_choice else (answer,):
            fields["prompt_token_ids"] = PROMPT
        hold = hold_openai(COMPLETIONS, body_of(return_token_ids=client_asked), ask_tokens=True)
        raw = json.dumps(answer).encode()
        passed = hold.answer.feed(raw)
        assert (hold.answer.prompt_tokens(), hold.answer.cached_tokens()) == (array("i", PROMPT), 8)
        if client_asked:
            assert passed == raw
            return
        assert b"-1e-05" in passed, "all else keeps its bytes"
        choice.update({name: None for name in choice if name.endswith("token_ids")})
        answer.update({name: None for name in answer if name.endswith("token_ids")})
        assert json.loads(passed) == answer

    @pytest.mark.parametrize("raw", [b"", b"[]", b'{"choices": 1}', b'{"error": {}}', b"\xff"])
    def test_what_is_no_answer_passes(self, raw):
        answer = hold_openai(CHAT, body_of(), ask_tokens=True).answer
        assert answer.feed(raw) + answer.finish() == raw
        assert answer.prompt_tokens() is None

    @pytest.mark.parametrize("ids", [None, "x", [1.5], [2**31], {}])
    def test_ids_that_are_none_are_not_taken(self, ids):
        answer = hold_openai(CHAT, body_of(), ask_tokens=True).answer
        answer.feed(json.dumps({"choices": [], "prompt_token_ids": ids}).encode())
        assert answer.prompt_tokens() is None


class TestToldReuse:
    """Reused tokens of another engine, which computed the prompt."""

    @given(st.data())
    def test_stands_in_the_usage_that_the_client_asked_for(self, data):
        hold = hold_openai(CHAT, body_of(stream=True, stream_options={"include_usage": True}))
        tell_cached(hold, CHAT, 640)
        passed = read_by(hold.answer, data.draw(splits(CHATS[0][1] + USAGE + DONE)))
        counts = COUNTS | {"prompt_tokens_details": {"cached_tokens": 640}}
        assert passed == CHATS[0][1] + compact({**CARD, "choices": [], "usage": counts}) + DONE
        assert hold.answer.cached_tokens() == 8, "the engine's own report is for the audit"

    def test_is_not_shown_to_a_client_that_asked_for_no_usage(self):
        hold = hold_openai(CHAT, body_of(stream=True), ask_usage=True)
        tell_cached(hold, CHAT, 640)
        assert read_by(hold.answer, [CHATS[0][1] + USAGE + DONE]) == CHATS[0][1] + DONE

    def test_an_engine_that_gives_no_details_gets_some(self):
        hold = hold_openai(CHAT, body_of(stream=True, stream_options={"include_usage": True}))
        tell_cached(hold, CHAT, 3)
        for details in ({}, {"prompt_tokens_details": None}):
            (line, _, _) = read_by(hold.answer, [compact({"choices": [], "usage": COUNTS | details})]).split(
                b"\n"
            )
            usage = json.loads(line[6:])["usage"]
            assert usage == COUNTS | {"prompt_tokens_details": {"cached_tokens": 3}}

    def test_stands_in_a_whole_answer(self):
        hold = hold_openai(CHAT, body_of())
        tell_cached(hold, CHAT, 640)
        answer = {"id": "c-1", "choices": [{"index": 0}], "usage": COUNTS}
        passed = json.loads(hold.answer.feed(json.dumps(answer).encode()))
        assert passed == answer | {"usage": COUNTS | {"prompt_tokens_details": {"cached_tokens": 640}}}
        assert hold.told_cached == 640

    @given(st.data())
    def test_stands_in_a_response_and_not_in_its_text(self, data):
        text = 'say "input_tokens_details": {"cached_tokens": 1}'
        response = {"output": [text], "usage": RESPONSE_USAGE | {"output_tokens": 2}}
        told = response | {"usage": _with_cached(RESPONSE_USAGE, 640) | {"output_tokens": 2}}
        for whole in (True, False):
            hold = Hold(body_of(stream=not whole))
            tell_cached(hold, "/v1/responses", 640)
            if whole:
                passed = hold.answer.feed(json.dumps(response).encode())
                assert json.loads(passed) == told
            else:
                events = compact({"response": {"usage": None}}) + compact({"response": response})
                passed = read_by(hold.answer, data.draw(splits(events)))
                assert passed == compact({"response": {"usage": None}}) + compact({"response": told})


RESPONSE_USAGE = {
    "input_tokens": 700,
    "input_tokens_details": {"cached_tokens_per_turn": [3], "cached_tokens": 688},
}


def _with_cached(usage: dict, cached: int) -> dict:
    return usage | {"input_tokens_details": usage["input_tokens_details"] | {"cached_tokens": cached}}


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = {"function": {"name": "f", "arguments": "{}"}}


def choice(reason="stop", **message):
    return {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}


def chunk(reason=None, **delta):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def said(answer, route=CHAT):
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return what_is_said(route, content, is_json=not isinstance(answer, bytes))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"choices": [choice(content="hi")]}, Says.SOMETHING),
        ({"choices": [choice(content=""), choice(content="hi")]}, Says.SOMETHING),
        ({"choices": [choice(content=None, reasoning_content="hm")]}, Says.SOMETHING),
        ({"choices": [choice(content=None, tool_calls=[CALL])]}, Says.SOMETHING),
        ({"choices": [choice(content=None, refusal="no")]}, Says.SOMETHING),
        ({"choices": [choice(content="", audio={"id": "a"})]}, Says.SOMETHING),
        ({"choices": [choice("length", content="")]}, Says.SOMETHING),
        ({"choices": [choice("content_filter", content="")]}, Says.SOMETHING),
        ({"choices": [choice(content="")], "prompt_logprobs": [None, {"1": {}}]}, Says.SOMETHING),
        (
            b'{"choices":[{"message":{"content":"x"},"logprobs":{"content":[{"logprob":-Infinity}]}}]}',
            Says.SOMETHING,
        ),
        *(
            ({"choices": [choice(content=text, tool_calls=[], annotations=[])]}, Says.NOTHING)
            for text in ("", None)
        ),
        # Of another form.
        ({"choices": []}, Says.NO_ANSWER),
        ({"choices": ["hi"]}, Says.NO_ANSWER),
        ({"message": {"role": "assistant", "content": "hi"}}, Says.NO_ANSWER),
        ([{"generated_text": "hi"}], Says.NO_ANSWER),
        (b"", Says.NO_ANSWER),
        (b"<html>Sign in</html>", Says.NO_ANSWER),
        (b'{"choices":[{"message":{"content":"hi"}}]', Says.NO_ANSWER),
        (b"[" * 5000 + b"]" * 5000, Says.NO_ANSWER),
    ],
)
def test_what_a_whole_answer_says(answer, says):
    assert said(answer) is says


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_a_whole_answer_may_be_an_error_alone(route):
    assert said({"error": {"message": "no"}}, route) is Says.ERROR
    assert said({"error": "no", "choices": [], "output": [], "content": []}, route) is Says.ERROR
    assert said({"error": None}, route) is Says.NO_ANSWER


@pytest.mark.parametrize(("route", "name"), [(RESPONSES, "output"), (MESSAGES, "content")])
def test_a_whole_answer_of_another_api_has_another_list(route, name):
    assert said({"error": None, name: [{"type": "text", "text": "hi"}]}, route) is Says.SOMETHING
    assert said({name: []}, route) is Says.NOTHING
    assert said({name: [], "status": "queued"}, route) is Says.SOMETHING, "it runs in the background"
    assert said({name: "hi"}, route) is Says.NO_ANSWER
    assert said({"choices": [choice(content="hi")]}, route) is Says.NO_ANSWER


@pytest.mark.parametrize("text", ["", None])
def test_a_completion_may_say_nothing(text):
    assert said({"choices": [{"text": text, "finish_reason": "stop"}]}, COMPLETIONS) is Says.NOTHING


def opened(*chunks):
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
        assert opened(*chunks)[0] is Says.SOMETHING

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
        assert opened(*chunks) == (Says.NOTHING, waits)

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
            assert opened(before + error)[0] is Says.ERROR
        assert opened(error[:12], error[12:])[0] is Says.ERROR
