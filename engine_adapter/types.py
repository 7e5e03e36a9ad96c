"""The data that adapters and the proxy share, all frozen.

Token ids are `array('i')` (int32) and extra ids `array('Q')` (uint64), so that hashing or comparing a prompt
is one C call over its bytes.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, cast
from urllib.parse import urlsplit

import msgspec
from typing_extensions import TypeVar

from engine_adapter.options import EngineOptions, NativeRoute
from engine_adapter.prompt.template_input import USUAL, TemplateInput

TokenIds = array  # array('i'): one int32 per token
ExtraIds = array  # array('Q'): one uint64 per token, 0 for text
_Run = TypeVar("_Run", "TokenIds[int]", str, "list[Any]")

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_USUAL_PORTS = {"http": 80, "https": 443}


class Tier(StrEnum):
    """A memory tier for KV, the fastest first."""

    GPU = "gpu"  # what attention reads directly, also on CPU engines
    HOST = "host"
    DISK = "disk"


class Capability(StrEnum):
    """A capability that an engine declares."""

    KV_EVENTS = "kv_events"  # streams stored and removed blocks
    CACHED_TOKENS = "cached_tokens"  # reports the reused tokens of its chats, at least
    TOKENIZE = "tokenize"  # tokenises a chat or a completion exactly as it would serve it
    RENDER = "render"  # tokenises requests with images, and says where each lies
    CACHE_SALT = "cache_salt"  # keeps KV apart by a salt in the request
    EXTRA_IDS = "extra_ids"  # takes fake token ids with extra ids
    PROMPT_TABLES = "prompt_tables"  # holds p-tuning tables
    FLUSH = "flush"
    OFFLOAD = "offload"
    RESTORE = "restore"
    PIN = "pin"


class Role(StrEnum):
    """The part of requests that an engine is meant for."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts, whose KV a decode engine then reads from it
    DECODE = "decode"  # generates answers, and computes prompts where that costs less


class ModelState(StrEnum):
    """The state of a model that its engine loads and unloads."""

    LOADED = "loaded"
    LOADING = "loading"
    SLEEPING = "sleeping"  # its process runs, and a request wakes it; its KV is gone
    UNLOADED = "unloaded"  # a request loads it
    DOWNLOADING = "downloading"
    FAILED = "failed"  # it failed to load; the next request tries again

    @classmethod
    def of(cls, word: str) -> ModelState:
        """The state that an engine calls so; any other word means that the model is not there."""
        return cls(word) if word in cls.__members__.values() else cls.UNLOADED


class KvVerb(StrEnum):
    """The operations of `EngineAdapter.operate`; each needs the capability of its name."""

    FLUSH = "flush"  # forget
    OFFLOAD = "offload"  # gpu → host, identity kept
    RESTORE = "restore"  # host → gpu


Options_co = TypeVar("Options_co", bound=EngineOptions, default=EngineOptions, covariant=True)


