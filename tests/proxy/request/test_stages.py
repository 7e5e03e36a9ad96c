"""How an answer is cut into events, and what it passes."""

import pytest

from engine_adapter import EngineGarbled
from engine_adapter.http.sse import MAX_EVENT_BYTES
from proxy.request.stages import Event, Stage, Staged
from tests.fakes import event
from tests.proxy.request.passing import JSON, Client, passed

RAW = event({"a": 1}) + b": quiet\n\n" + b"event: x\r\ndata: b\r\ndata: c\r\n\r\n"


class Reader(Stage):
    """Notes what it reads."""

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


def test_an_event_is_parsed_once_for_all_who_read_it_alike():
    read = []
    one = Event(b"data: 1\n\n")
    assert [one.read(read.append) for _ in range(2)] == [None, None]
    assert read == [b"1"]


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
