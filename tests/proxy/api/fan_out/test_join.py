"""Answers of single requests, joined."""

import json
from itertools import permutations

import pytest

from engine_adapter import JsonBody
from proxy.api.fan_out.join import Joined, JoinedList, SingleAnswer, is_error, usage_of
from proxy.api.fan_out.split import AnswerPlace, Several
from proxy.errors import EngineFailed
from proxy.request.stages import Event

BODY = JsonBody(b"{}")
ONE = Several(BODY, None, 1, 1)


def part(prompt=0, index=0):
    return AnswerPlace(prompt, index)


def usage(prompt, completion, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def join(*answers, choices=1, per_prompt=1, hides=False):
    """The joined answer of parts in order: (prompt, answer)."""
    pairs = [(part(prompt, at), json.dumps(answer).encode()) for at, (prompt, answer) in enumerate(answers)]
    several = Several(BODY, None, choices, per_prompt, hides_logprobs=hides)
    return json.loads(Joined(several).whole(pairs))


def answer(text, tokens=None, **fields):
    return {
        "id": f"id-{text}",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
        **({"usage": tokens} if tokens else {}),
        **fields,
    }


def test_choices_of_one_prompt():
    made = join(
        (0, answer("a", usage(10, 2, 8), system_fingerprint="f", timings={"x": 1})),
        (0, answer("b", usage(10, 3, 9))),
        choices=2,
        per_prompt=2,
    )
    assert made == {
        "id": "id-a",
        "created": 1,
        "model": "m",
        "system_fingerprint": "f",
        "timings": {"x": 1},
        "choices": [
            {"index": 0, "text": "a", "finish_reason": "stop"},
            {"index": 1, "text": "b", "finish_reason": "stop"},
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 8},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    }


def test_prompts_whose_engine_made_the_choices():
    both = [{"index": 1, "text": "late"}, {"index": 0, "text": "early"}]
    made = join(
        (0, {**answer("x", usage(10, 2, 8)), "choices": both}),
        (1, {**answer("y", usage(20, 3, 16)), "choices": both}),
        choices=2,
    )
    assert [(choice["index"], choice["text"]) for choice in made["choices"]] == [
        (0, "early"), (1, "late"), (2, "early"), (3, "late"),
    ]  # fmt: skip
    assert made["usage"]["prompt_tokens"] == 30
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 24}


def test_without_usage_there_is_none_and_counts_that_are_none_are_left_out():
    assert "usage" not in join((0, answer("a")), (0, answer("b")), choices=2, per_prompt=2)
    counts = [(part(), {"prompt_tokens": 3, "cost": None}), (part(1, 1), {"prompt_tokens": 4})]
    assert usage_of(counts) == {"prompt_tokens": 7}


@pytest.mark.parametrize("shape", ["completion", "chat"])
@pytest.mark.parametrize("shown", [False, True])
def test_the_best_are_kept(shape, shown):
    def scored(text, *logprobs):
        told = (
            {"token_logprobs": list(logprobs)}
            if shape == "completion"
            else {"content": [{"logprob": value} for value in logprobs]}
        )
        return answer(text) | {"choices": [{"index": 0, "text": text, "logprobs": told}]}

    made = join(
        (0, scored("poor", -5.0)),
        (0, scored("best", -1.0, -1.0, -1.0)),
        (0, answer("untold")),
        (0, scored("good", None if shape == "completion" else -2.0, -2.0)),
        choices=2,
        per_prompt=4,
        hides=not shown,
    )
    assert [(choice["index"], choice["text"]) for choice in made["choices"]] == [(0, "best"), (1, "good")]
    assert all(bool(choice["logprobs"]) is shown for choice in made["choices"])


@pytest.mark.parametrize("content", [b"", b"[]", b'{"data":[]}', b'{"choices":1}', b"\xff"])
def test_what_is_no_answer(content):
    with pytest.raises(EngineFailed):
        SingleAnswer.of(content)


