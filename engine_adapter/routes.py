"""Routes beside `/v1`, and WebSockets, that an engine offers its clients. Each adapter declares its own.

A declared route changes nothing for other clients of the engine. An engine's other routes beside `/v1`, and
its other WebSockets, cannot be reached through kvpin. A declared route needs a line in
`proxy/request/known_routes.py`, or several tenants cannot use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptFields:
    """The fields of a body that make a completion's prompt.

    Attributes:
        text: the field with a text.
        ids: the field with token ids; it wins over `text`, and may be the same.
        unless: with one of these fields, only the engine knows the prompt.
    """

    text: str
    ids: str
    unless: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NativeRoute:
    """A route beside `/v1`.

    Attributes:
        same_as: the `/v1` route that does the same; a request is sent to that one.
        prompt: the fields of the prompt; None if the route runs none, or kvpin does not follow it.
        runs: whether it goes on from a prompt, which has a KV cache.
        lists: to a list of prompts, or for several choices (`n`, `n_cmpl`), it answers with a list: an object
            for each, which names its `index`. The events of a stream name it, too.
    """

    method: str = "POST"
    same_as: str | None = None
    prompt: PromptFields | None = None
    runs: bool = False
    lists: bool = False


def websocket(path: str) -> str:
    """The name under which a WebSocket is declared. Plain requests to its path are another route."""
    return f"WebSocket {path}"


READ = NativeRoute("GET")
"""A route that tells something, to all clients the same."""
ASK = NativeRoute("POST")
"""A route that answers a question without a prompt that kvpin follows."""
REALTIME = websocket("/v1/realtime")
"""OpenAI's Realtime API."""
RESPONSES_SOCKET = websocket("/v1/responses")
"""The WebSocket mode of OpenAI's Responses API."""


# --- fields and headers that let a request reach into an engine, or into another request ----------------
# Routers, and engines that share a prompt's work, use them among themselves. Where several tenants share
# engines, none of them may.

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
