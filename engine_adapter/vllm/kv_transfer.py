"""KV from one vLLM to another: how a server was started to pass it on, and the two legs of a request."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

import msgspec
from typing_extensions import override

from engine_adapter.body import UNREADABLE, JsonBody, RawFields, decode_object
from engine_adapter.errors import EngineError, EngineGarbled, EngineRejected
from engine_adapter.hold import Handover, Transfer
from engine_adapter.http.answer_fields import read_answer_usage
from engine_adapter.http.control import ControlClient
from engine_adapter.types import Finding, Role, TokenIds
from engine_adapter.vllm.options import MARGIN_S, VllmSpec
from engine_adapter.vllm.requests import computes_all

# --- KV from one vLLM to another by its NixlConnector: the decode engine pulls --------------------------
# The first leg asks the prefill engine for one token, and to keep the prompt's blocks. Its answer names
# them in `kv_transfer_params`, which the second leg passes on as it is. The prefill engine keeps the blocks
# for `kv_lease_duration` after its answer (30 s by default), and longer while the decode engine, which has
# the request by then, sends heartbeats.
#
# Several choices of one request would each pull, and the first one that did would free the blocks. An
# answer that is no stream shows its first token last. So both, and all other routes, pull with a request of
# their own. It names the prompt by its token ids: if these are not the engine's, the KV is found by no
# request.

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
    "logprobs", "min_tokens", "return_token_ids", "stop_token_ids", "stream_options", "top_logprobs",
)  # fmt: skip
# Likewise, but some of them change the prompt. So they are left out only if its token ids go along.
_OF_GENERATION = (
    "guided_choice", "guided_grammar", "guided_json", "guided_regex", "response_format",
    "structured_outputs", "tool_choice", "tools",
)  # fmt: skip
# With these fields a request would pull several times, or answers with its prompt.
_SEVERAL = ("n", "best_of")
_OTHERWISE = ("echo", "use_beam_search")
# Fields of a request that a pull of its own has, too.
_OF_PULL = ("model", "cache_salt", "priority")


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
    return decode_object(body.raw_of(_PARAMS)) if body.gives(_PARAMS) else {}


# --- how a vLLM was started to pass KV on, as it says itself in dev mode, and what follows --------------
# `GET /server_info` has its `--kv-transfer-config`. Servers say nothing outside dev mode: then the operator's
# settings are all that is known.

_CONNECTOR = "NixlConnector"
_ITS_NAMES = (_CONNECTOR, "NixlPullConnector")
# These move KV between engines, too, but not as kvpin asks for it.
_OTHERS = ("MoRIIOConnector", "MooncakeConnector", "NixlPushConnector")
# These keep KV of their own engine below its GPU.
_OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
# The first time, a server looks its machine over: that took 4.6 s.
_ANSWER_S = 20.0
_MAY_CONTAIN_IT = "MultiConnector"
_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}


class KvTransfer(msgspec.Struct, frozen=True):
    """The server's `--kv-transfer-config`. `kv_connector`: None if it passes no KV on;
    `kv_load_failure_policy`: "recompute", or "fail": an answer without its KV is an error."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_load_failure_policy: str | None = None
    kv_connector_extra_config: dict[str, object] = {}

    @property
    def moves_kv(self) -> bool:
        """True if others can pull its KV, and it can pull theirs."""
        return self.kv_connector in (*_ITS_NAMES, _MAY_CONTAIN_IT)

    @property
    def offloads(self) -> bool:
        """True if it keeps KV below the GPU by itself, and may do so."""
        return self.kv_connector in (*_OFFLOADING, _MAY_CONTAIN_IT)

    def blocks_per_chunk(self, block_size: int | None) -> int:
        """Blocks that it offloads together; `block_size` is that of its GPU."""
        if self.kv_connector != "OffloadingConnector":
            return 1
        match self.kv_connector_extra_config:
            case {"blocks_per_chunk": int(blocks)}:
                return blocks
            case {"block_size": int(tokens)} if block_size:
                return tokens // block_size
            case _:
                return 1

    @property
    def role(self) -> Role:
        """The part of requests that it was started for."""
        return _ROLES.get(self.kv_role or "", Role.BOTH)

    @property
    def lease_s(self) -> float:
        """Seconds for which it keeps KV for others."""
        lease_s = self.kv_connector_extra_config.get("kv_lease_duration")
        return lease_s if isinstance(lease_s, int | float) else 30.0


class _Config(msgspec.Struct, frozen=True):
    kv_transfer_config: KvTransfer | None = None


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _Config


async def ask(control: ControlClient) -> KvTransfer | None:
    """What the server says of it; None if it does not say, or says it as older ones do. Raises EngineRejected
    for "too many requests"."""
    try:
        told = await control.read(_ServerInfo, "GET", "/server_info?config_format=json", answer_s=_ANSWER_S)
    except EngineError as error:
        if isinstance(error, EngineRejected) and error.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise
        return None
    return told.vllm_config.kv_transfer_config or KvTransfer()


def role_of(spec: VllmSpec, told: KvTransfer | None) -> Role:
    """The part of requests that it is meant for: as its settings say, else as it says itself."""
    return told.role if spec.role is Role.BOTH and told is not None else spec.role


def is_meant_to(spec: VllmSpec, told: KvTransfer | None) -> bool:
    """True if it is to pass KV on: it has a role, or its connector is known and passes KV both ways."""
    if spec.options.lmcache is not None:  # that one has its own connector
        return False
    is_known = spec.options.kv_transfer is not None or (told is not None and told.kv_connector in _ITS_NAMES)
    return is_known or role_of(spec, told) is not Role.BOTH


def transfer_of(spec: VllmSpec, told: KvTransfer | None) -> Transfer | None:
    """How it moves KV; None if it is not meant to, or cannot. Of the operator's lease and its own, the
    shorter one holds."""
    if not is_meant_to(spec, told):
        return None
    lease_s = spec.options.kv_lease_s if told is None else min(spec.options.kv_lease_s, told.lease_s)
    can = (told is None or told.moves_kv) and lease_s > MARGIN_S
    return NixlPull(lease_s) if can else None


def findings_of_transfer(spec: VllmSpec, told: KvTransfer | None) -> Iterator[Finding]:
    """What keeps an engine that is meant to pass KV on from doing so."""
    role = role_of(spec, told)
    if told is not None and told.kv_connector in _OTHERS:
        yield Finding(
            f"it has a {told.kv_connector}, and kvpin moves KV by {_CONNECTOR} alone: it is in no pair",
            NixlPull.remedy,
        )
        return
    if told is None or not is_meant_to(spec, told):
        return
    if not told.moves_kv:
        meant = "kv_transfer=nixl" if role is Role.BOTH else f"role={role}"
        yield Finding(f"it has {meant} and no {_CONNECTOR}: it is in no pair", NixlPull.remedy)
        return
    if told.lease_s <= MARGIN_S:
        yield Finding(
            f"it keeps KV for others for {told.lease_s:g} s: too short to be used, so it is in no pair",
            f'raise "kv_lease_duration" in --kv-transfer-config above {MARGIN_S:g}',
        )
    if role is not Role.PREFILL and told.kv_load_failure_policy == "fail":
        yield Finding(
            "an answer is an error if it cannot fetch the KV of its prompt",
            'add "kv_load_failure_policy":"recompute" to its --kv-transfer-config',
        )
