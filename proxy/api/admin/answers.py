"""What the admin API gives. Tokens and blocks are counts, `_s` is seconds, `started` is Unix time."""

from __future__ import annotations

from typing import Any

import msgspec


class _Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Held to its fields: what is not described is not sent."""


class Process(_Answer):
    """The process of an engine kvpin runs."""

    state: str
    port: int
    pid: int | None
    restarts: int
    last_exit_code: int | None


class EngineAnswer(_Answer):
    """One engine as kvpin sees it. `trust` is `precise` while its KV events are healthy; `why` says why.

    `process` is null for an engine that kvpin does not run itself. `findings` say what keeps kvpin from
    using it fully, and what mends that.
    """

    id: str
    kind: str
    url: str
    state: str
    process: Process | None
    model: str | None
    version: str
    capabilities: list[str]
    adapters: list[str]
    tokens_per_block: int | None
    max_model_len: int | None
    trust: str
    why: str
    in_flight: int
    decoding: int
    queue_s: float
    served: int
    prefill_tok_s: float | None
    last_error: str | None
    findings: list[str]


class Engines(_Answer):
    """All engines."""

    engines: list[EngineAnswer]


class Audit(_Answer):
    """Predicted against reported cached tokens, since start; the share of misses is of the last 50."""

    checked: int
    exact: int
    predicted_tokens: int
    reported_tokens: int
    recent_miss_share: float


class EngineStats(EngineAnswer):
    """An engine with its audit, what was restored there ahead of need, the blocks known to lie on each tier,
    and its own statistics in `kv`."""

    audit: Audit
    restored_ahead: dict[str, int]
    blocks: dict[str, int]
    kv: dict[str, Any]
    kv_error: str | None


class Tokenisation(_Answer):
    """How prompts become tokens: `source` is `local`, `engine` or `none`; `ok`, whether they are known to be
    the engine's. `agreed` and `differed` count served prompts whose tokens an engine told."""

    ok: bool
    detail: str
    source: str
    agreed: int
    differed: int


class PoolStats(_Answer):
    """Engines that serve one model and LoRA adapters of it, and the blocks the index knows of."""

    model: str
    adapters: list[str]
    tokens_per_block: int
    index_entries: int
    tokenisation: Tokenisation | None
    engines: list[EngineStats]


class PinAnswer(_Answer):
    """A pin that holds."""

    pin_id: str
    target: str
    engines: list[str]
    blocks: int
    expires_in_s: float


class Totals(_Answer):
    """Over all engines."""

    engines: int
    ready: int
    in_flight: int
    served: int
    index_entries: int
    predictions_checked: int
    predictions_exact: int
    predicted_cached_tokens: int
    reported_cached_tokens: int


class Stats(_Answer):
    """Everything kvpin knows now; `reuse` is false when it only balances load."""

    reuse: bool
    pools: list[PoolStats]
    unconnected: list[EngineAnswer]
    pins: list[PinAnswer]
    totals: Totals


class PartAnswer(_Answer):
    """One engine's part of an operation; counts are blocks, `left` those that had to stay, by reason."""

    engine: str
    verb: str
    state: str
    done: int
    total: int
    bytes: int
    left: dict[str, int]
    error: str | None


class OperationAnswer(_Answer):
    """An operation: `state` is `running`, `done`, `failed` or `cancelled`; `note` says why nothing was
    to be done; `result` holds a pin's id."""

    id: str
    verb: str
    target: str
    state: str
    started: float
    finished: float | None
    engines: list[PartAnswer]
    note: str | None
    result: dict[str, Any]
    error: str | None


class OperationList(_Answer):
    """Operations, newest first."""

    operations: list[OperationAnswer]


class CostAnswer(_Answer):
    """What an engine would have taken, by term; `total_s` decides. `regret_s` is null where the engine was
    dearer without it. `first_token_s` is the request's own wait: without `congestion_s` and `regret_s`, which
    are others', and `later_s`, which is that of its next turns. `free_blocks`, `turn` and `is_last` decide
    where totals are within a millisecond."""

    engine: str
    queue_s: float
    room_s: float
    restore_s: float
    prefill_s: float
    interference_s: float
    congestion_s: float
    later_s: float
    regret_s: float | None
    total_s: float
    first_token_s: float
    cached_tokens: int
    host_tokens: int
    disk_tokens: int
    pending_tokens: int
    in_flight: int
    free_blocks: int | None
    turn: int
    is_last: bool


class CandidateAnswer(CostAnswer):
    """A cost with what it is made from; `matched_tokens` by tier."""

    trust: str
    matched_tokens: dict[str, int]


class _Decision(_Answer):
    """A placement, explained. `reason` is `held`, `gathered`, `released`, `spread`, `only` or `balanced`;
    `tie` is null where costs decided. A second of prefill counted `strain` seconds at this `utilisation`."""

    rule: str
    reason: str
    why: str
    tie: str | None
    utilisation: float
    strain: float


class DecisionAnswer(_Decision):
    """Why a past request was placed where it was, with the cost of every engine."""

    costs: list[CostAnswer]


class RouteAnswer(_Decision):
    """Where a request would go, and why. Token counts are null when the prompt is not known here, `adapter`
    when no LoRA adapter was asked for. `reason` is `held`, `gathered`, `released`, `spread`, `only` or
    `balanced`; `tie` is null where costs decided. A second of prefill counts `strain` seconds at this
    `utilisation`."""

    model: str
    adapter: str | None
    path: str
    n_tokens: int | None
    blocks: int | None
    tokens_per_block: int
    engine: str
    predicted_tokens: int
    candidates: list[CandidateAnswer]


class RequestSummary(_Answer):
    """One past request. `expected_first_token_s` and `first_byte_s` are from its placement on; the first byte
    of an answer that is no stream comes with its last."""

    request_id: str
    client_request_id: str | None
    started: float
    route: str
    model: str | None
    tenant: str | None
    stream: bool
    prompt_cache_key: str | None
    engine: str | None
    attempts: list[str]
    status: int | None
    n_tokens: int | None
    predicted_tokens: int | None
    reported_tokens: int | None
    output_tokens: int | None
    expected_first_token_s: float | None
    first_byte_s: float | None
    duration_s: float | None
    error: str | None
    note: str


class RequestList(_Answer):
    """Requests, newest first."""

    requests: list[RequestSummary]


class DivergenceAnswer(_Answer):
    """The first tokens that differ from the earlier request it shares most with, and their text."""

    request_id: str
    common_tokens: int
    token_ids: list[int]
    other_token_ids: list[int]
    text: str | None
    other_text: str | None


class RequestAnswer(RequestSummary):
    """One past request, explained: its cache by `explanation`, its engine by `decision`, which is null where
    none was found."""

    explanation: str
    decision: DecisionAnswer | None
    divergence: DivergenceAnswer | None


class TableAnswer(_Answer):
    """A p-tuning table; `extra_id` is its uint64 identity beside each of its fake token ids."""

    table_id: str
    extra_id: int
    rows: int
    hidden: int
    bytes: int


class TableList(_Answer):
    """All tables."""

    prompt_tables: list[TableAnswer]


class OpenApi(msgspec.Struct):
    """An OpenAPI 3.1 document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


class ErrorFields(_Answer):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """Every error, in OpenAI's shape."""

    error: ErrorFields