@dataclass(frozen=True, slots=True)
class EngineSpec(Generic[Options_co]):
    """The operator's description of one engine (`--engine 'KIND=URL[,name=value…]'`).

    Attributes:
        kind: its framework, one of `ENGINE_KINDS`.
        url: address of its HTTP server, without `/v1`.
        id: its name in kvpin.
        model: the served name, where the engine does not say.
        tokenizer: directory or hub id, where the engine does not say.
        api_key: sent to it instead of the client's key.
        headers: sent with every request to it, in place of the client's of the same name; may be secret.
        ca: file of certificate authorities (PEM) that check its certificate; by default the machine's own.
        cert: file of the certificate (PEM) that kvpin shows to it.
        key: file of the private key of `cert`, if `cert` does not hold it.
        share_kv: tenants may share its KV, and do if they may on all engines of its model.
        role: the part of requests that it is meant for; the kind must be able to transfer KV.
        options: settings that only its kind has.
        is_started: kvpin starts it, on another port each time.
    """

    kind: str
    url: str
    id: str
    model: str | None = None
    tokenizer: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    share_kv: bool = False
    role: Role = Role.BOTH
    options: Options_co = cast("Options_co", EngineOptions())  # noqa: RUF009 - frozen
    is_started: bool = False

    @property
    def is_local(self) -> bool:
        """True if its address means this machine."""
        return urlsplit(self.url).hostname in _LOOPBACK

    @property
    def server(self) -> str:
        """Its URL in the one spelling by which servers are compared."""
        parts = urlsplit(self.url)
        host = "127.0.0.1" if self.is_local else parts.hostname or ""
        usual = parts.port in (None, _USUAL_PORTS.get(parts.scheme))
        place = (f"[{host}]" if ":" in host else host) + ("" if usual else f":{parts.port}")
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return f"{parts.scheme}://{place}{path}"

    @property
    def address(self) -> str:
        """Its server and, where it is one of several ranks there, its rank."""
        return self.server if self.options.rank is None else f"{self.server} rank {self.options.rank}"

    def is_same(self, other: EngineSpec[Any]) -> bool:
        """True if both describe one engine. A server has several if they differ in rank or, at a gateway,
        in model or headers."""
        named = ((self.options.rank, other.options.rank), (self.model, other.model))
        differ = any(one != two and None not in (one, two) for one, two in named)
        return self.server == other.server and self.headers == other.headers and not differ


