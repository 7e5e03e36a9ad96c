"""The words adapters and the proxy share: plain, frozen data.

Token ids travel as `array('i')` (int32) and extra ids as `array('Q')` (uint64), so that hashing and
comparing a prompt are single C calls over its bytes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, cast

from typing_extensions import TypeVar

from engine_adapter.options import EngineOptions

TokenIds = array  # array('i'): one int32 per token
ExtraIds = array  # array('Q'): one uint64 per token, 0 for text


class Tier(StrEnum):
    """Where KV lies, fastest first."""

    GPU = "gpu"  # what the engine attends over directly, also on engines that compute on a CPU
    HOST = "host"
    DISK = "disk"


class Capability(StrEnum):
    """What an engine declares it can do. Nothing is probed with `hasattr`."""

    KV_EVENTS = "kv_events"  # streams block stores and removals
    CACHED_TOKENS = "cached_tokens"  # reports the reused tokens of each response
    TOKENIZE = "tokenize"  # tokenises a request body as it would to serve it
    RENDER = "render"  # tokenises requests that hold images and tells where each of them lies
    CACHE_SALT = "cache_salt"  # isolates KV by a salt in the request
    EXTRA_IDS = "extra_ids"  # takes fake token ids with extra ids
    PROMPT_TABLES = "prompt_tables"  # holds p-tuning tables
    FLUSH = "flush"
    OFFLOAD = "offload"
    RESTORE = "restore"
    PIN = "pin"


class KvVerb(StrEnum):
    """The operations of `EngineAdapter.operate`; each needs the capability of its name."""

    FLUSH = "flush"  # forget
    OFFLOAD = "offload"  # gpu → host, identity kept
    RESTORE = "restore"  # host → gpu


Options_co = TypeVar("Options_co", bound=EngineOptions, default=EngineOptions, covariant=True)


@dataclass(frozen=True, slots=True)
class EngineSpec(Generic[Options_co]):
    """How the operator describes one engine (`--engine 'KIND=URL[,name=value…]'`).

    Attributes:
        kind: its framework, one of `ENGINE_KINDS`.
        url: address of its HTTP server, without `/v1`.
        id: its name in kvpin.
        model: the served name, where the engine does not say.
        tokenizer: directory or hub id, where the engine does not say.
        api_key: sent to it instead of the client's key.
        headers: sent with every request to it, in place of the client's of the same name; may be secret.
        ca: file of the certificate authorities (PEM) that its certificate is checked against; the machine's
            own by default.
        cert: file of the certificate (PEM) that kvpin shows to it.
        key: file of the private key of `cert`, where it is not in the same file.
        options: what only engines of its kind have.
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
    options: Options_co = cast("Options_co", EngineOptions())  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself when it is connected.

    Attributes:
        model: the name it serves under (clients send it as `model`).
        instance: identity of the process; a different one means that all its KV is gone.
        capabilities: what it can do.
        tokens_per_block: its own block size in tokens, None where unknown.
        max_model_len: longest prompt + output in tokens, None where unknown.
        vocab_size: token ids below it are text, ids from it on are fake ids; None where unknown.
        hidden_size: columns of a prompt table; None where unknown.
        tokenizer: directory or hub id of the tokenizer it renders with; None where unknown.
        gpu_blocks: capacity of its GPU tier in its own blocks, None where unknown.
        host_blocks: the same for its host tier.
        version: free text for people.
        adapters: names of the LoRA adapters it serves beside `model`; clients send them as `model`.
        tokens_per_chunk: what its tiers below the GPU keep at a time, where its events do not tell of it and
            `lookup` asks; None elsewhere.
        shares_prefill: prompts that come side by side compute what they share once: one finds what the other
            is computing, or its turn comes later. Where not, kvpin lets the second one wait.
        events_read_once: each KV event goes to one reader only, so a second reader would take events from the
            first.
        shared_tiers: names the tiers below its GPU; engines with the same name share them. None where it
            shares none.
    """

    model: str
    instance: str
    capabilities: frozenset[Capability]
    tokens_per_block: int | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    tokenizer: str | None = None
    gpu_blocks: int | None = None
    host_blocks: int | None = None
    version: str = ""
    adapters: frozenset[str] = frozenset()
    tokens_per_chunk: int | None = None
    shares_prefill: bool = False
    events_read_once: bool = False
    shared_tiers: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps kvpin from using an engine fully.

    Attributes:
        problem: what is missing, and what follows from it.
        remedy: the flag or setting that mends it; "" where nothing does.
    """

    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine reports of its load.

    Attributes:
        running: requests.
        waiting: requests.
        counted: False where the engine does not say, and the counts mean nothing.
        gpu_usage: share of its GPU blocks in use, 0 to 1.
        outdated: what `connect` said of it no longer holds, though it is the same process: ask again.
    """

    running: int
    waiting: int
    gpu_usage: float | None = None
    outdated: bool = False
    counted: bool = True


# --- KV events, in the order an engine sends them ------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of full blocks now lies in `tier`, each the child of the one before it.

    Attributes:
        tier: where they lie.
        parent: engine hash of the block before the first, None at the start of a prompt.
        hashes: engine hashes, one a block; names only, never trusted as identity.
        token_ids: all tokens of the run, `len(hashes) * tokens_per_block` of them; empty for blocks that
            were stored in another tier before, which `hashes` then name.
        tokens_per_block: the engine's block size.
        extra_ids: one per token, None when all are 0.
        salt: cache salt of the chain; set on runs whose `parent` is None.
        adapter: name of the LoRA adapter of the chain; likewise.
    """

    tier: Tier
    parent: int | bytes | None
    hashes: tuple[int | bytes, ...]
    token_ids: TokenIds[int]
    tokens_per_block: int
    extra_ids: ExtraIds[int] | None = None
    salt: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks no longer lie in `tier` (they may still lie in another)."""

    tier: Tier
    hashes: tuple[int | bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every block of every tier is gone."""


