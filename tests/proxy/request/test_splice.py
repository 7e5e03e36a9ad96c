"""A second engine's stream as the rest of the first one's. Whole streams: `test_migration.py`."""

import json
from array import array

import pytest

from engine_adapter import EngineDiverged, Resumption
from proxy.request.splice import Splice
from proxy.request.transcript import SentStream, Transcript
from tests.fakes import DONE, event


def chunk(delta, name="1", **more):
    return event({"id": name, "created": int(name), "choices": [{"index": 0, "delta": delta}], **more})


def spliced(sent, rest, *, again, cached=None):
    transcript = Transcript(keeps_text=True)
    for part in sent:
        transcript.feed(part)
    transcript.read()
    resumption = None if again else Resumption(array("i", [1]), {})
    told = SentStream("k", transcript.head, transcript.has_role, transcript.texts, resumption, cached)
    splice = Splice(told)
    got = b"".join(map(splice.feed, rest)) + splice.finish()
    return [json.loads(part[6:]) if b"{" in part else part for part in got.split(b"\n\n")[:-1]]


def deltas(chunks):
    return [part["choices"][0]["delta"] for part in chunks]


ROLE = {"role": "assistant", "content": None}


def test_an_engine_that_goes_on_sends_only_the_rest():
    rest = [chunk(ROLE, "2"), chunk({"content": "One"}, "2"), DONE]
    *chunks, done = spliced([chunk(ROLE), chunk({"content": "One"})], rest, again=False)
    assert chunks == [json.loads(chunk({"content": "One"})[6:])]
    assert done == DONE.strip()


def test_what_was_sent_before_the_role_is_kept():
    assert deltas(spliced([], [chunk(ROLE, "2")], again=True)) == [ROLE]
    assert deltas(spliced([chunk(ROLE)], [chunk({**ROLE, "content": "One"}, "2")], again=True)) == [
        {"content": "One"}
    ]


def test_a_seam_inside_a_chunk_and_between_fields():
    sent = [chunk(ROLE), chunk({"reasoning_content": "Hm"}), chunk({"content": "On"})]
    rest = [
        chunk({"role": "assistant", "reasoning_content": "H"}, "2"),
        chunk({"reasoning_content": "m"}, "2"),
        event({"id": "2", "choices": []}),
        b": comment\n\n",
        chunk({"content": "One two"}, "2"),
    ]
    assert deltas(spliced(sent, rest, again=True)) == [{"content": "e two"}]


@pytest.mark.parametrize(
    "other",
    [
        {"content": "Ona"},
        {"reasoning_content": "One"},
        {"content": "On", "tool_calls": [1]},
        {"refusal": "No"},
    ],
)
def test_another_answer_is_refused(other):
    with pytest.raises(EngineDiverged, match="another one"):
        spliced([chunk(ROLE), chunk({"content": "One"})], [chunk(other, "2")], again=True)


def test_the_error_says_where_the_answers_part():
    sent = [chunk(ROLE), chunk({"content": "One two"})]
    rest = [chunk({"content": "One"}, "2"), chunk({"content": " ten"}, "2")]
    with pytest.raises(EngineDiverged, match="the first 5 characters are the same"):
        spliced(sent, rest, again=True)


def test_an_answer_that_ends_too_early_is_refused():
    with pytest.raises(EngineDiverged, match="another one"):
        spliced([chunk({"content": "One"})], [DONE], again=True)


@pytest.mark.parametrize("details", [{"prompt_tokens_details": {"cached_tokens": 99}}, {}])
def test_the_usage_tells_what_the_first_engine_reused(details):
    last = chunk({}, "2", usage={"completion_tokens": 9, **details})
    (part,) = spliced([], [last], again=False, cached=32)
    expected = {"completion_tokens": 9} | (
        {"prompt_tokens_details": {"cached_tokens": 32}} if details else {}
    )
    assert part["usage"] == expected
