import pytest

from engine_adapter.events.options import EventOptions, address_of_rank, reachable_endpoint
from engine_adapter.options import OptionError, read_options


def test_a_rank_is_0_or_more():
    options = read_options("sglang", EventOptions, {"dp_rank": "2"})
    assert options == EventOptions(dp_rank=2)
    assert (options.rank, EventOptions().rank) == (2, None)
    with pytest.raises(OptionError, match="dp_rank: must be a whole number of at least 0"):
        read_options("sglang", EventOptions, {"dp_rank": "-1"})


@pytest.mark.parametrize(
    ("endpoint", "url", "reached"),
    [
        ("tcp://*:5557", "http://gpu7:8000", "tcp://gpu7:5557"),
        ("tcp://[::]:5557", "http://[fd00::7]:8000", "tcp://[fd00::7]:5557"),
        ("tcp://10.0.0.9:5557", "http://gpu7:8000", "tcp://10.0.0.9:5557"),
        ("tcp://127.0.0.1:5557", "http://localhost:8000", "tcp://127.0.0.1:5557"),
        ("ipc:///tmp/events", "http://127.0.0.1:8000", "ipc:///tmp/events"),
        ("ipc://*:5557", "http://127.0.0.1:8000", "ipc://*:5557"),
        ("tcp://127.0.0.1:5557", "http://gpu7:8000", None),
        ("ipc:///tmp/events", "http://gpu7:8000", None),
        ("inproc://events", "http://127.0.0.1:8000", None),
        ("nowhere", "http://127.0.0.1:8000", None),
        ("tcp://*:events", "http://gpu7:8000", None),
        ("tcp://a b:5557", "http://gpu7:8000", None),
        ("", "http://gpu7:8000", None),
    ],
)
def test_a_bind_address_as_it_is_reached(endpoint, url, reached):
    assert reachable_endpoint(endpoint, url) == reached


@pytest.mark.parametrize(
    "address", ["tcp://gpu7:5557", "tcp://10.0.0.7:5557", "tcp://[fd00::7]:1", "ipc:///tmp/e"]
)
def test_an_address_to_connect_to(address):
    assert read_options("sglang", EventOptions, {"events": address}) == EventOptions(events=address)


@pytest.mark.parametrize("name", ["events", "replay"])
@pytest.mark.parametrize(
    "address", ["", "gpu7:5557", "tcp://*:5557", "tcp://gpu7", "zmq://gpu7:1", "tcp://a b:1"]
)
def test_an_address_that_nothing_can_connect_to_is_refused(name, address):
    with pytest.raises(OptionError, match=f"{name}: .* is no address to connect to"):
        read_options("sglang", EventOptions, {name: address})


def test_each_rank_has_the_next_port():
    assert address_of_rank("tcp://[fd00::7]:5557", 0) == "tcp://[fd00::7]:5557"
    assert address_of_rank("tcp://gpu7:5557", 3) == "tcp://gpu7:5560"
    assert address_of_rank("ipc:///tmp/events", 1) == "ipc:///tmp/events"
