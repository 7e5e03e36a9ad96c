"""What connections share beside their requests, which are tested on sockets in test_http1.py."""

from tests.ports import port_of


def test_the_date_is_that_of_the_second(monkeypatch):
    port, now = port_of(None), 784_111_777.2
    monkeypatch.setattr("proxy.http.port.time.time", lambda: now)
    dated = port.date
    assert dated == b"date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"  # the example of RFC 9110
    now += 0.5
    assert port.date is dated
    now += 1.0
    assert port.date == b"date: Sun, 06 Nov 1994 08:49:38 GMT\r\n"
