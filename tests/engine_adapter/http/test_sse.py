import time

import pytest

from engine_adapter.errors import EngineGarbled
from engine_adapter.http.sse import MAX_EVENT_BYTES, Speech, WholeEvents, is_silent

RAW = b"data: a\n\nevent: x\r\ndata: b\r\n\r\ndata: c\n\r\n: d\n\n"


@pytest.mark.parametrize(
    ("chunk", "silent"),
    [
        (b":\n\n", True),
        (b": ping\r\n\r\n:\n\n", True),
        (b":", True),
        (b"\n\n", True),  # the end of one
        (b"data: a\n\n", False),
        (b":\n\ndata: a\n\n", False),
        (b"event: a\n", False),
    ],
)
def test_comments_say_nothing(chunk, silent):
    assert is_silent(chunk) is silent


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_speech_begins_with_the_first_line_that_is_no_comment(size):
    comments = b": ping\n\n:\r\n\r\n: data: x\n\n"
    raw, speech = comments + b"data: a\n\n", Speech()
    begins = [at for at in range(0, len(raw), size) if speech.begins_in(raw[at : at + size])]
    assert begins[0] == len(comments) // size * size


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_events_keep_their_bytes_in_any_pieces(size):
    events, raw = WholeEvents(), RAW + b"data: cut\r\n"
    found = [each for at in range(0, len(raw), size) for each in events.feed(raw[at : at + size])]
    assert found == [b"data: a\n\n", b"event: x\r\ndata: b\r\n\r\n", b"data: c\n\r\n", b": d\n\n"]
    assert events.rest == b"data: cut\r\n"


def test_a_long_event_in_small_pieces_takes_no_quadratic_time():
    events, piece = WholeEvents(), b"a" * 64
    began = time.process_time()
    assert not any(events.feed(piece) for _ in range(64 * 1024))
    assert len(events.feed(b"\n\n")[0]) == 64 * 64 * 1024 + 2
    assert time.process_time() - began < 2, "4 MiB; looking at all of it with each piece takes minutes"


@pytest.mark.parametrize("take", [WholeEvents.feed, WholeEvents.joined])
def test_an_event_without_end_is_given_up(take):
    events, piece = WholeEvents(), b"a" * (1 << 20)
    assert not any(take(events, piece) for _ in range(MAX_EVENT_BYTES >> 20))
    with pytest.raises(EngineGarbled, match="longer than 8 MiB"):
        take(events, b"a")
    assert events.rest == b""


@pytest.mark.parametrize("take", [WholeEvents.feed, WholeEvents.joined])
def test_many_events_at_once_may_be_longer_together(take):
    events, n_times = WholeEvents(), MAX_EVENT_BYTES // len(RAW) + 1
    assert len(take(events, RAW * n_times + b"data")) in (4 * n_times, len(RAW) * n_times)
    assert events.rest == b"data"


def test_whole_events_pass_as_one_piece():
    events = WholeEvents()
    assert events.joined(RAW) is RAW
    assert events.joined(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert events.joined(b"\n\n") == b"data: b\n\n"
    assert events.joined(b"data: c") == b""
    assert (events.take_rest(), events.take_rest()) == (b"data: c", b"")
