"""How an answer is cut into events, and what it passes."""

import pytest

from engine_adapter import EngineGarbled, EngineSpec, Headers
from engine_adapter.http.sse import MAX_EVENT_BYTES
from proxy.core.quotas import Left
from proxy.request.stages import Event, Stage, Staged, passed_on, told_with_error, with_limits
from tests.fakes import event
from tests.proxy.request.passing import JSON, Client, passed

RAW = event({"a": 1}) + b": quiet\n\n" + b"event: x\r\ndata: b\r\ndata: c\r\n\r\n"


class Reader(Stage):
    def __init__(self, marks=None):
        self.marks, self.read = marks, []

    def event(self, event):
        self.read.append(event.data)
        return (event,)


class Louder(Stage):
    """Says what it gets in capitals, comments apart, and how it ends."""

    changes = True

    def event(self, event):
        return (event.with_data(event.data.upper()),) if event.data else ()

    def end(self):
        return (Event(b"data: END\n\n"),)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(RAW)])
def test_events_of_either_line_end_in_any_pieces(size):
    reader, chunks = Reader(), [RAW[at : at + size] for at in range(0, len(RAW), size)]
    client = passed(reader, Louder(), chunks=[*chunks, b"data: cut"])
    assert reader.read == [b'{"a": 1}', b"", b"b\nc", b"cut"]
    assert client.body == b'data: {"A": 1}\n\nevent: x\r\ndata: B\nC\r\n\r\ndata: CUTdata: END\n\n'
    assert passed(Reader(), chunks=[*chunks, b"data: cut"]).body == RAW + b"data: cut"


def test_a_stage_sees_only_what_has_its_marks_and_no_more_once_it_has_none():
    reader = Reader([b'"a"'])
    client = Client()
    staged = Staged(client, [reader])
    staged.start(200, [(b"content-type", b"text/event-stream")])
    staged.write(RAW)
    reader.marks = ()
    staged.write(event({"a": 2}))
    staged.write(event({"a": 3}))
    assert reader.read == [b'{"a": 1}']
    assert client.chunks == [RAW, event({"a": 2}), event({"a": 3})]


def test_a_whole_answer_that_may_be_changed_is_sent_when_it_is_complete():
    client = Client()
    staged = Staged(client, [Reader([b"?"]), Louder()])
    staged.start(200, [(b"content-type", JSON.encode()), (b"content-length", b"2")])
    staged.write(b"a")
    assert client.head is None
    staged.finish(b"b")
    assert (client.head, client.chunks) == ((200, [(b"content-type", JSON.encode())]), [b"AB"])


def test_an_event_that_is_too_long_to_be_collected():
    long = [b"data: " + b"x" * MAX_EVENT_BYTES, b"x\n\n", RAW]
    reader = Reader()
    assert passed(reader, chunks=long).body == b"".join(long)
    assert reader.read == []
    with pytest.raises(EngineGarbled, match="longer than"):
        passed(Louder(), chunks=long)


SPEC = EngineSpec("vllm", "http://engine:8000", "e")


class Response:
    def __init__(self, status, *headers):
        self.status, self.headers = status, Headers(list(headers))


@pytest.mark.parametrize(
    "name",
    [
        *(b"connection", b"set-cookie", b"x-kvpin-engine", b"access-control-max-age"),
        *(b"clear-site-data", b"refresh", b"strict-transport-security", b"x-accel-redirect", b"alt-svc"),
        b"location",  # on an answer that is no redirection
    ],
)
def test_headers_that_end_here(name):
    kept = (b"x-engine", b"1")
    assert passed_on(Response(200, (name, b"x"), kept), SPEC) == [kept]


def test_what_an_engine_tells_with_an_error():
    given = Headers([(b"retry-after", b"3"), (b"x-ratelimit-reset", b"1"), (b"server", b"x")])
    assert told_with_error(Headers([(b"allow", b"POST")])) == {"allow": "POST"}
    assert told_with_error(given) == {"retry-after": "3", "x-ratelimit-reset": "1"}
    assert told_with_error(Headers([(b"retry-after", "ż".encode())])) == {}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0ms"), (0, "0ms"), (0.0171, "18ms"), (1, "1s"), (8.64, "8.64s"), (60, "1m0s"), (360.5, "6m0.5s")],
)
def test_limits_are_told_as_openai_tells_them_in_place_of_the_engines(seconds, told):
    engines = [(b"x-ratelimit-limit-requests", b"9"), (b"content-type", b"text/plain")]
    assert with_limits(engines, [Left("tokens", 600, 5, seconds)]) == [
        (b"content-type", b"text/plain"),
        (b"x-ratelimit-limit-tokens", b"600"),
        (b"x-ratelimit-remaining-tokens", b"5"),
        (b"x-ratelimit-reset-tokens", told.encode()),
    ]
