"""A client never gets a reference: it gets the value."""

import json
import re
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import JsonBody
from proxy.request.values_back import ValuesBack, answers_json
from tests.proxy.request.passing import passed

VALUES = {"[[path 1]]": "/home/me/x", "[[path 2]]": 'C:\\Users\\"me"'}
TEXT = "Look at [[path 1]]/a.py, [[path 1] and [[path 3]] in [[path 2]]. [["
BACK = 'Look at /home/me/x/a.py, [[path 1] and [[path 3]] in C:\\Users\\"me". [['
ARGUMENTS = json.dumps({"path": "[[path 2]]\\a.py", "text": TEXT})


def events(body):
    return [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]


def streamed(chunks, **options):
    return passed(ValuesBack(VALUES, **options), chunks=chunks).body


def answered(answer, **options):
    return passed(ValuesBack(VALUES, **options), whole=answer).body


def stream(*bodies, name=None):
    head = f"event: {name}\n" if name else ""
    return [f"{head}data: {json.dumps(each)}\n\n".encode() for each in bodies]


def cut(text, size):
    return [text[at : at + size] for at in range(0, len(text), size)]


def choice(delta, index=0, reason=None):
    return {"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


def added_up(body):
    """Each text of a stream, as a client adds up its pieces: by choice and field or call, block, or item."""
    texts = defaultdict(str)
    for event in events(body):
        for each in event.get("choices", ()):
            at, delta = each["index"], each["delta"]
            for name in ("content", "reasoning_content"):
                texts[at, name] += delta.get(name) or ""
            texts[at, "call"] += delta.get("function_call", {}).get("arguments", "")
            for call in delta.get("tool_calls", ()):
                texts[at, call["index"]] += call["function"]["arguments"]
        delta = event.get("delta", "")
        if isinstance(delta, dict):
            texts[event["index"]] += delta.get("text", "") + delta.get("partial_json", "")
        elif delta:
            texts[event["item_id"]] += delta
    return {place: text for place, text in texts.items() if text}


def call(at, piece, **more):
    return choice({"tool_calls": [{"index": at, **more, "function": {"arguments": piece}}]})


@pytest.mark.parametrize("size", [1, 3, 7, 200])
@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_texts_of_a_stream(size, field):
    pieces = [choice({field: piece}) for piece in cut(TEXT, size)]
    body = streamed([*stream(*pieces, choice({}, reason="stop")), b"data: [DONE]\n\n"])
    assert added_up(body) == {(0, field): BACK}
    *deltas, last = [each["choices"][0] for each in events(body)]
    assert {each["finish_reason"] for each in deltas} == {None}
    assert last == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 200])
def test_arguments_of_calls_in_a_stream_stay_json(size, by_turns):
    """Of two calls, in each of two choices."""
    pieces = [call(at, "", id=f"c{at}") for at in range(2)]
    pieces += [call(at, piece) for at in range(2) for piece in cut(ARGUMENTS, size)]
    if by_turns:
        pieces[2:] = [call(at, piece) for piece in cut(ARGUMENTS, size) for at in range(2)]
    both = [each for one in pieces for each in (one, {"choices": [{**one["choices"][0], "index": 1}]})]
    body = streamed(stream(*both, choice({}, 0, "tool_calls"), choice({}, 1, "tool_calls")))
    assert len(re.findall(rb'"id": ?"c[01]"', body)) == 4
    got = added_up(body)
    assert set(got) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for text in got.values():
        assert json.loads(text) == {"path": 'C:\\Users\\"me"\\a.py', "text": BACK}


INSIDE = {"cwd": "[[path 2]]", "run": 'cd "[[path 2]]"', "more": json.dumps({"at": "see [[path 2]]"})}
DEEP = {"payload": json.dumps(INSIDE), "list": json.dumps(["[[path 2]]"]), "say": 'in "[[path 2]]"'}