class TestStream:
    @staticmethod
    def event(stream, at, **fields):
        sent = stream.event(part(index=at), Event(json.dumps(fields).encode(), is_whole=True))
        return json.loads(sent.removeprefix(b"data: ")) if sent else None

    def test_events_have_one_head_and_the_joined_index(self):
        stream, head = Joined(ONE), {"id": "a", "created": 1, "model": "m"}
        first = self.event(stream, 3, **head, choices=[{"index": 0, "text": "x"}])
        assert first == head | {"choices": [{"index": 3, "text": "x"}]}
        more = {"created": 2, "model": "m", "system_fingerprint": "f"}
        other = self.event(stream, 5, id="b", **more, choices=[{"index": 1, "text": "y"}])
        assert other == more | head | {"choices": [{"index": 6, "text": "y"}]}

    @pytest.mark.parametrize("choices", [[], None, [{"index": 0, "delta": {}}]])
    def test_usage_comes_once_at_the_end(self, choices):
        stream = Joined(ONE)
        assert self.event(stream, 1, id="b", choices=choices, usage=usage(10, 3, 9)) is None
        assert self.event(stream, 0, id="a", choices=[], usage=usage(10, 2, 8)) is None
        end = stream.end().split(b"\n\n")
        assert end[1:] == [b"data: [DONE]", b""]
        made = json.loads(end[0].removeprefix(b"data: "))
        assert (made["id"], made["choices"]) == ("b", [])
        assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        assert made["usage"]["total_tokens"] == 15

    @pytest.mark.parametrize("fields", [{"progress": 1}, {"choices": [], "usage": None}])
    def test_other_events_pass(self, fields):
        assert self.event(Joined(ONE), 0, id="a", **fields) == {"id": "a", **fields}

    @pytest.mark.parametrize("data", [b"x", b'{"choices":5}', b"\xff", b'{"a":' + b"[" * 9999])
    def test_what_is_no_event(self, data):
        with pytest.raises(EngineFailed):
            Joined(ONE).event(part(), Event(data, is_whole=True))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"error":{"message":"x"}}', True),
        (b'{"error": "x"}', True),
        (b'{"error":null,"choices":[]}', False),
        (b'{"choices":[{"text":"\\"error\\""}]}', False),
        (b'"error"', False),
        (b'{"error":' + b"[" * 9999, False),
    ],
)
def test_errors_are_told_from_text(data, expected):
    assert is_error(Event(data, is_whole=True)) is expected


GARBAGE = [5, "x", [], [1], {"prompt_tokens": {"a": 1}}, {"prompt_tokens": []}, {"prompt_tokens": None}]


@pytest.mark.parametrize("usages", [*permutations([*GARBAGE, usage(1, 2, 0)], 2)])
def test_usage_that_is_none_is_left_out(usages):
    made = join(*((0, {"choices": [{"index": 0}], "usage": each}) for each in usages))
    assert len(made["choices"]) == 2


@pytest.mark.parametrize(
    "logprobs",
    [5, [], {"token_logprobs": ["x", None]}, {"content": [5, {}]}, {"content": [{"logprob": "x"}]}],
)
def test_choices_with_garbage_for_logprobs_are_the_last(logprobs):
    good = {"content": [{"logprob": -1}]}
    answers = [(0, {"choices": [{"text": str(each), "logprobs": each}]}) for each in (logprobs, good)]
    assert [each["text"] for each in join(*answers, per_prompt=2)["choices"]] == [str(good)]


def test_values_that_cannot_be_read():
    content = b'{"choices":[{"index":"\xff","logprobs":"\xff"}],"usage":"\xff"}'
    assert SingleAnswer.of(content).usage is None


def test_each_answer_of_a_list_has_the_index_of_its_prompt_and_choice():
    answers = (
        b'{"index":0,"content":"a","timings":{"x":1.50}}',
        b'{"content":"b"}',
        b'{"content":"c","index":0}',
    )
    made = JoinedList(ONE).whole((AnswerPlace(at, at), each) for at, each in enumerate(answers))
    assert made == b"[%b,%b,%b]" % (*answers[:2], answers[2].replace(b"0", b"2"))


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff"])
def test_an_item_of_a_list_that_is_no_object(content):
    with pytest.raises(EngineFailed):
        JoinedList(ONE).whole([(part(), content)])


def test_events_of_a_list_have_it_too_until_the_one_that_says_stop():
    stream, told = JoinedList(ONE), b""
    for data, ends in (
        (b"null", False),
        (b'{"index":0,"content":"\\"stop\\":true","stop":false}', False),
        (b'{"index":0,"content":"","stop":true,"model":"m"}', True),
    ):
        assert stream.ends(Event(data, is_whole=True)) is ends
        told += stream.event(part(1, 2), Event(data, is_whole=True))
    events = [json.loads(event[6:]) for event in told.split(b"\n\n")[:-1]]
    assert [event["index"] for event in events] == [2, 2]
    assert stream.end() == b""
    with pytest.raises(EngineFailed):
        stream.event(part(1, 2), Event(b"[1]", is_whole=True))
