"""Answers of single requests, joined into a list."""

import json

import pytest

from engine_adapter import JsonBody
from proxy.api.fan_out.listed import ListedStream, joined_list, read_listed
from proxy.api.fan_out.split import Part, Several
from proxy.errors import EngineFailed

BODY = JsonBody(b"{}")
THIRD = Part(BODY, 1, 2)


def test_each_answer_has_the_index_of_its_prompt_and_choice():
    parts = [Part(BODY, at, at) for at in range(3)]
    answers = [
        read_listed(b'{"index":0,"content":"a","timings":{"x":1.50}}'),
        read_listed(b'{"content":"b"}'),
    ]
    answers.append(read_listed(b'{"content":"c","index":0}'))
    made = joined_list(Several(BODY, None, 1, 1), zip(parts, answers, strict=True))
    assert made == (
        b'[{"index":0,"content":"a","timings":{"x":1.50}},{"content":"b"},{"content":"c","index":2}]'
    )


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff"])
def test_what_is_no_answer(content):
    with pytest.raises(EngineFailed):
        read_listed(content)


def test_events_have_it_too_until_the_one_that_says_stop():
    stream, told = ListedStream(), b""
    for data, ends in (
        (b"null", False),
        (b'{"index":0,"content":"\\"stop\\":true","stop":false}', False),
        (b'{"index":0,"content":"","stop":true,"model":"m"}', True),
    ):
        assert stream.ends(data) is ends
        told += stream.event(THIRD, data)
    events = [json.loads(event[6:]) for event in told.split(b"\n\n")[:-1]]
    assert [event["index"] for event in events] == [2, 2]
    assert stream.end() == b""
    with pytest.raises(EngineFailed):
        stream.event(THIRD, b"[1]")