@pytest.mark.parametrize("size", [1, 5, 500])
def test_json_within_json_stays_json(size):
    pieces = [choice({"function_call": {"arguments": piece}}) for piece in cut(json.dumps(DEEP), size)]
    of_stream = added_up(streamed(stream(*pieces, choice({}, reason="function_call"))))[0, "call"]
    whole = {"content": [{"type": "tool_use", "input": DEEP}, {"arguments": json.dumps(DEEP)}]}
    used, called = json.loads(answered(json.dumps(whole).encode()))["content"]
    path = VALUES["[[path 2]]"]
    for got in (json.loads(of_stream), used["input"], json.loads(called["arguments"])):
        inside = json.loads(got["payload"])
        assert (inside["cwd"], inside["run"]) == (path, f'cd "{path}"')
        assert json.loads(inside["more"]) == {"at": f"see {path}"}
        assert (json.loads(got["list"]), got["say"]) == ([path], f'in "{path}"')


def test_what_waits_is_told_before_the_call_that_follows():
    called = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "[["}}]}
    body = streamed(stream(choice({"content": "a [[pa"}), choice(called), choice({}, reason="stop")))
    texts = [each["choices"][0]["delta"] for each in events(body)]
    assert [each.get("content") for each in texts] == ["a ", "[[pa", None, None, None]
    calls = [each["tool_calls"][0] for each in texts if "tool_calls" in each]
    assert [each["function"] for each in calls] == [{"name": "f", "arguments": ""}, {"arguments": "[["}]
    assert "id" not in calls[1]


@pytest.mark.parametrize("size", [1, 4, 200])
def test_messages(size):
    def delta(at, kind, **piece):
        return {"type": "content_block_delta", "index": at, "delta": {"type": kind, **piece}}

    sent = [delta(0, "text_delta", text=piece) for piece in cut(TEXT, size)]
    call = [delta(1, "input_json_delta", partial_json=piece) for piece in cut(ARGUMENTS, size)]
    stop = [{"type": "content_block_stop", "index": at} for at in range(2)]
    sent += [{"type": "ping"}, stop[0], *call, stop[1]]
    if size == 4:
        sent.insert(3, {"type": "ping"})
    body = streamed(stream(*sent, name="x"))
    got = added_up(body)
    assert (got[0], json.loads(got[1])["text"]) == (BACK, BACK)
    _, _, behind = body.partition(stream(stop[0], name="x")[0])
    assert {each.get("index") for each in events(behind)} == {1}


@pytest.mark.parametrize("size", [1, 3, 200])
def test_responses(size):
    text, call = "response.output_text", "response.function_call_arguments"
    sent = [{"type": f"{text}.delta", "item_id": "i", "delta": piece} for piece in cut(TEXT, size)]
    sent.append({"type": f"{text}.done", "item_id": "i", "text": TEXT})
    for piece in cut(ARGUMENTS, size):
        sent += [{"type": f"{call}.delta", "item_id": name, "delta": piece} for name in "jk"]  # by turns
    sent.append({"type": f"{call}.done", "item_id": "j", "arguments": ARGUMENTS})
    body = streamed(stream(*sent))
    got = added_up(body)
    assert got["i"] == BACK
    assert json.loads(got["j"])["text"] == json.loads(got["k"])["text"] == BACK
    assert [each["text"] for each in events(body) if "text" in each] == [BACK]
    assert events(body)[-1]["arguments"] == got["j"]