@dataclass(frozen=True, slots=True)
class ViewLost:
    """Events were lost or the process changed: all that was known is void. What follows rebuilds it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ViewCurrent:
    """All that went before brings the view up to what the engine holds: it is exact from here on.

    Attributes:
        complete: False when the engine may hold blocks from before that nothing told of: what is in the
            view is right, and there may be more.
    """

    complete: bool = True


KvEvent = BlocksStored | BlocksRemoved | CacheCleared | ViewLost | ViewCurrent


# --- prompts with more than text -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where an image, audio or video lies in a prompt.

    Attributes:
        identity: what the engine tells it apart by: its hash, or the client's uuid.
        offset: the first of its placeholder tokens.
        length: how many there are.
    """

    identity: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine will see it: its token ids, placeholders expanded, and what they stand for."""

    token_ids: TokenIds[int]
    media: tuple[MediaSpan, ...] = ()


# --- KV operations -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a client wants what its request leaves in a cache to be kept there, where that can be.

    Attributes:
        priority: 0 for no longer than anything else; of what is kept, the lowest goes first.
        ttl_s: seconds from the end of the answer, after which it is as anything else.
        owner: whose it is, None where all is one client's. What an engine can keep is shared out by owner.
    """

    priority: int = 0
    ttl_s: float = math.inf
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class KvTarget:
    """What a KV operation acts on.

    With `token_ids`: the full blocks of that prefix under `cache_salt` and `adapter`. With `cache_salt`
    alone: all KV of that salt. With neither: everything the engine holds.

    Attributes:
        token_ids: the prompt.
        extra_ids: one per token, None when all are 0.
        cache_salt: the salt it runs under.
        adapter: the LoRA adapter it runs with.
        exact: the token ids are known to be those the engine would make of the request, so that they can
            stand in its place.
        retention: how long the request of this prompt wants it kept; None where it is no request's.
    """

    token_ids: TokenIds[int] | None = None
    extra_ids: ExtraIds[int] | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    exact: bool = False
    retention: Retention | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class BelowGpu:
    """What the tiers below an engine's GPU hold of a prompt, as they say themselves. All in leading tokens.

    Attributes:
        host: those in its host tier.
        disk: those that follow them, on either tier.
        cached: those it would report as reused if its GPU held nothing.
    """

    host: int
    disk: int
    cached: int


@dataclass(frozen=True, slots=True)
class KvProgress:
    """How far an operation has come: blocks moved or dropped, blocks it found to act on, bytes, and
    blocks it had to leave (in use by a running request, pinned, or no room), with the reason."""

    done: int
    total: int
    bytes: int = 0
    left: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin that took hold: its id, the blocks it protects, the seconds it lives."""

    pin_id: str
    blocks: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class PromptTable:
    """A p-tuning table.

    Attributes:
        table_id: what requests name.
        extra_id: uint64 that stands beside each of its fake ids.
        rows: number of virtual tokens.
        hidden: columns; must equal the model's hidden size.
        data: the safetensors bytes, one 2-d float tensor.
    """

    table_id: str
    extra_id: int
    rows: int
    hidden: int
    data: bytes = field(repr=False)


def token_array(values: Sequence[int]) -> TokenIds[int]:
    """`values` as int32 array; raises OverflowError for an id outside int32."""
    return array("i", values)


def extra_array(values: Sequence[int]) -> ExtraIds[int]:
    """`values` as uint64 array; raises OverflowError for a value outside uint64."""
    return array("Q", values)
