"""Prometheus metrics: counts of finished requests, and the page that a scrape gets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from engine_adapter.off_loop import THREADS
from proxy.core.life import Cause
from proxy.core.placement.decision import Placement
from proxy.core.quotas import DAY_S, ByteBudget, UseBook
from proxy.core.reasons import reason_of
from proxy.fleet.discovery import Source
from proxy.fleet.fleet import Fleet
from proxy.observe.gauges import GAUGES, ScrapedState, WorkerNow, counters_of, gauges_of
from proxy.observe.metric_families import Counter, Family, Histogram
from proxy.peers.peers import Peers
from proxy.request.records import RequestRecord

# --- reuse in three steps: what some engine held, what the chosen one held, and what it reported --------
#     available ≥ selected ≈ delivered      prompt tokens
#
# Available but not selected: another engine held more, and would have cost more. Selected but not delivered:
# the prediction missed.

# Requests of a pool whose reuse waits for its first learned rate; the first ones are dropped.
MAX_WAITING = 1000


class ReuseCounts(msgspec.Struct, kw_only=True):
    """Reuse since kvpin started, in prompt tokens of requests whose prompt kvpin knows.

    Attributes:
        prompt_tokens: all of them.
        available_tokens: the most that any eligible engine held of each prompt.
        selected_tokens: what the chosen engine was predicted to reuse.
        delivered_tokens: what it reported to have reused.
        saved_s: seconds of prefill that this saved, by the engine's learned rates; restores are subtracted. 0
            until a rate is learned; then earlier reuse counts, too.
    """

    prompt_tokens: int = 0
    available_tokens: int = 0
    selected_tokens: int = 0
    delivered_tokens: int = 0
    saved_s: float = 0.0

    def add(self, more: ReuseCounts) -> None:
        """Adds these counts."""
        self.prompt_tokens += more.prompt_tokens
        self.available_tokens += more.available_tokens
        self.selected_tokens += more.selected_tokens
        self.delivered_tokens += more.delivered_tokens
        self.saved_s += more.saved_s


def reuse_of(record: RequestRecord, placement: Placement) -> ReuseCounts:
    """The reuse of one request whose prompt is known, without the seconds that it saved."""
    return ReuseCounts(
        prompt_tokens=placement.n_tokens,
        available_tokens=available_tokens(placement),
        selected_tokens=placement.predicted_tokens,
        delivered_tokens=record.reported_tokens or 0,
    )


def available_tokens(placement: Placement) -> int:
    """The most of the prompt that any candidate would reuse."""
    return max(placement.predicted_tokens, placement.elsewhere or 0)


class _Reused(NamedTuple):
    """A prompt of `total` tokens, of which the engine computed `computed`. `model` is the one that served."""

    model: str
    engine: str
    total: int
    computed: int
    restore_s: float


class SavedPrefill:
    """Values reuse in seconds of prefill. Reuse before the first learned rate of a pool waits for it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: dict[str, deque[_Reused]] = {}  # by pool

    def observe(self, record: RequestRecord) -> Iterator[tuple[str, str, float]]:
        """Notes the reuse that an engine reported of a finished request. Yields model, engine and seconds of
        all that can be valued now. An engine that has left saves nothing."""
        name, placement, reported = record.served_as or "", record.placement, record.reported_tokens
        pool = self._fleet.pools.get(name)
        if placement is None or pool is None:
            return
        if reported:
            total, restore_s = placement.n_tokens, placement.chosen.restore_s
            reused = _Reused(
                record.lora or name, placement.engine, total, max(total - reported, 0), restore_s
            )
            self._waiting.setdefault(name, deque(maxlen=MAX_WAITING)).append(reused)
        if not pool.placer.rates.learned:
            return
        for each in self._waiting.pop(name, ()):
            book = pool.placer.books.get(each.engine)
            if book is not None:
                spared_s = book.rates.prefill_s(each.total) - book.rates.prefill_s(each.computed)
                yield each.model, each.engine, max(spared_s - each.restore_s, 0.0)


