from __future__ import annotations

import pytest

from engine_adapter.errors import EngineSpecError
from engine_adapter.torch_engine.options import DEFAULT_KV_BLOCKS, EngineOptions


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
        EngineOptions(**values)


def test_sizes_in_blocks():
    assert EngineOptions(kv_blocks=7).gpu_blocks(100) == 7
    assert EngineOptions(kv_bytes=799).gpu_blocks(100) == 7
    assert EngineOptions().gpu_blocks(100) == DEFAULT_KV_BLOCKS
    assert EngineOptions(host_cache_bytes=250).host_blocks(100) == 2
    with pytest.raises(EngineSpecError, match="less than one block of 100 bytes"):
        EngineOptions(kv_bytes=99).gpu_blocks(100)
