"""A client never gets a reference: it gets the value."""

import json

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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 200])
@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_texts_of_a_stream(size, field):
    pieces = [choice({field: piece}) for piece in cut(TEXT, size)]
    body = streamed([*stream(*pieces, choice({}, reason="stop")), b"data: [DONE]\n\n"])
    deltas = [each["choices"][0] for each in events(body)]
    assert "".join(each["delta"].get(field, "") for each in deltas) == BACK
    assert [each["finish_reason"] for each in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("size", [1, 3, 200])
def test_arguments_of_calls_in_a_stream_stay_json(size):
    def call(at, piece, **more):
        return choice({"tool_calls": [{"index": at, **more, "function": {"arguments": piece}}]})

    calls = [
        each
        for at in range(2)
        for each in (
            choice(
                {"tool_calls": [{"index": at, "id": f"c{at}", "function": {"name": "f", "arguments": ""}}]}
            ),
            *(call(at, piece) for piece in cut(ARGUMENTS, size)),
        )
    ]
    # Two choices at a time.
    both = [each for one in calls for each in (one, {"choices": [{**one["choices"][0], "index": 1}]})]
    got, ids = {}, []
    for each in events(streamed(stream(*both, choice({}, 0, "tool_calls"), choice({}, 1, "tool_calls")))):
        for told in each["choices"]:
            for made in told["delta"].get("tool_calls", ()):
                ids += [made["id"]] if "id" in made else []
                key = told["index"], made["index"]
                got[key] = got.get(key, "") + made["function"]["arguments"]
    assert len(ids) == len(got) == 4
    for text in got.values():
        assert json.loads(text) == {"path": 'C:\\Users\\"me"\\a.py', "text": BACK}


@pytest.mark.parametrize("size", [1, 3, 7])
def test_calls_whose_pieces_come_by_turns(size):
    def piece(at, text):
        return choice({"tool_calls": [{"index": at, "function": {"arguments": text}}]})

    pieces = [piece(at, text) for text in cut(ARGUMENTS, size) for at in range(2)]
    got = {0: "", 1: ""}
    for each in events(streamed(stream(*pieces, choice({}, 0, "tool_calls")))):
        for made in each["choices"][0]["delta"].get("tool_calls", ()):
            got[made["index"]] += made["function"]["arguments"]
    assert [json.loads(text)["text"] for text in got.values()] == [BACK, BACK]
    kind = "response.function_call_arguments.delta"
    turns = [
        {"type": kind, "item_id": name, "delta": text} for text in cut(ARGUMENTS, size) for name in ("i", "j")
    ]
    told = events(streamed(stream(*turns)))
    for name in ("i", "j"):
        text = "".join(each["delta"] for each in told if each["item_id"] == name)
        assert json.loads(text)["text"] == BACK


INSIDE = {"cwd": "[[path 2]]", "run": 'cd "[[path 2]]"', "more": json.dumps({"at": "see [[path 2]]"})}
DEEP = {"payload": json.dumps(INSIDE), "list": json.dumps(["[[path 2]]"]), "say": 'in "[[path 2]]"'}


@pytest.mark.parametrize("size", [1, 5, 500])
def test_json_within_json_stays_json(size):
    def check(got):
        inside = json.loads(got["payload"])
        path = VALUES["[[path 2]]"]
        assert (inside["cwd"], inside["run"]) == (path, f'cd "{path}"')
        assert json.loads(inside["more"]) == {"at": f"see {path}"}
        assert (json.loads(got["list"]), got["say"]) == ([path], f'in "{path}"')

    pieces = [choice({"function_call": {"arguments": piece}}) for piece in cut(json.dumps(DEEP), size)]
    got = events(streamed(stream(*pieces, choice({}, reason="function_call"))))
    check(
        json.loads(
            "".join(each["choices"][0]["delta"].get("function_call", {}).get("arguments", "") for each in got)
        )
    )
    whole = {"content": [{"type": "tool_use", "input": DEEP}, {"arguments": json.dumps(DEEP)}]}
    told = json.loads(answered(json.dumps(whole).encode()))["content"]
    check(told[0]["input"])
    check(json.loads(told[1]["arguments"]))


def test_what_waits_is_told_before_the_call_that_follows():
    called = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "[["}}]}
    body = streamed(stream(choice({"content": "a [[pa"}), choice(called), choice({}, reason="stop")))
    texts = [each["choices"][0]["delta"] for each in events(body)]
    assert [each.get("content") for each in texts] == ["a ", "[[pa", None, None, None]
    calls = [each["tool_calls"][0] for each in texts if "tool_calls" in each]
    assert [each["function"] for each in calls] == [{"name": "f", "arguments": ""}, {"arguments": "[["}]
    assert "id" not in calls[1]


def test_a_piece_that_ends_its_text_waits_for_nothing():
    body = streamed(stream(choice({"content": "a [["}, reason="length")))
    assert [each["choices"][0]["delta"]["content"] for each in events(body)] == ["a [["]


