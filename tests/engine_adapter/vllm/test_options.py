import pytest

from engine_adapter.options import OptionError, read_options
from engine_adapter.vllm.options import VllmOptions


def test_a_rank_is_0_or_more():
    assert read_options("vllm", VllmOptions, {"dp_rank": "2"}) == VllmOptions(dp_rank=2)
    with pytest.raises(OptionError, match="dp_rank: expected `int` >= 0"):
        read_options("vllm", VllmOptions, {"dp_rank": "-1"})
