import pytest

from engine_adapter.options import OptionError, read_options
from engine_adapter.vllm.options import VllmOptions


def test_a_rank_is_0_or_more():
    assert read_options("vllm", VllmOptions, {"dp_rank": "2"}) == VllmOptions(dp_rank=2)
    with pytest.raises(OptionError, match="dp_rank: must be a whole number of at least 0"):
        read_options("vllm", VllmOptions, {"dp_rank": "-1"})


@pytest.mark.parametrize("name", ["events", "replay"])
def test_a_bind_address_of_events_is_refused(name):
    with pytest.raises(OptionError, match=f"{name}: .* is no address to connect to"):
        read_options("vllm", VllmOptions, {name: "tcp://*:5557"})