# --- metrics --------------------------------------------------------------------------------------------

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_BY_ENGINE = ("model", "engine")
# Stands for the tenants that have no metrics of their own. No tenant's name: those have no spaces.
OTHER_TENANTS = "all others"
# Stands for engines that left before their last requests ended.
LEFT = "has left"
# Series between which a page lets the event loop serve requests: 1 ms.
_SLICE = 100


class _Row(NamedTuple):
    """A family of the table: its text, its labels, and the bounds of its buckets if it is a histogram."""

    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


# In the order of the page.
_FAMILIES = {
    "kvpin_requests_total": _Row(
        "Requests answered; model: the model or LoRA adapter that served, whatever name was sent; "
        "status: failed where kvpin crashed",
        (*_BY_ENGINE, "status"),
    ),
    "kvpin_request_ends_total": _Row("Requests that ended, by cause", ("cause",)),
    "kvpin_retries_total": _Row("Attempts beyond a request's first", ("model",)),
    "kvpin_interrupted_streams_total": _Row(
        "Streams whose engine died in mid-answer, by result: migrated (another engine went on) or broken",
        ("model", "result"),
    ),
    "kvpin_placements_total": _Row(
        "Requests placed, by reason: held (the engine has the most of the prompt), gathered "
        "(it will have it, after requests in flight have stored it), released (another has "
        "more, but costs more), spread (no engine has any of it), only (no other engine could "
        "take it), paired (another engine computes the prompt for it), balanced (the prompt is not "
        "known: by load alone)",
        ("model", "reason"),
    ),
    "kvpin_transfers_total": _Row(
        "Prompts that one engine was to compute for another, by result: moved (the other one answered "
        "from its KV), failed (the other one computed the prompt), late (the other one did not answer "
        "while the KV was surely kept); prefiller: the first engine",
        ("model", "prefiller", "result"),
    ),
    "kvpin_prompt_tokens_total": _Row("Prompt tokens of requests whose prompt kvpin knows", _BY_ENGINE),
    "kvpin_available_cached_tokens_total": _Row(
        "Of the prompt tokens, those on the eligible engine that held most of each prompt; "
        "engine: the chosen one",
        _BY_ENGINE,
    ),
    "kvpin_predicted_cached_tokens_total": _Row(
        "Of the prompt tokens, those that kvpin predicted to come from cache", _BY_ENGINE
    ),
    "kvpin_cached_tokens_total": _Row(
        "Of the prompt tokens, those that engines reported from cache", _BY_ENGINE
    ),
    "kvpin_generation_tokens_total": _Row(
        "Tokens of answers; events of streams whose tokens the engine did not report", _BY_ENGINE
    ),
    "kvpin_saved_prefill_seconds_total": _Row(
        "Seconds of prefill that cached tokens saved, by learned rates, less restores", _BY_ENGINE
    ),
    "kvpin_mispredictions_total": _Row(
        "Requests whose reported cached tokens differ from a firm prediction", _BY_ENGINE
    ),
    "kvpin_tokenisation_checks_total": _Row(
        "Prompts whose tokens an engine reported, by result: same as kvpin's, or different",
        (*_BY_ENGINE, "result"),
    ),
    "kvpin_placement_seconds": _Row(
        "kvpin's own time to read, tokenise and place a request, without its wait for busy "
        "engines; requests that were placed twice are not in it",
        ("model",),
        (0.0001, 0.0002, 0.0005, *_LAG_SECONDS),
    ),
    # The bounds of the next two are vLLM's and those of OpenTelemetry's GenAI conventions: one panel may
    # show them beside ours.
    "kvpin_time_to_first_token_seconds": _Row(
        "From a request's arrival to the first byte of its stream; answers that are no stream are not in it",
        _BY_ENGINE,
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    ),
    "kvpin_time_per_output_token_seconds": _Row(
        "Mean time between the tokens of a stream, one value per stream that ended well; "
        "where the engine reports no tokens, events of the stream are counted",
        _BY_ENGINE,
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
    ),
    "kvpin_request_duration_seconds": _Row(
        "From a request's arrival at kvpin to the end of its answer", _BY_ENGINE, _SECONDS
    ),
    "kvpin_queued_seconds": _Row(
        "How long requests waited for engines that were busy; requests that did not wait are not in it",
        ("model",),
        _SECONDS,
    ),
    "kvpin_first_leg_seconds": _Row(
        "How long an engine took to compute a prompt for another one, or to fail", ("model",), _SECONDS
    ),
    "kvpin_transfer_seconds": _Row(
        "From then until the other engine answers or has fetched the KV", ("model",), _SECONDS
    ),
    "kvpin_refused_total": _Row(
        "Requests refused before an engine was asked, by reason: busy (all engines are), "
        "limit (of its tenant), memory (of requests' bodies), slow (the body came too slowly), "
        "size (of the body), shape (of its JSON), model (the key is for others)",
        ("reason",),
    ),
    "kvpin_loop_lag_seconds": _Row(
        "How late kvpin's event loop is, measured every 50 ms: all requests wait that long", (), _LAG_SECONDS
    ),
    "kvpin_tenant_requests_total": _Row(
        "Requests; as all families by tenant, only if tenant_metrics is set", ("tenant", "status")
    ),
    "kvpin_tenant_prompt_tokens_total": _Row("Prompt tokens", ("tenant",)),
    "kvpin_tenant_cached_tokens_total": _Row(
        "Of the prompt tokens, those that engines reported from cache", ("tenant",)
    ),
    "kvpin_tenant_generation_tokens_total": _Row("Tokens of answers", ("tenant",)),
}


