from __future__ import annotations

import pytest

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.options import DEFAULT_KV_BLOCKS, MEMORY_SHARE, EmbeddedOptions


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tokens_per_block": 12}, "tokens_per_block is 12; a power of two"),
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"kv_blocks": 1, "kv_bytes": 1}, "kv_blocks and kv_bytes"),
        ({"kv_blocks": 0}, "kv_blocks is 0"),
        ({"kv_bytes": -1}, "kv_bytes is -1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"pin_share": 1.1}, "pin_share is 1.1"),
        ({"host_cache_bytes": -5}, "host_cache_bytes is -5"),
    ],
)
def test_bad_values_are_named(values, named):
    with pytest.raises(EngineSpecError, match=named):
        EmbeddedOptions(**values)


def blocks(available=None, context=1000, **values):
    return EmbeddedOptions(**values).gpu_blocks(100, context=context, available=available)


def test_without_a_size_the_cache_holds_what_requests_need_in_a_part_of_the_memory():
    assert blocks(available=10**9) == 32 * 63
    assert blocks(available=10**9, max_num_seqs=2, tokens_per_block=8) == 2 * 125
    assert blocks(available=int(100 * 100 / MEMORY_SHARE)) == 100
    assert blocks() == DEFAULT_KV_BLOCKS
    with pytest.raises(EngineSpecError, match="25% of the free memory is 97, less than one block"):
        blocks(available=388)
