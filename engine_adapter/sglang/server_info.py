"""Reads what an SGLang server reports at `/server_info` and `/v1/models`."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import structs

from engine_adapter.detect import release_of
from engine_adapter.errors import EngineUnavailable
from engine_adapter.events.options import WILDCARDS
from engine_adapter.http.adapter import ServedModel, read_models
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


class _Memory(msgspec.Struct, frozen=True):
    token_capacity_swa: int | None = None


class _State(msgspec.Struct, frozen=True):
    """What one rank reports."""

    memory_usage: _Memory = _Memory()


class _Reported(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `/server_info` that kvpin reads. The server sends several hundred, its keys among them.

    Attributes:
        capacity_tokens: of one rank's KV pool.
        cuts_prompts: to the longest that it takes, `max_input` tokens.
        tokenizer: directory or hub id.
        publisher: of KV events; None where there is none.
        cache_report: usage tells cached tokens.
        hicache: there is a host tier.
        completion_template: text completions are rendered by it.
        disaggregation: "null" for a server that both prefills and decodes.
        bootstrap_port: of a prefill server, where decode servers meet it.
        transfer_backend: by which the halves move KV.
        keeps_states: the model has linear attention or Mamba layers, whose states are cached too.
    """

    version: str
    capacity_tokens: int | None = msgspec.field(name="max_total_num_tokens", default=None)
    reported_page: int | None = msgspec.field(name="page_size", default=None)
    dcp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    cuts_prompts: bool = msgspec.field(name="allow_auto_truncate", default=False)
    max_input: int | None = msgspec.field(name="max_req_input_len", default=None)
    tokenizer: str | None = msgspec.field(name="tokenizer_path", default=None)
    model_path: str | None = None
    chat_template: str | None = None
    publisher: EventSockets | None = msgspec.field(name="kv_events", default=None)
    kv_events_config: str | None = None
    cache_report: bool = msgspec.field(name="enable_cache_report", default=False)
    disable_radix_cache: bool = False
    hicache: bool = msgspec.field(name="enable_hierarchical_cache", default=False)
    hicache_ratio: float | None = None
    hicache_size: int = 0
    enable_lora: bool | None = None
    speculative: str | None = msgspec.field(name="speculative_algorithm", default=None)
    completion_template: str | None = None
    disaggregation: str = msgspec.field(name="disaggregation_mode", default="null")
    bootstrap_port: int = msgspec.field(name="disaggregation_bootstrap_port", default=0)
    transfer_backend: str = msgspec.field(name="disaggregation_transfer_backend", default="")
    keeps_states: bool = msgspec.field(name="uses_mamba_radix_cache", default=False)
    internal_states: tuple[_State, ...] = ()
    random_seed: int | None = None
    startup_time: Any = None
    admin_api_key: str | None = None


class ServerInfo(_Reported, frozen=True, kw_only=True):
    """A server, as it describes itself.

    Attributes:
        served: its model and LoRA adapters.
        dynamo_events: its events have the format "dynamo".
        lacks_admin_key: management routes want a key that kvpin was not given.
    """

    served: ServedModel
    dynamo_events: bool
    lacks_admin_key: bool

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers; () where it has none."""
        return release_of(self.version)

    @property
    def instance(self) -> str:
        """Identity of the process: its start-up times and its random seed differ from start to start."""
        text = msgspec.json.encode([self.version, self.startup_time, self.random_seed], order="sorted")
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @property
    def max_model_len(self) -> int | None:
        """Its context in tokens; where it cuts prompts, the longest one that it does not cut."""
        return self.max_input if self.cuts_prompts and self.max_input else self.served.max_model_len

    @property
    def page_size(self) -> int | None:
        """Tokens of a page, which is what events call a block; None where it does not say."""
        publisher = self.publisher
        return (publisher.block_size if publisher else (self.reported_page or 0) * self.dcp_size) or None

    @property
    def dp_ranks(self) -> int:
        """Data-parallel ranks, each with a cache of its own."""
        return self.publisher.dp_size if self.publisher is not None else self.dp_size * self.attn_dp_size

    @property
    def radix_cache(self) -> bool:
        """True if prefixes are reused at all."""
        return not self.disable_radix_cache

    @property
    def host_ratio(self) -> float:
        """Size of the host tier as a multiple of the GPU pool; 0 without one, and where it is not known: a
        size in gigabytes replaces the ratio, and does not say how many tokens fit."""
        return (self.hicache_ratio or 0.0) if self.hicache and not self.hicache_size else 0.0

    @property
    def lora(self) -> bool:
        """True if LoRA adapters may be loaded."""
        return bool(self.enable_lora or self.served.loras)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of one rank's pool of sliding windows; None where the model has no such pool."""
        return next((state.memory_usage.token_capacity_swa for state in self.internal_states), None)

    @property
    def events_carry_salts(self) -> bool:
        """True if events name the cache salt."""
        return self.release >= EVENTS_CARRY_SALTS

    @property
    def events_carry_lora(self) -> bool:
        """True if events name the LoRA adapter."""
        return self.release >= (EVENTS_MAY_CARRY_LORA if self.dynamo_events else EVENTS_CARRY_LORA)

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
    """The value of `--kv-events-config`."""

    format: str = "default"
    bind: bool | None = None


def read_server_info(answer: object, models: object, *, api_key: str | None = None) -> ServerInfo:
    """Reads `/server_info` and `/v1/models`; `api_key` is the key kvpin has. Raises EngineUnavailable for
    answers that are not an SGLang server's."""
    try:
        reported = msgspec.convert(answer, _Reported)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"it does not answer as SGLang does: {error}") from error
    try:
        config = msgspec.json.decode(reported.kv_events_config or "{}", type=_EventsConfig)
    except msgspec.DecodeError:
        config = _EventsConfig()
    publisher = reported.publisher
    if publisher is not None:
        binds = publisher.host in WILDCARDS if config.bind is None else config.bind
        publisher = structs.replace(publisher, binds=binds)
    # The key itself is not kept.
    changes = {"publisher": publisher, "admin_api_key": None}
    return ServerInfo(
        **{**structs.asdict(reported), **changes},
        served=read_models(models),
        dynamo_events=config.format == "dynamo",
        lacks_admin_key=reported.admin_api_key not in (None, api_key),
    )


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
    """Reads the load of one rank, or of all ranks together. `cache_hit_rate`: share of recent prompt tokens
    that were reused, as the server reports it."""

    def __init__(self, control: ControlClient, dp_rank: int | None) -> None:
        self._control, self._dp_rank = control, dp_rank
        self._is_old, self._prefilled = False, 0
        self.cache_hit_rate: float | None = None

    async def read(self, *, judges: bool = True) -> EngineLoad:
        """Raises EngineUnavailable if the rank is missing or, if it `judges`, its process was replaced. Only
        health checks judge: another reading may be older than the last one, or notice a restart in vain."""
        before = self._prefilled
        ranks = [rank for rank in await self._ranks() if self._dp_rank in (None, rank.dp_rank)]
        if not ranks:
            has_no_rank = f"it has no dp_rank {self._dp_rank}"
            raise EngineUnavailable("it does not report its load" if self._dp_rank is None else has_no_rank)
        prefilled = sum(rank.total_prefill_uncached_tokens for rank in ranks)
        if judges:
            if prefilled < before:
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