MESSAGES_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Anthropic's. Every kind of engine gets chats instead: some lack the routes, SGLang takes no salt there and
llama-server no slot, and a chat's prompt is known here without asking the engine."""
RESPONSES_ROUTES = frozenset({"/v1/responses", "/v1/responses/input_tokens"})
"""OpenAI's. Engines whose prompts kvpin cannot follow there get chats instead."""
TRANSLATED_ROUTES = MESSAGES_ROUTES | RESPONSES_ROUTES


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine, as of its last connection.

    What an engine does not tell stays at its default: None means that it is not known.

    Attributes, of every engine:
        model: the served name, which clients send as `model`.
        instance: identity of the process; if it changes, all its KV is gone. Where the process has none, one
            that the adapter makes once for itself, and `names_process` is False.
        capabilities: what it can do, as it was started.
        names_process: `instance` comes from the process itself. If not, a new process may have the same.
        rendering: all that it tells of what makes prompts, in lines that begin with `model` (its files)
            or `template`. If it changes, prompts that were made before are no longer the engine's.
        tokenizer: directory or hub id of its tokenizer; None where unknown. Without one, or
            Capability.TOKENIZE, kvpin cannot follow its cache.
        template_input: how it gives a chat to the model's template.
        tokens_per_block: its own block size in tokens, None where unknown.
        max_model_len: longest prompt + output in tokens, None where unknown.
        cuts_prompts: it cuts a prompt that is longer, and answers.
        gpu_blocks: capacity of its GPU tier in its own blocks, None where unknown.
        version: free text, for people.
        card: its own fields of the model in `/v1/models`, e.g. `max_model_len` or `meta`.
        routes: its routes beside `/v1` that clients may use.

    Of its requests:
        served_as_chats: routes of other APIs that kvpin serves as chats, because the engine lacks them or
            would not serve them on the slot or with the salt that kvpin chooses: always MESSAGES_ROUTES,
            TRANSLATED_ROUTES unless kvpin can follow the responses of the engine itself.
        runs_several: it takes several choices or prompts in one request, also streamed, and finds places for
            them itself. If False, kvpin always splits them.
        recomputes_prompts: it would compute the prompt of several choices for each of them. With reuse, kvpin
            has it computed before.
        any_model: it serves its model whatever name a request gives.
        shares_prefill: concurrent prompts compute a shared prefix only once. If False, kvpin lets the second
            one wait.
        renders_alike: it renders and tokenises with the code in engine_adapter/prompt, as kvpin does: what
            cannot be rendered here, it refuses.
        too_long: (tokens of a prompt, tokens of its context) → the fields that it adds to the error of a
            prompt that is too long.

    Of LoRA adapters:
        loras: names of those it serves beside `model`; clients send them as `model`.
        lora_paths: where it read each from, as far as it tells.
        loads_loras: it can load and unload adapters while it runs.

    Of KV events and tiers below the GPU:
        host_blocks: capacity of its host tier in its own blocks, None where unknown.
        events_read_once: reading KV events removes them, so two readers would each get a part.
        tokens_per_chunk: chunk size of tiers below the GPU that send no events and are asked with `lookup`;
            None if there are none.
        shared_tiers: name of the tiers below its GPU. Engines with the same name share them. None if it
            shares none.

    Of prompts with more than text:
        vocab_size: ids below it are text, ids from it on are fake ids; None where unknown.
        hidden_size: columns of a prompt table; None where unknown.
        renders_embeds: its `render` takes requests with prompt embeddings, also without Capability.RENDER.

    Of servers that are several engines, or half of one:
        ranks: the data-parallel ranks of its server, each with its own cache, if a request may name one; ()
            where that is not known.
        models: the models of its server, each an engine of its own, and their states; empty where its server
            has only one. `model` is "" where the operator named none of them.
        role: the part of requests that it is meant for: as its settings say, else as it says itself; None
            where neither says it.
    """

    model: str
    instance: str
    capabilities: frozenset[Capability]
    names_process: bool = True
    rendering: str = ""
    tokenizer: str | None = None
    template_input: TemplateInput = field(default=USUAL, repr=False, compare=False)
    tokens_per_block: int | None = None
    max_model_len: int | None = None
    cuts_prompts: bool = False
    gpu_blocks: int | None = None
    version: str = ""
    card: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    routes: Mapping[str, NativeRoute] = field(default_factory=dict, repr=False, hash=False)
    served_as_chats: frozenset[str] = frozenset()
    runs_several: bool = True
    recomputes_prompts: bool = False
    any_model: bool = False
    shares_prefill: bool = False
    renders_alike: bool = False
    too_long: Callable[[int, int], Mapping[str, Any]] = field(default=lambda _tokens, _limit: {}, repr=False)
    loras: frozenset[str] = frozenset()
    lora_paths: Mapping[str, str] = field(default_factory=dict, hash=False)
    loads_loras: bool = False
    host_blocks: int | None = None
    events_read_once: bool = False
    tokens_per_chunk: int | None = None
    shared_tiers: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    renders_embeds: bool = False
    ranks: tuple[int, ...] = ()
    models: Mapping[str, ModelState] = field(default_factory=dict, hash=False, compare=False)
    role: Role | None = None

    def is_another(self, now: EngineInfo) -> bool:
        """True if the engine now serves another model, or makes other prompts. A process may change its
        model, and one without identity may be another."""
        told = (self.model, now.model), (self.rendering, now.rendering)
        return any(before and after and before != after for before, after in told)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps kvpin from using an engine fully.

    Attributes:
        problem: the lack, and its consequence.
        remedy: the flag or setting that fixes it; "" if there is none.
        lacks: the capabilities that it costs.
    """

    problem: str
    remedy: str = ""
    lacks: Collection[Capability] = ()

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load that an engine reports.

    Attributes:
        counted: False if the engine reports no load and the counts mean nothing.
        gpu_usage: share of its GPU blocks in use, 0 to 1.
        outdated: the `EngineInfo` no longer holds, although the process is the same: connect again.
        emptied: since it was asked last, it has lost the KV that its answers had shown.
    """

    running: int
    waiting: int
    gpu_usage: float | None = None
    outdated: bool = False
    counted: bool = True
    emptied: bool = False


# --- KV events, in the order an engine sends them ------------------------------------------------


class Attention(StrEnum):
    """What a KV cache group must hold of a prompt, so that its KV can be reused up to a boundary."""

    PREFIX = "prefix"  # every block before the boundary: full attention
    WINDOW = "window"  # the blocks of the last `window` tokens before it
    CHUNK = "chunk"  # the blocks of its own chunk of `window` tokens
    STATE = "state"  # the one block that ends there: linear attention, Mamba
    UNKNOWN = "unknown"


class KvGroup(msgspec.Struct, frozen=True):
    """A KV cache group beside the main one, which has full attention.

    Attributes:
        number: the engine's number of it.
        window: tokens of its window or chunk; 0 for other kinds.
    """

    number: int
    attention: Attention
    window: int = 0


class BlocksStored(msgspec.Struct, frozen=True, gc=False):
    """A run of full blocks was stored in `tier`; each is the child of the one before it.

    Attributes:
        parent: engine hash of the block before the first, None at the start of a prompt.
        hashes: engine hashes, one per block. They are only names, never an identity.
        token_ids: all tokens of the run, `len(hashes) * tokens_per_block`. Empty for blocks that were stored
            in another tier before; `hashes` names them.
        tokens_per_block: the engine's block size.
        extra_ids: one per token, None when all are 0.
        salt: cache salt of the chain; set on runs whose `parent` is None.
        lora: name of the LoRA adapter of the chain; set on the same runs.
        group: the KV cache group that stored them; None for the main one.
        per_chunk: the tier gives back this many blocks together or none of them, counted from the prompt's
            beginning.
    """

    tier: Tier
    parent: int | bytes | None
    hashes: tuple[int | bytes, ...]
    token_ids: TokenIds[int]
    tokens_per_block: int
    extra_ids: ExtraIds[int] | None = None
    salt: str | None = None
    lora: str | None = None
    group: KvGroup | None = None
    per_chunk: int = 1


class BlocksRemoved(msgspec.Struct, frozen=True, gc=False):
    """These blocks were removed from `tier`; other tiers may still hold them. `group`: the KV cache group
    that removed them; None for the main one."""

    tier: Tier
    hashes: tuple[int | bytes, ...]
    group: KvGroup | None = None


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks of all tiers were removed."""


