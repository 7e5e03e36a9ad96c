"""What is kept of a stream, and that only whole events pass. Whole streams: `test_migration.py`."""

import pytest

from proxy.request.migration import Transcript, read_chunk
from tests.fakes import DONE, event


def chunk(delta, **choice):
    return event(
        {"id": "1", "object": "o", "choices": [{"index": 0, "delta": delta, **choice}], "usage": None}
    )


STREAM = [
    b": comment\n\n",
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "Hm"}),
    chunk({"reasoning_content": "m"}, finish_reason=None, logprobs=None),
    chunk({"content": "żó"}),
    chunk({"content": "ł\n\nw", "tool_calls": []}),
]
TEXTS = [("reasoning_content", "Hmm"), ("content", "żół\n\nw")]


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_any_number_of_events_at_once_gives_the_same(at_once, end):
    parts = [each.replace(b"\n\n", end) for each in STREAM]
    sent = Transcript(keeps_text=True)
    for at in range(0, len(parts), at_once):
        part = b"".join(parts[at : at + at_once])
        assert sent.feed(part) == part
    sent.read()
    assert (list(sent.texts), sent.has_role, sent.is_plain) == (TEXTS, True, True)
    assert set(sent.head) == {"id", "object"}


def test_a_completion_has_its_text_in_the_choice():
    sent = Transcript(keeps_text=True)
    sent.feed(event({"id": "1", "choices": [{"index": 0, "text": "One", "logprobs": None}]}))
    sent.read()
    assert (sent.texts, sent.is_plain) == ((("text", "One"),), True)


def test_too_long_a_text_is_given_up():
    sent = Transcript(keeps_text=True)
    for _ in range(40):
        sent.feed(chunk({"content": "x" * 40_000}))
    assert not sent.is_plain
    assert len(sent.texts[0][1]) < 1_200_000


@pytest.mark.parametrize("last", [event({"error": {}}), chunk({}, finish_reason="stop").replace(b": ", b":")])
def test_without_its_text_a_stream_must_not_have_ended(last):
    sent = Transcript(keeps_text=False)
    for part in STREAM:
        assert sent.feed(part) == part
    assert (sent.is_plain, sent.texts, sent.has_role, bool(sent.head)) == (True, (), True, True)
    assert sent.feed(last) == last
    assert not sent.is_plain


def test_other_events():
    assert read_chunk(DONE) is None
    assert read_chunk(b"event: ping\n\n") is None
    assert read_chunk(event({"choices": [{}, {}]})) is None
    assert read_chunk(event({"usage": {}})).choice is None
    assert read_chunk(event({"choices": None, "usage": {}})).choice is None