def test_whole_answers():
    message = {"content": TEXT, "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}]}
    told = json.dumps({"choices": [{"message": message}], "n": 1.5}).encode()
    (got,) = json.loads(answered(told))["choices"]
    assert got["message"]["content"] == BACK
    assert json.loads(got["message"]["tool_calls"][0]["function"]["arguments"])["text"] == BACK
    used = json.dumps({"content": [{"type": "tool_use", "input": {"path": "[[path 2]]"}}]}).encode()
    assert json.loads(answered(used))["content"][0]["input"]["path"] == 'C:\\Users\\"me"'
    for other in (b'{"a":  1}', b"no [[json"):
        assert answered(other) == other


def test_other_events_keep_their_bytes():
    chunks = [b": comment\n\n", b'data:  {"choices": [], "usage": {}}\n\n', b"data: [DONE]\n\n"]
    assert streamed([*chunks, b"data: 1\n\n", b"half"]) == b"".join(chunks) + b"data: 1\n\nhalf"


NAMES = [
    *("choices", "delta", "content", "index", "tool_calls", "function", "arguments", "id"),
    *("type", "text", "finish_reason", "item_id", "function_call"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["[[", "path 1]]", "[", "ping", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)


KEYS = st.sampled_from(["choices", "delta", "index", "type", "item_id"])


@given(st.lists(st.dictionaries(KEYS, JSON), max_size=5))
def test_whatever_an_engine_streams_is_passed_on(bodies):
    assert len(events(streamed(stream(*bodies)))) >= len(bodies)


@pytest.mark.parametrize(
    "between",
    [
        choice({}),
        choice({"content": None}),
        choice({"reasoning_content": ""}),
        {"choices": [], "usage": {"completion_tokens": 1}},
        {"choices": [choice({"content": "B"}, 1, "stop")["choices"][0], choice({}, 0)["choices"][0]]},
    ],
    ids=["nothing", "null", "another text", "usage", "the end of another choice"],
)
def test_an_event_that_tells_nothing_of_a_text_does_not_cut_a_reference(between):
    pieces = choice({"content": "[[pa"}), between, choice({"content": "th 1]]"}), choice({}, reason="stop")
    assert added_up(streamed(stream(*pieces)))[0, "content"] == "/home/me/x"


def test_arguments_as_an_object_hold_plain_texts_of_any_name():
    said = {"arguments": "[[path 2]]", "files": {"[[path 1]]/a": [{"partial_json": "[[path 2]]"}]}}
    use = {"type": "tool_use", "input": said}
    (back,) = json.loads(answered(json.dumps({"content": [use]}).encode()))["content"]
    path = VALUES["[[path 2]]"]
    assert back["input"] == {"arguments": path, "files": {"/home/me/x/a": [{"partial_json": path}]}}


@pytest.mark.parametrize("size", [1, 3, 200])
def test_an_answer_in_json_stays_json(size):
    pieces = [choice({"content": piece}) for piece in cut(ARGUMENTS, size)]
    body = streamed(stream(*pieces, choice({}, reason="stop")), answers_json=True)
    text = added_up(body)[0, "content"]
    whole = json.dumps({"choices": [{"message": {"content": ARGUMENTS}}]}).encode()
    said = json.loads(answered(whole, answers_json=True))
    for each in (text, said["choices"][0]["message"]["content"]):
        assert json.loads(each) == {"path": 'C:\\Users\\"me"\\a.py', "text": BACK}


@pytest.mark.parametrize(
    ("fields", "is_json"),
    [
        ({"response_format": {"type": "json_schema"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"text": {"format": {"type": "json_object"}}}, True),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({"text": "x", "response_format": 3}, False),
    ],
)
def test_which_requests_ask_for_json(fields, is_json):
    assert answers_json(JsonBody(json.dumps(fields).encode())) is is_json


def test_a_text_with_quotes_in_json_within_json_is_no_json():
    """A quote behind a colon began another string, so that a value was escaped once too often."""
    inner = json.dumps(['x: "[[path 1]]"'])
    arguments = json.dumps({"body": inner})
    call = {"function": {"arguments": arguments}}
    body = json.dumps({"choices": [{"index": 0, "message": {"tool_calls": [call]}}]})
    back = ValuesBack({"[[path 1]]": "C:\\a"})
    answer = json.loads(passed(back, whole=body.encode()).body)
    told = answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(json.loads(told)["body"]) == ['x: "C:\\a"']
