"""Reads what an SGLang server reports at `/server_info` and `/v1/models`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from engine_adapter.detect import release_of
from engine_adapter.errors import EngineUnavailable
from engine_adapter.events.options import WILDCARDS
from engine_adapter.http.adapter import read_models
from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineLoad

# First version whose events carry the cache salt.
EVENTS_CARRY_SALTS = (0, 5, 18)
# First versions whose events carry the LoRA adapter: with "format": "dynamo", and always.
EVENTS_MAY_CARRY_LORA, EVENTS_CARRY_LORA = (0, 5, 22), (0, 5, 23)
# Smaller pages are gathered into blocks of 16 tokens, which are too coarse for windows.
MIN_PAGE = 4
# With these, an event's tokens are pairs of neighbours, and a hit also needs the next token.
_PAIRED = ("EAGLE", "NEXTN", "FROZEN_KV_MTP")


class EventSockets(msgspec.Struct, frozen=True):
    """The server's KV event sockets. Each data-parallel rank has the next port.

    Attributes:
        host: the address that they are bound to.
        port: of rank 0's events.
        replay_port: of rank 0's replay socket, None where there is none.
        binds: the sockets wait for subscribers; else the server connects to a collector at `host`.
        block_size: tokens of a page.
        dp_size: data-parallel ranks.
    """

    host: str = msgspec.field(name="endpoint_host")
    port: int = msgspec.field(name="endpoint_port_base")
    replay_port: int | None = msgspec.field(name="replay_endpoint_port_base", default=None)
    topic: str = ""
    binds: bool = True
    block_size: int = 0
    dp_size: int = 1

    def endpoints(self, dp_rank: int) -> tuple[str, str | None]:
        """ZMQ addresses of a rank's events and replay socket, as the server reports them."""
        replay = None if self.replay_port is None else f"tcp://{self.host}:{self.replay_port + dp_rank}"
        return f"tcp://{self.host}:{self.port + dp_rank}", replay


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The facts kvpin uses.

    Attributes:
        loras, lora_paths: LoRA adapters, and where it read each from.
        rendering: its model, and its chat template.
        max_model_len: None where it does not say.
        tokenizer: directory or hub id.
        page_size: tokens of a page, which is what events call a block.
        capacity_tokens: of one rank's KV pool.
        dp_ranks: data-parallel ranks, each with a cache of its own.
        publisher: of KV events; None where there is none.
        dynamo_events: its events have the format "dynamo".
        cache_report: usage tells cached tokens.
        radix_cache: prefixes are reused at all.
        hicache: there is a host tier.
        host_ratio: its size as a multiple of the GPU pool, 0 where unknown.
        lora: LoRA adapters may be loaded.
        completion_template: text completions are rendered by a template.
        window_tokens: of one rank's pool of sliding windows; None where the model has no such pool.
        keeps_states: the model has linear attention or Mamba layers, whose states are cached too.
        disaggregation: "null" for a server that both prefills and decodes.
        bootstrap_port: of a prefill server, where decode servers meet it.
        transfer_backend: by which the halves move KV.
        lacks_admin_key: management routes want a key that kvpin was not given.
        card: its own fields of the model in `/v1/models`.
    """

    version: str
    instance: str
    model: str
    loras: frozenset[str]
    max_model_len: int | None
    tokenizer: str | None
    page_size: int | None
    capacity_tokens: int | None
    dp_ranks: int = 1
    publisher: EventSockets | None = None
    dynamo_events: bool = False
    cache_report: bool = False
    radix_cache: bool = True
    hicache: bool = False
    host_ratio: float = 0.0
    lora: bool = False
    speculative: str | None = None
    completion_template: bool = False
    window_tokens: int | None = None
    keeps_states: bool = False
    disaggregation: str = "null"
    bootstrap_port: int = 0
    transfer_backend: str = ""
    lacks_admin_key: bool = False
    card: Mapping[str, Any] = field(default_factory=dict, repr=False)
    lora_paths: Mapping[str, str] = field(default_factory=dict)
    rendering: str = ""

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers; () where it has none."""
        return release_of(self.version)

    @property
    def events_carry_salts(self) -> bool:
        """True if events name the cache salt."""
        return self.release >= EVENTS_CARRY_SALTS

    @property
    def events_carry_lora(self) -> bool:
        """True if events name the LoRA adapter."""
        if self.dynamo_events:
            return self.release >= EVENTS_MAY_CARRY_LORA
        return self.release >= EVENTS_CARRY_LORA

    @property
    def is_half(self) -> bool:
        """True if it does only one half of each request."""
        return self.disaggregation in ("prefill", "decode")

    @property
    def is_hybrid(self) -> bool:
        """True if a prompt's reuse also depends on sliding windows or states, which events do not tell."""
        return self.window_tokens is not None or self.keeps_states

    @property
    def follows_windows(self) -> bool:
        """True if what its sliding windows hold can be worked out from its events."""
        pages = self.page_size is not None and self.page_size >= MIN_PAGE
        return pages and self.window_tokens is not None and not self.keeps_states and not self.hicache

    @property
    def drops_windows(self) -> bool:
        """True if its sliding windows run out of memory before its full attention does."""
        return (self.window_tokens or 0) < (self.capacity_tokens or 0)

    @property
    def pairs_tokens(self) -> bool:
        """True if pages are of pairs of tokens."""
        return (self.speculative or "").upper().startswith(_PAIRED)