@dataclass(frozen=True, slots=True)
class ViewLost:
    """Events were lost, or the process was replaced. All earlier knowledge is void; what follows rebuilds
    it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ViewResumed:
    """The engine is still the process whose position the reader gave. The reader's view was right there, and
    the events since then follow. The reader may have applied some of them."""


@dataclass(frozen=True, slots=True)
class ViewCurrent:
    """The events so far describe what the engine holds; the view is exact from here on. `complete`: False if
    the engine may hold older blocks that no event reported. The view is right, but there may be more."""

    complete: bool = True


KvEvent = BlocksStored | BlocksRemoved | CacheCleared | ViewLost | ViewResumed | ViewCurrent


class EventPosition(msgspec.Struct, frozen=True):
    """A place in an engine's events, at which a later process can go on.

    Attributes:
        sequence: number of the last batch that was read.
        digest: hash of its bytes. No other process of the engine sends the same.
        complete: the engine holds nothing that no event reported.
        group: number of the main KV cache group, None without groups.
    """

    sequence: int
    digest: int
    complete: bool
    group: int | None = None


# --- prompts with more than text -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The position of an image, audio or video in a prompt.

    Attributes:
        identity: its hash, or the client's uuid, by which the engine identifies it.
        offset: index of its first placeholder token.
        length: number of placeholder tokens.
    """

    identity: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine will see it.

    Attributes:
        token_ids: its token ids, with expanded placeholders.
        media: the images, audio and video they stand for.
        embeds: of a prompt with embeddings, the first token of each block of the engine's cache, and the
            digest by which the engine identifies the block's embeddings.
    """

    token_ids: TokenIds[int]
    media: tuple[MediaSpan, ...] = ()
    embeds: tuple[tuple[int, bytes], ...] = ()


# --- KV operations -------------------------------------------------------------------------------

# Seconds in which the result of a tool comes back to the model that called it, 95% of the time.
TOOL_S = 10.0


class Retention(msgspec.Struct, frozen=True, gc=False):
    """A client's wish to have its request's KV retained, on engines that can.

    Attributes:
        priority: 0 means like any other KV; among retained KV, the lowest is evicted first.
        ttl_s: seconds of retention after the end of the answer.
        owner: the tenant, None with a single one. An engine's room for retained KV is divided among owners.
    """

    priority: int = 0
    ttl_s: float = math.inf
    owner: str | None = None


NOT_RETAINED = Retention()


class Usage(msgspec.Struct, frozen=True, gc=False):
    """An engine's report about an answer; None where it did not report.

    Attributes:
        cached_tokens: prompt tokens that it reused.
        output_tokens: tokens that it generated.
        prefill: prompt tokens that it computed, and the seconds that took by its own clock.
        decode_s: seconds that the other tokens took, by the same clock.
        called_tool: the answer ended with a tool call.
    """

    cached_tokens: int | None = None
    output_tokens: int | None = None
    prefill: tuple[int, float] | None = None
    decode_s: float | None = None
    called_tool: bool = False


class KvTarget(msgspec.Struct, frozen=True):
    """The KV that an operation acts on.

    With `token_ids`: the full blocks of that prefix, under `cache_salt` and `lora`. With `cache_salt`
    only: all KV of that salt. With neither: everything the engine holds.

    Attributes:
        extra_ids: one per token, None when all are 0.
        exact: the token ids are known to equal the engine's own, so they may replace the text.
        audit: the engine is to make its own ids, and to tell them if it can.
        retention: how long the request wants its KV retained; None if there is no request.
        session: digest of the conversation that the request belongs to; None if its client names none.
    """

    token_ids: TokenIds[int] | None = None
    extra_ids: ExtraIds[int] | None = None
    cache_salt: str | None = None
    lora: str | None = None
    exact: bool = False
    audit: bool = False
    retention: Retention | None = None
    session: int | None = None


@dataclass(frozen=True, slots=True)
class BelowGpu:
    """Leading tokens of a prompt that the tiers below an engine's GPU report to hold.

    Attributes:
        host: tokens in the engine's host tier.
        disk: further tokens that follow, on either tier.
        cached: tokens that the engine would report as reused if its GPU held nothing.
    """

    host: int
    disk: int
    cached: int


@dataclass(frozen=True, slots=True)
class KvProgress:
    """Progress of an operation: blocks done, blocks in total, bytes, and blocks left with the reason (in use
    by a running request, pinned, or no room)."""

    done: int
    total: int
    bytes: int = 0
    left: Mapping[str, int] = field(default_factory=dict)

    def plus(self, more: KvProgress) -> KvProgress:
        """Both together, as of two targets or two tiers."""
        left = {name: self.left.get(name, 0) + more.left.get(name, 0) for name in [*self.left, *more.left]}
        return KvProgress(self.done + more.done, self.total + more.total, self.bytes + more.bytes, left)


@dataclass(frozen=True, slots=True)
class Pinned:
    """An active pin: its id, the blocks it protects, and its time to live in seconds."""

    pin_id: str
    blocks: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class PromptTable:
    """A p-tuning table.

    Attributes:
        extra_id: the uint64 beside each of its fake ids.
        rows: number of virtual tokens.
        hidden: columns; must equal the model's hidden size.
        data: safetensors bytes with one 2-d float tensor.
    """

    table_id: str
    extra_id: int
    rows: int
    hidden: int
    data: bytes = field(repr=False)


def token_array(values: Sequence[int]) -> TokenIds[int]:
    """`values` as an int32 array. Raises OverflowError: an id is outside int32; TypeError: an id is not an
    integer."""
    try:
        # `array("i", values)` takes three times as long for a list.
        return array("i", _int32s(len(values)).pack(*values))
    except struct.error:
        return array("i", values)  # raises the error that names the reason


@lru_cache(maxsize=256)
def _int32s(n: int) -> struct.Struct:
    """Packs `n` integers."""
    return struct.Struct(f"={n}i")


def extra_array(values: Sequence[int]) -> ExtraIds[int]:
    """`values` as a uint64 array; raises OverflowError for a value outside uint64."""
    return array("Q", values)


def common_prefix(a: _Run, b: _Run) -> int:
    """Number of leading items that two arrays, texts or lists share, by a binary search over slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
