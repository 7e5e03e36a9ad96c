"""KV from one vLLM to another by its NixlConnector: the decode engine pulls.

The first leg asks the prefill engine for one token, and to keep the prompt's blocks. Its answer names them in
`kv_transfer_params`, which the second leg passes on as it is. The prefill engine keeps the blocks for
`kv_lease_duration` after its answer (30 s by default), and longer while the decode engine, which has the
request by then, sends heartbeats.

Several choices of one request would each pull, and the first one that did would free the blocks. An answer
that is no stream shows its first token last. So both, and all other routes, pull with a request of their own.
It names the prompt by its token ids: if these are not the engine's, the KV is found by no request.
"""

from __future__ import annotations

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody, RawFields, decode_object
from engine_adapter.errors import EngineGarbled
from engine_adapter.http.usage import read_answer_usage
from engine_adapter.transfer import Handover, Transfer
from engine_adapter.types import TokenIds
from engine_adapter.vllm.requests import computes_all

_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_PARAMS, _IDS = "kv_transfer_params", "prompt_token_ids"
# What the prefill engine is asked for. It fills in the rest.
_KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields about the answer, which the first leg does not need. Some contradict its one token.
_OF_ANSWER = (
    "logprobs",
    "min_tokens",
    "return_token_ids",
    "stop_token_ids",
    "stream_options",
    "top_logprobs",
)
# Likewise, but some of them change the prompt. So they are left out only if its token ids go along.
_OF_GENERATION = (
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "tools",
)
# With these fields a request would pull several times, or answers with its prompt.
_SEVERAL = ("n", "best_of")
_OTHERWISE = ("echo", "use_beam_search")
# Fields of a request that a pull of its own has, too.
_OF_PULL = ("model", "cache_salt", "priority")
# The lease may begin a little before its engine says so, and the decode engine needs time to fetch the KV.
MARGIN_S = 5.0


class NixlPull(Transfer):
    """`Transfer` by NixlConnector, pulled by the decode engine."""

    name = "NIXL pull"
    remedy = """start it with --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both",…}'"""
    checks_all = False  # its limit is one token, whatever the client's is

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: the prefill engines' `kv_lease_duration`, above `MARGIN_S`."""
        self.usable_s = lease_s - MARGIN_S

    @override
    def takes(self, route: str, body: JsonBody) -> bool:
        """Unless its engine computes the whole prompt anyway, or its client moves KV by its own means."""
        is_one = route in (_CHAT, _COMPLETIONS, _RESPONSES)
        return is_one and body.hint(_PARAMS) is None and not computes_all(route, body)

    @override
    def fetch(self, route: str, body: JsonBody, token_ids: TokenIds[int]) -> tuple[str, JsonBody] | None:
        """None for a stream of one answer: its first token shows that the KV was pulled."""
        is_one = all(body.hint(name) in (None, 1) for name in _SEVERAL)
        is_usual = route != _RESPONSES and all(body.hint(name) in (None, False) for name in _OTHERWISE)
        if body.get("stream") is True and is_one and is_usual:
            return None
        named = {name: msgspec.Raw(body.raw_of(name)) for name in _OF_PULL if name in body}
        pull = {"prompt": token_ids.tolist(), "max_tokens": 1, "temperature": 0, "stream": False}
        return _COMPLETIONS, JsonBody(msgspec.json.encode({**named, **pull}))

    @override
    def first_leg(self, body: JsonBody) -> JsonBody:
        limits = {"max_tokens": 1}
        if "max_completion_tokens" in body:
            limits["max_completion_tokens"] = 1
        own = _params_of(body)
        drop = (*_OF_ANSWER, *_OF_GENERATION) if _IDS in own else _OF_ANSWER
        params = {**own, **_KEEP}
        # KV is kept only if the answer ends by its limit: its one token may be one that ends answers.
        ends = {**limits, "ignore_eos": True}
        return body.replace(**dict.fromkeys(drop), **ends, stream=False, kv_transfer_params=params)

    @override
    def handover(self, answer: bytes, asked: JsonBody) -> Handover | None:
        try:
            kept = _decode_answer(answer).kv_transfer_params
            fields = decode_object(decode_object(answer)[_PARAMS]) if kept is not None else {}
        except UNREADABLE as error:
            raise EngineGarbled(f"its answer to a prefill cannot be read: {error}") from error
        if kept is None or not kept.is_there:
            return None
        cached = read_answer_usage(answer).cached_tokens
        return Handover(fields, kept.remote_prefill_cached_tokens if cached is None else cached)

    @override
    def second_leg(self, body: JsonBody, handover: Handover) -> JsonBody:
        return body.replace(kv_transfer_params={**_params_of(body), **handover.fields})


class _Kept(msgspec.Struct):
    """The part of the prefill engine's `kv_transfer_params` that kvpin reads. Blocks are listed by KV cache
    group."""

    do_remote_prefill: bool = False
    remote_block_ids: list[object] | None = None
    transfer_mode: str | None = None
    remote_prefill_cached_tokens: int | None = None

    @property
    def is_there(self) -> bool:
        """True if blocks are kept, for another engine to pull."""
        has_blocks = any(group != [] for group in self.remote_block_ids or ())
        return self.do_remote_prefill and has_blocks and self.transfer_mode in (None, "pull")


class _Answer(msgspec.Struct):
    kv_transfer_params: _Kept | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def _params_of(body: JsonBody) -> RawFields:
    """The parameters that kvpin has set itself: the prompt's token ids."""
    return decode_object(body.raw_of(_PARAMS)) if _PARAMS in body else {}