class _EventsConfig(msgspec.Struct, frozen=True):
    format: str = "default"
    bind: bool | None = None


class _Memory(msgspec.Struct, frozen=True):
    token_capacity_swa: int | None = None


class _State(msgspec.Struct, frozen=True):
    """What one rank reports."""

    memory_usage: _Memory = _Memory()


class _Raw(msgspec.Struct, frozen=True):
    """The fields kvpin reads. The server sends several hundred, its keys among them."""

    version: str
    max_total_num_tokens: int | None = None
    page_size: int | None = None
    dcp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    tokenizer_path: str | None = None
    model_path: str | None = None
    chat_template: str | None = None
    kv_events: EventSockets | None = None
    kv_events_config: str | None = None
    enable_cache_report: bool = False
    disable_radix_cache: bool = False
    enable_hierarchical_cache: bool = False
    hicache_ratio: float | None = None
    hicache_size: int = 0
    enable_lora: bool | None = None
    speculative_algorithm: str | None = None
    completion_template: str | None = None
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 0
    disaggregation_transfer_backend: str = ""
    uses_mamba_radix_cache: bool = False
    internal_states: tuple[_State, ...] = ()
    random_seed: int | None = None
    startup_time: Any = None
    admin_api_key: str | None = None


def read_server_info(answer: object, models: object, *, api_key: str | None = None) -> ServerInfo:
    """Reads `/server_info` and `/v1/models`; `api_key` is the key kvpin has. Raises EngineUnavailable for
    answers that are not an SGLang server's."""
    try:
        raw = msgspec.convert(answer, _Raw)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"it does not answer as SGLang does: {error}") from error
    model = read_models(models)
    publisher, config = raw.kv_events, _events_config(raw.kv_events_config)
    if publisher is not None:
        binds = publisher.host in WILDCARDS if config.bind is None else config.bind
        publisher = structs.replace(publisher, binds=binds)
    size = publisher.block_size if publisher is not None else (raw.page_size or 0) * raw.dcp_size
    return ServerInfo(
        version=raw.version,
        instance=_identity(raw),
        model=model.name,
        card=model.card,
        loras=model.loras,
        lora_paths=model.lora_paths,
        rendering=f"model {raw.model_path}\ntemplate {raw.chat_template}",
        max_model_len=model.max_model_len,
        tokenizer=raw.tokenizer_path,
        page_size=size or None,
        capacity_tokens=raw.max_total_num_tokens,
        dp_ranks=publisher.dp_size if publisher is not None else raw.dp_size * raw.attn_dp_size,
        publisher=publisher,
        dynamo_events=config.format == "dynamo",
        cache_report=raw.enable_cache_report,
        radix_cache=not raw.disable_radix_cache,
        hicache=raw.enable_hierarchical_cache,
        # A size in gigabytes replaces the ratio. It does not say how many tokens fit.
        host_ratio=(raw.hicache_ratio or 0.0)
        if raw.enable_hierarchical_cache and not raw.hicache_size
        else 0.0,
        lora=bool(raw.enable_lora or model.loras),
        speculative=raw.speculative_algorithm,
        completion_template=raw.completion_template is not None,
        window_tokens=next((state.memory_usage.token_capacity_swa for state in raw.internal_states), None),
        keeps_states=raw.uses_mamba_radix_cache,
        disaggregation=raw.disaggregation_mode,
        bootstrap_port=raw.disaggregation_bootstrap_port,
        transfer_backend=raw.disaggregation_transfer_backend,
        lacks_admin_key=raw.admin_api_key not in (None, api_key),
    )


