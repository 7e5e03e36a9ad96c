import pytest

from engine_adapter.events.options import EventOptions
from engine_adapter.options import OptionError, read_options


def test_a_rank_is_0_or_more():
    options = read_options("sglang", EventOptions, {"dp_rank": "2"})
    assert options == EventOptions(dp_rank=2)
    assert (options.rank, EventOptions().rank) == (2, None)
    with pytest.raises(OptionError, match="dp_rank: must be a whole number of at least 0"):
        read_options("sglang", EventOptions, {"dp_rank": "-1"})


@pytest.mark.parametrize("name", ["events", "replay"])
def test_a_bind_address_of_events_is_refused(name):
    with pytest.raises(OptionError, match=f"{name}: .* is no address to connect to"):
        read_options("sglang", EventOptions, {name: "tcp://*:5557"})