@pytest.mark.parametrize("size", [1, 4, 200])
def test_messages(size):
    def delta(at, kind, **piece):
        return {"type": "content_block_delta", "index": at, "delta": {"type": kind, **piece}}

    text = [delta(0, "text_delta", text=piece) for piece in cut(TEXT, size)]
    call = [delta(1, "input_json_delta", partial_json=piece) for piece in cut(ARGUMENTS, size)]
    stop = [{"type": "content_block_stop", "index": at} for at in range(2)]
    sent = [*text, {"type": "ping"}, stop[0], *call, stop[1]]
    if size == 4:
        sent.insert(3, {"type": "ping"})
    got = events(streamed(stream(*sent, name="x")))
    pieces = [each["delta"] for each in got if "delta" in each]
    assert "".join(each.get("text", "") for each in pieces) == BACK
    assert json.loads("".join(each.get("partial_json", "") for each in pieces))["text"] == BACK
    at_stop = got.index(stop[0])
    assert all(each.get("index") == 1 for each in got[at_stop + 1 :] if each["type"] != "ping")


@pytest.mark.parametrize("size", [1, 200])
def test_responses(size):
    name = "response.output_text"
    pieces = [
        {"type": f"{name}.delta", "item_id": "i", "content_index": 0, "delta": piece}
        for piece in cut(TEXT, size)
    ]
    calls = [
        {"type": "response.function_call_arguments.delta", "item_id": "j", "delta": piece}
        for piece in cut(ARGUMENTS, size)
    ]
    done = [
        {"type": f"{name}.done", "item_id": "i", "text": TEXT},
        {"type": "response.function_call_arguments.done", "item_id": "j", "arguments": ARGUMENTS},
    ]
    got = events(streamed(stream(*pieces, done[0], *calls, done[1])))
    assert "".join(each["delta"] for each in got if each["type"] == f"{name}.delta") == BACK
    arguments = "".join(each["delta"] for each in got if each["type"] == calls[0]["type"])
    assert json.loads(arguments)["text"] == BACK
    texts = [each["text"] for each in got if "text" in each]
    assert texts == [BACK]
    assert got[-1]["arguments"] == arguments


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
    chunks = [
        b": comment\n\n",
        b'data:  {"choices": [], "usage": {}}\n\n',
        b"data: [DONE]\n\n",
        b"data: 1\n\n",
    ]
    assert streamed([*chunks, b"half"]) == b"".join(chunks) + b"half"


NAMES = [
    *("choices", "delta", "content", "index", "tool_calls", "function", "arguments", "id"),
    *("type", "text", "finish_reason", "item_id", "function_call"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["[[", "path 1]]", "[", "ping", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.sampled_from(["choices", "delta", "index", "type", "item_id"]), JSON)))
def test_whatever_an_engine_streams_is_passed_on(bodies):
    assert len(events(streamed(stream(*bodies)))) >= len(bodies)


@pytest.mark.parametrize(
    "between",
    [
        choice({}),
        choice({"content": None}),
        choice({"reasoning_content": ""}),
        choice({"content": "B"}, 1),
        {"choices": [], "usage": {"completion_tokens": 1}},
        {"choices": [choice({}, 1, "stop")["choices"][0], choice({}, 0)["choices"][0]]},
    ],
)
def test_an_event_that_tells_nothing_of_a_text_does_not_cut_a_reference(between):
    pieces = choice({"content": "[[pa"}), between, choice({"content": "th 1]]"}), choice({}, reason="stop")
    told = [each for body in events(streamed(stream(*pieces))) for each in body["choices"]]
    assert "".join(each["delta"].get("content") or "" for each in told if not each["index"]) == "/home/me/x"


def test_another_choice_that_ends_does_not_cut_a_reference():
    both = {
        "choices": [
            choice({"content": "B"}, 1, "stop")["choices"][0],
            choice({"content": "[[pa"})["choices"][0],
        ]
    }
    body = streamed(stream(both, choice({"content": "th 1]]"}), choice({}, reason="stop")))
    told = [each for one in events(body) for each in one["choices"]]
    assert "".join(each["delta"].get("content", "") for each in told if not each["index"]) == "/home/me/x"


def test_arguments_as_an_object_hold_plain_texts_of_any_name():
    use = {
        "type": "tool_use",
        "input": {"arguments": "[[path 2]]", "files": {"[[path 1]]/a": [{"partial_json": "[[path 2]]"}]}},
    }
    back = json.loads(answered(json.dumps({"content": [use]}).encode()))
    path = VALUES["[[path 2]]"]
    assert back["content"][0]["input"] == {
        "arguments": path,
        "files": {"/home/me/x/a": [{"partial_json": path}]},
    }


@pytest.mark.parametrize("size", [1, 3, 200])
def test_an_answer_in_json_stays_json(size):
    pieces = [choice({"content": piece}) for piece in cut(ARGUMENTS, size)]
    body = streamed(stream(*pieces, choice({}, reason="stop")), answers_json=True)
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in events(body))
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


def test_what_has_no_reference_keeps_its_bytes():
    answer = b'{"choices": [{"message": {"content": "[[path 1]]"}, "logprobs": {"big": 1e400, "n": 1.50}}]}'
    assert b'"logprobs":{"big": 1e400, "n": 1.50}' in answered(answer)


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