def _identity(raw: _Raw) -> str:
    """Identity of the process: its start-up times and its random seed differ from start to start."""
    text = msgspec.json.encode([raw.version, raw.startup_time, raw.random_seed], order="sorted")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _events_config(text: str | None) -> _EventsConfig:
    """The value of `--kv-events-config`."""
    try:
        return msgspec.json.decode(text or "{}", type=_EventsConfig)
    except msgspec.DecodeError:
        return _EventsConfig()


class _Rank(msgspec.Struct, frozen=True):
    """One data-parallel rank. The last field counts since the process started."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float = 0.0
    cache_hit_rate: float = 0.0
    total_prefill_uncached_tokens: int = 0


class _Loads(msgspec.Struct, frozen=True):
    loads: list[_Rank]


class _OldRank(msgspec.Struct, frozen=True):
    """One rank of a server before 0.5.10. The first count includes the second."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int


class Loads:
    """Reads the load of one rank, or of all ranks together.

    Attributes:
        cache_hit_rate: share of recent prompt tokens that were reused, as the server reports it.
    """

    def __init__(self, control: ControlClient, dp_rank: int | None) -> None:
        self._control = control
        self._dp_rank = dp_rank
        self._is_old = False
        self._prefilled = 0
        self.cache_hit_rate: float | None = None

    async def read(self) -> EngineLoad:
        """Raises EngineUnavailable if the rank is missing or its process was replaced."""
        ranks = [rank for rank in await self._ranks() if self._dp_rank in (None, rank.dp_rank)]
        if not ranks:
            has_no_rank = f"it has no dp_rank {self._dp_rank}"
            raise EngineUnavailable("it does not report its load" if self._dp_rank is None else has_no_rank)
        prefilled = sum(rank.total_prefill_uncached_tokens for rank in ranks)
        if prefilled < self._prefilled:
            self._prefilled = 0
            raise EngineUnavailable("the engine was restarted")
        self._prefilled = prefilled
        self.cache_hit_rate = None if self._is_old else sum(r.cache_hit_rate for r in ranks) / len(ranks)
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            gpu_usage=None if self._is_old else min(max(rank.token_usage for rank in ranks), 1.0),
        )

    def forget(self) -> None:
        """Forgets the process that was read so far."""
        self._is_old, self._prefilled = False, 0

    async def _ranks(self) -> list[_Rank]:
        if not self._is_old:
            found = await self._control.read_optional(_Loads, "/v1/loads?include=core")
            if found is not None:
                return found.loads
            self._is_old = True
        old = await self._control.read(list[_OldRank], "GET", "/get_load")
        return [_Rank(r.dp_rank, r.num_reqs - r.num_waiting_reqs, r.num_waiting_reqs) for r in old]
