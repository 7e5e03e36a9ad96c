import pytest

from engine_adapter.events.sources import reachable_endpoint


@pytest.mark.parametrize(
    ("endpoint", "url", "reached"),
    [
        ("tcp://*:5557", "http://gpu7:8000", "tcp://gpu7:5557"),
        ("tcp://0.0.0.0:5557", "http://10.0.0.7:8000/v1", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "http://[fd00::7]:8000", "tcp://[fd00::7]:5557"),
        ("tcp://*:5557", "http://127.0.0.1:8000", "tcp://127.0.0.1:5557"),
        ("tcp://10.0.0.9:5557", "http://gpu7:8000", "tcp://10.0.0.9:5557"),
        ("tcp://127.0.0.1:5557", "http://localhost:8000", "tcp://127.0.0.1:5557"),
        ("ipc:///tmp/events", "http://127.0.0.1:8000", "ipc:///tmp/events"),
        ("tcp://127.0.0.1:5557", "http://gpu7:8000", None),
        ("tcp://[::1]:5557", "http://gpu7:8000", None),
        ("ipc:///tmp/events", "http://gpu7:8000", None),
        ("inproc://events", "http://127.0.0.1:8000", None),
        ("nowhere", "http://127.0.0.1:8000", None),
    ],
)
def test_a_bind_address_as_it_is_reached(endpoint, url, reached):
    assert reachable_endpoint(endpoint, url) == reached
