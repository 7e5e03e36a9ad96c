from proxy.request.translate.translation import Events
from tests.fakes import event


def test_events_of_either_line_end_in_any_pieces():
    raw = event({"a": 1}) + b"event: x\r\ndata: b\r\ndata: c\r\n\r\n" + b"data: cut"
    for size in (1, 2, 3, 7, len(raw)):
        events = Events()
        found = [data for at in range(0, len(raw), size) for data in events.feed(raw[at : at + size])]
        assert found == [b'{"a": 1}', b"b\nc"]