class Metrics:
    """All metrics of one proxy.

    The series of an engine are dropped when it has left the fleet. What is summed up here is not.

    Attributes:
        loop_lag: how late the event loop was, see `proxy/runtime.py`.
        ended: requests that have ended.
        reload_ok: the settings were taken over when they were last read again.
        reuse: the reuse of the fleet's engines, by engine.
        total_reuse: the reuse of all requests.
        others: what other workers told last, where this one speaks for all.
        families: those that are counted here, by name.
        bodies: memory for requests' bodies.
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Mapping[str, Source] | None = None,
        peers: Peers | None = None,
        tenants: int = 0,
        bodies: ByteBudget | None = None,
        use: UseBook | None = None,
    ) -> None:
        """Args:
        fleet: the engines.
        sources: the sources of engines, by name.
        peers: other kvpins; None without an exchange.
        tenants: how many tenants have metrics of their own.
        bodies: memory for requests' bodies.
        use: counts what tenants use.
        """
        self._fleet, self._peers, self._max_tenants = fleet, peers, tenants
        self._sources = {} if sources is None else sources
        self.bodies = ByteBudget(0) if bodies is None else bodies
        rows = _FAMILIES.items()
        self._counters = {name: Counter(name, row.text, row.labels) for name, row in rows if not row.bounds}
        self._histograms = {name: Histogram(name, *row) for name, row in rows if row.bounds}
        either: dict[str, Counter | Histogram] = {**self._counters, **self._histograms}
        self.families = {name: either[name] for name in _FAMILIES}
        self.loop_lag = self._histograms["kvpin_loop_lag_seconds"].of()
        self._tenants: set[str] = set()  # those that have series
        self._engines: set[str] = set()  # those that have series
        self.ended = 0
        self.reload_ok = True
        self.reuse: dict[str, ReuseCounts] = {}
        self.total_reuse = ReuseCounts()
        self.others: Sequence[WorkerNow] = ()
        self._saved = SavedPrefill(fleet)
        self._use = UseBook() if use is None else use

    def observe(self, record: RequestRecord, trace_id: str | None = None) -> None:
        """Counts one finished request. `trace_id`: of its trace, if it has one."""
        placement = record.placement
        # Not the client's name for it, which may be anything.
        model = (record.lora or record.served_as or "") if placement is not None else ""
        engine = self.label(placement.engine) if placement is not None else ""
        self.ended += 1
        counters = self._counters
        status = str(record.status or "failed")
        counters["kvpin_requests_total"].series[model, engine, status].number += 1
        counters["kvpin_request_ends_total"].series[(record.cause or Cause.BUG,)].number += 1
        counters["kvpin_retries_total"].series[(model,)].number += max(len(record.attempts) - 1, 0)
        if record.interrupted:
            self._count(
                "kvpin_interrupted_streams_total", model, "migrated" if record.error is None else "broken"
            )
        if not record.attempts and (reason := _refusal(record)) is not None:
            self._count("kvpin_refused_total", reason)
        self._count_spent(record, model, engine, trace_id)
        if record.prefilled_by is not None or record.past_legs:
            for prefiller, result in record.legs:
                self._count("kvpin_transfers_total", model, self.label(prefiller), result)
        if self._max_tenants and record.tenant is not None:
            self._count_tenant(record, record.tenant)
        if tokens := record.answer_tokens:
            self._count("kvpin_generation_tokens_total", model, engine, by=tokens)
        if record.tokens_agree is not None:
            self._count(
                "kvpin_tokenisation_checks_total",
                model,
                engine,
                "same" if record.tokens_agree else "different",
            )
        if placement is None:
            return
        counters["kvpin_placements_total"].series[model, reason_of(placement)].number += 1
        if record.prompt is not None:
            self._count_reuse(record, placement, model, engine)

    def _count_reuse(self, record: RequestRecord, placement: Placement, model: str, engine: str) -> None:
        """Counts what was reused of a prompt that kvpin knows."""
        reuse = reuse_of(record, placement)
        self._add_reuse(engine, reuse)
        counters, labels = self._counters, (model, engine)
        counters["kvpin_prompt_tokens_total"].series[labels].number += reuse.prompt_tokens
        counters["kvpin_available_cached_tokens_total"].series[labels].number += reuse.available_tokens
        counters["kvpin_predicted_cached_tokens_total"].series[labels].number += reuse.selected_tokens
        if record.reported_tokens is not None:
            missed = placement.firm and record.reported_tokens != placement.predicted_tokens
            counters["kvpin_cached_tokens_total"].series[labels].number += reuse.delivered_tokens
            counters["kvpin_saved_prefill_seconds_total"].series[labels].number += 0
            counters["kvpin_mispredictions_total"].series[labels].number += missed
        for served, saver, saved_s in self._saved.observe(record):
            self._add_reuse(saver, ReuseCounts(saved_s=saved_s))
            self._count("kvpin_saved_prefill_seconds_total", served, saver, by=saved_s)

    def _add_reuse(self, engine: str, reuse: ReuseCounts) -> None:
        self.total_reuse.add(reuse)
        self.reuse.setdefault(engine, ReuseCounts()).add(reuse)

    def label(self, engine: str) -> str:
        """An engine's name in labels."""
        if engine not in self._fleet.engines:
            return LEFT
        if engine not in self._engines:
            self._drop_left()  # also where nobody reads the page
            self._engines.add(engine)
        return engine

    def _drop_left(self) -> None:
        """Drops the series of engines that have left the fleet."""
        left = self._engines - self._fleet.engines.keys()
        if left:
            self._engines -= left
            self.reuse = {engine: each for engine, each in self.reuse.items() if engine not in left}
            for family in self.families.values():
                family.drop("engine", left)
                family.drop("prefiller", left)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[name].series[labels].number += by

    def _count_spent(self, record: RequestRecord, model: str, engine: str, trace_id: str | None) -> None:
        """Counts what one finished request took: tokens, and time with its parts."""
        used = self._use[int(record.started // DAY_S), record.tenant or "", model]
        used.requests += 1
        used.failed += record.error is not None
        if record.prompt is not None and record.placement is not None:
            used.prompt_tokens += len(record.prompt.token_ids)
        used.cached_tokens += record.reported_tokens or 0
        used.output_tokens += record.answer_tokens
        histograms = self._histograms
        if record.duration_s is not None:
            histograms["kvpin_request_duration_seconds"].series[model, engine].observe(
                record.duration_s, trace_id
            )
        if (placement_s := record.placement_s) is not None:
            histograms["kvpin_placement_seconds"].series[(model,)].observe(placement_s, trace_id)
        if record.queued_s is not None:
            self._took("kvpin_queued_seconds", (record.served_as or "",), record.queued_s, trace_id)
        if record.prefilled_by is not None:
            self._took("kvpin_first_leg_seconds", (model,), record.first_leg_s, trace_id)
            self._took("kvpin_transfer_seconds", (model,), record.transfer_s, trace_id)
        if record.stream:
            first_s, token_s = record.first_token_s, record.per_token_s
            self._took("kvpin_time_to_first_token_seconds", (model, engine), first_s, trace_id)
            self._took("kvpin_time_per_output_token_seconds", (model, engine), token_s, trace_id)

    def _took(self, name: str, labels: tuple[str, ...], seconds: float | None, trace_id: str | None) -> None:
        if seconds is not None:
            self._histograms[name].series[labels].observe(seconds, trace_id)

    def _count_tenant(self, record: RequestRecord, tenant: str) -> None:
        """Counts one finished request of a tenant."""
        tenant = self.tenant_label(tenant)
        self._count("kvpin_tenant_requests_total", tenant, str(record.status or "failed"))
        self._count("kvpin_tenant_prompt_tokens_total", tenant, by=record.n_tokens or 0)
        self._count("kvpin_tenant_cached_tokens_total", tenant, by=record.reported_tokens or 0)
        self._count("kvpin_tenant_generation_tokens_total", tenant, by=record.answer_tokens)

    def tenant_label(self, tenant: str) -> str:
        """A tenant's name in labels. The first ones that come have series of their own."""
        if tenant not in self._tenants:
            if len(self._tenants) >= self._max_tenants:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant

    def _cpu_seconds(self) -> Counter:
        """The time that tenants' requests took here."""
        counter = Counter(
            "kvpin_tenant_cpu_seconds_total",
            "CPU time that reading requests took, by what: parse (JSON), media (looking for images), "
            "render (a chat's template), encode (to tokens)",
            ("tenant", "what"),
        )
        for (tenant, what), seconds in THREADS.spent.items() if self._max_tenants else ():
            if tenant is not None:
                counter.of(tenant if tenant in self._tenants else OTHER_TENANTS, what).add(seconds)
        return counter

    def refuse(self, status: int, reason: str | None = None) -> None:
        """Counts a request that was refused before it got a record. `reason`: of `kvpin_refused_total`."""
        self.ended += 1
        self._count("kvpin_requests_total", "", "", str(status))
        if reason is not None:
            self._count("kvpin_refused_total", reason)

    @property
    def declared(self) -> tuple[Family, ...]:
        """All families, whether they have series or not."""
        counted = (*self.families.values(), self._cpu_seconds(), *counters_of(self._fleet, self._peers))
        return (*(each.family for each in counted), *GAUGES)

    def render(self, *, openmetrics: bool = False) -> bytes:
        """The page, in Prometheus' text format or in that of OpenMetrics."""
        return "".join(self._parts(openmetrics)).encode()

    async def page(self, *, openmetrics: bool = False) -> bytes:
        """The page, made in parts. Requests are served in between: with many engines, the page is long."""
        parts: list[str] = []
        for part in self._parts(openmetrics):
            parts.append(part)
            if not len(parts) % _SLICE:
                await asyncio.sleep(0)
        return "".join(parts).encode()

    def _parts(self, openmetrics: bool) -> Iterator[str]:
        self._drop_left()
        for family in (*self.families.values(), self._cpu_seconds(), *counters_of(self._fleet, self._peers)):
            yield from family.lines(openmetrics=openmetrics)
        now = ScrapedState(self._fleet, self._sources, self._peers, self.bodies, self.reload_ok, self.others)
        yield from gauges_of(now)
        yield "# EOF\n" if openmetrics else ""


def _refusal(record: RequestRecord) -> str | None:
    """Why kvpin refused a request that it sent to no engine: `limit`, of its tenant, `busy`, or `model`, of
    its key. None: it did not refuse it."""
    if record.refusal is not None:
        return record.refusal
    if record.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "limit"
    has_waited = record.status == HTTPStatus.SERVICE_UNAVAILABLE and record.queued_s is not None
    return "busy" if has_waited else None
