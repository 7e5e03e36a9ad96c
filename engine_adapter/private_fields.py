"""Fields and headers that let a request reach into an engine, or into another request.

Routers, and engines that share a prompt's work, use them among themselves. Where several tenants share
engines, none of them may.
"""

from __future__ import annotations

OWN_IDS = frozenset({"rid", "request_id"})
"""Fields with the engine's own id of a request. Two requests with one id end each other, or mix."""
HINTS = frozenset({"kv_hints", "priority"})
"""Fields that tell an engine where KV lies, or which request to run first. Without them the answer is the
same."""
PRIVATE_FIELDS = frozenset(
    {
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "custom_logit_processor",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "disaggregated_params",
        "ec_transfer_params",
        "kv_transfer_params",
        "migration_request",
        "preserve_cache",
        "routed_dp_rank",
        "session_params",
        "with_cache",
    }
)
"""Fields that name other servers, other sessions' KV, ranks, or code to run."""
PRIVATE_WITHIN = (("vllm_xargs",), ("sampling_params", "extra_args"))
"""Paths of the objects within a request from which vLLM reads `kv_transfer_params`, too."""
PRIVATE_HEADERS = frozenset({b"x-request-id", b"x-data-parallel-rank", b"x-correlation-id"})
"""Headers with the same meanings, in lower case."""
ADAPTER_FIELDS = frozenset({"lora", "lora_path", "lora_request"})
"""Fields that choose a LoRA adapter, whatever the request names as its model."""
