"""Prometheus metrics: counts of finished requests, what is read at each scrape, and the page that it gets."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import NamedTuple, TypeVar

import msgspec

from engine_adapter import Tier
from engine_adapter.off_loop import THREADS
from proxy.core.audit import Trust, is_exact
from proxy.core.life import Cause
from proxy.core.placement.decision import Placement
from proxy.core.quotas import DAY_S, ByteBudget, UseBook
from proxy.core.reasons import reason_of
from proxy.fleet.discovery import Source
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import exact_within
from proxy.observe.metric_families import Buckets, Count, Family, SeriesOf
from proxy.peers.peers import Peers
from proxy.request.records import RequestRecord

# --- reuse in three steps: what some engine held, what the chosen one held, and what it reported --------
#     available ≥ selected ≈ delivered      prompt tokens
#
# Available but not selected: another engine held more, and would have cost more. Selected but not delivered:
# the prediction missed.

# Requests of a pool whose reuse waits for its first learned rate; the first ones are dropped.
MAX_WAITING = 1000


_Counts = TypeVar("_Counts", bound=msgspec.Struct)


class ReuseCounts(msgspec.Struct, frozen=True):
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


# Field → the counter that has it, by engine.
_REUSE = {
    "prompt_tokens": "kvpin_prompt_tokens_total",
    "available_tokens": "kvpin_available_cached_tokens_total",
    "selected_tokens": "kvpin_predicted_cached_tokens_total",
    "delivered_tokens": "kvpin_cached_tokens_total",
    "saved_s": "kvpin_saved_prefill_seconds_total",
}


def summed(one: _Counts, *others: _Counts) -> _Counts:
    """All of them together, field by field."""
    return type(one)(*map(sum, zip(*map(msgspec.structs.astuple, (one, *others)), strict=True)))


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


# --- metrics --------------------------------------------------------------------------------------------

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
# These and the next are vLLM's bounds and those of OpenTelemetry's GenAI conventions: one panel may show them
# beside ours.
_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_BY_ENGINE = ("model", "engine")
# Stands for the tenants that have no metrics of their own. No tenant's name: those have no spaces.
OTHER_TENANTS = "all others"
# Stands for engines that left before their last requests ended.
LEFT = "has left"
# Series between which a page lets the event loop serve requests: 1 ms.
_SLICE = 100


class _Row(NamedTuple):
    """A family without its name. `read` gives label values and value of each series of a family that is not
    counted here, but read at each scrape. `bounds`: those of a histogram's buckets."""

    text: str
    labels: tuple[str, ...] = ()
    read: Callable[[Metrics], Iterable[tuple[tuple[str, ...], float]]] = lambda _: ()
    bounds: tuple[float, ...] = ()

    def family(self, name: str) -> Family:
        """The family of this name."""
        return Family(name, self.text, self.labels, self.bounds)


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
        bounds=(0.0001, 0.0002, 0.0005, *_LAG_SECONDS),
    ),
    "kvpin_time_to_first_token_seconds": _Row(
        "From a request's arrival to the first byte of its stream; answers that are no stream are not in it",
        _BY_ENGINE,
        bounds=_TTFT_SECONDS,
    ),
    "kvpin_time_per_output_token_seconds": _Row(
        "Mean time between the tokens of a stream, one value per stream that ended well; "
        "where the engine reports no tokens, events of the stream are counted",
        _BY_ENGINE,
        bounds=_TOKEN_SECONDS,
    ),
    "kvpin_request_duration_seconds": _Row(
        "From a request's arrival at kvpin to the end of its answer", _BY_ENGINE, bounds=_SECONDS
    ),
    "kvpin_queued_seconds": _Row(
        "How long requests waited for engines that were busy; requests that did not wait are not in it",
        ("model",),
        bounds=_SECONDS,
    ),
    "kvpin_first_leg_seconds": _Row(
        "How long an engine took to compute a prompt for another one, or to fail", ("model",), bounds=_SECONDS
    ),
    "kvpin_transfer_seconds": _Row(
        "From then until the other engine answers or has fetched the KV", ("model",), bounds=_SECONDS
    ),
    "kvpin_refused_total": _Row(
        "Requests refused before an engine was asked, by reason: busy (all engines are), "
        "limit (of its tenant), memory (of requests' bodies), slow (the body came too slowly), "
        "size (of the body), shape (of its JSON), model (the key is for others)",
        ("reason",),
    ),
    "kvpin_loop_lag_seconds": _Row(
        "How late kvpin's event loop is, measured every 50 ms: all requests wait that long",
        bounds=_LAG_SECONDS,
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


# --- what is read at each scrape --------------------------------------------------------------------------

_VERSION = version("kvpin")


class WorkerNow(msgspec.Struct, array_like=True, frozen=True):
    """What goes on in a worker: requests in flight by engine, unless the exchange tells them; requests that
    wait because engines are busy, by model; bytes of bodies that no engine has yet; tasks of its loop."""

    in_flight: dict[str, int]
    waiting: dict[str, int]
    body_bytes: int
    tasks: int


# In the order of the page, after the families above.
_READ = {
    "kvpin_tenant_cpu_seconds_total": _Row(
        "CPU time that reading requests took, by what: parse (JSON), media (looking for images), "
        "render (a chat's template), encode (to tokens)",
        ("tenant", "what"),
        lambda now: now.cpu_seconds().items(),
    ),
    "kvpin_restores_ahead_total": _Row(
        "Restores ahead of need, by what: begun, and of these used and wasted",
        ("engine", "what"),
        lambda now: (
            ((each.id, what), getattr(each.ahead, field))
            for each in now.fleet.engines.values()
            for what, field in (("begun", "restores"), ("used", "used"), ("wasted", "wasted"))
        ),
    ),
    "kvpin_exchange_messages_total": _Row(
        "Messages between kvpins, by direction: told, heard",
        ("direction",),
        lambda now: (
            [(("told",), now.peers.counts.told), (("heard",), now.peers.counts.heard)] if now.peers else []
        ),
    ),
    "kvpin_exchange_faults_total": _Row(
        "What went wrong between kvpins, by fault: dropped (a peer had not read enough), missed (the "
        "beginnings of requests were lost), lost (a kvpin fell silent)",
        ("fault",),
        lambda now: _faults(now.peers) if now.peers is not None else [],
    ),
    "kvpin_ready": _Row(
        "1 while requests for some model can be taken, here or at another kvpin",
        read=lambda now: [((), now.fleet.serves)],
    ),
    "kvpin_engine_ready": _Row(
        "1 while the engine takes requests",
        ("engine",),
        lambda now: (((each.id,), each.state is EngineState.READY) for each in now.fleet.engines.values()),
    ),
    "kvpin_engine_draining": _Row(
        "1 while the engine gets no new requests because it was drained on purpose",
        ("engine",),
        lambda now: (((each.id,), each.state is EngineState.DRAINING) for each in now.fleet.engines.values()),
    ),
    "kvpin_engine_precise": _Row(
        "1 while the view of its cache is exact",
        ("engine",),
        lambda now: (((each.id,), each.audit.trust is Trust.PRECISE) for each in now.fleet.engines.values()),
    ),
    "kvpin_engine_owner": _Row(
        "1 for the owner of an engine that only one kvpin may use",
        ("engine", "owner"),
        lambda now: (
            ((each.id, each.owner), 1) for each in now.fleet.engines.values() if each.owner is not None
        ),
    ),
    "kvpin_engine_in_flight": _Row(
        "Requests in flight, of all kvpins of the exchange",
        ("engine",),
        lambda now: (((each.id,), each.in_flight) for each in now.fleet.engines.values()),
    ),
    "kvpin_engine_blocks": _Row(
        "Blocks that the engine is known to hold",
        ("engine", "tier"),
        lambda now: (
            ((engine_id, tier.value), pool.index.held(engine_id, tier))
            for pool in now.fleet.pools.values()
            for engine_id in pool.engines
            for tier in Tier
        ),
    ),
    "kvpin_index_entries": _Row(
        "Different blocks in the index",
        ("model",),
        lambda now: (((pool.model,), len(pool.index)) for pool in now.fleet.pools.values()),
    ),
    "kvpin_queue_requests": _Row(
        "Requests that wait now for engines that are busy",
        ("model",),
        lambda now: (((model,), count) for model, count in waiting_of(now.fleet, now.others).items()),
    ),
    "kvpin_body_bytes": _Row(
        "Bytes of requests' bodies that no engine has yet",
        read=lambda now: [((), now.bodies.used + sum(each.body_bytes for each in now.others))],
    ),
    "kvpin_reload_ok": _Row(
        "0 when the settings were refused as they were last read again (SIGHUP): the old ones stay",
        read=lambda now: [((), now.reload_ok)],
    ),
    "kvpin_source_answers": _Row(
        "1 when the source of engines answered last, 0 when it failed",
        ("source",),
        lambda now: (((each.name,), each.error is None) for each in now.sources.values()),
    ),
    "kvpin_source_engines": _Row(
        "Engines that the source named last",
        ("source",),
        lambda now: (((each.name,), len(each.found)) for each in now.sources.values()),
    ),
    "kvpin_exchange_up": _Row(
        "1 while this kvpin can tell others of its requests; no value without an exchange",
        read=lambda now: [((), now.peers.stats().connected)] if now.peers is not None else [],
    ),
    "kvpin_exchange_peers": _Row(
        "Other kvpins in front of these engines; in_step: true if all their requests are known here",
        ("in_step",),
        lambda now: _peers_by_step(now.peers) if now.peers is not None else [],
    ),
    "kvpin_tasks": _Row(
        "Tasks of the event loop; they fall with requests in flight, unless kvpin leaks",
        read=lambda now: [((), tasks() + sum(each.tasks for each in now.others))],
    ),
    "kvpin_build_info": _Row("1, with the version of kvpin", ("version",), lambda _: [((_VERSION,), 1)]),
}


def waiting_of(fleet: Fleet, others: Iterable[WorkerNow] = ()) -> Counter[str]:
    """Requests that wait because engines are busy, by model."""
    waiting = Counter({pool.model: len(pool.line) for pool in fleet.pools.values()})
    for each in others:
        waiting.update(each.waiting)
    return waiting


def _faults(peers: Peers) -> list[tuple[tuple[str, ...], float]]:
    told, missed = peers.stats(), peers.counts.missed
    missed += sum(peer.missed for peer in told.peers)
    return [(("dropped",), told.dropped), (("lost",), told.lost), (("missed",), missed)]


def _peers_by_step(peers: Peers) -> list[tuple[tuple[str, ...], float]]:
    told = peers.stats().peers
    return [((str(step).lower(),), sum(peer.in_step is step for peer in told)) for step in (False, True)]


def tasks() -> int:
    """Tasks of the event loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no loop runs here
        return 0


# --- all metrics of one proxy ----------------------------------------------------------------------------


class Metrics:
    """All metrics of one proxy.

    The series of an engine are dropped when it has left the fleet. What is summed up here is not.

    Attributes:
        loop_lag: how late the event loop was, see `proxy/runtime.py`.
        reload_ok: the settings were taken over when they were last read again.
        left_reuse: the reuse of engines that have left the fleet.
        others: what other workers told last, where this one speaks for all.
        families: those that are counted here, by name.
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
        """`sources` of engines are by name. `tenants`: how many have metrics of their own."""
        self.fleet: Fleet = fleet
        self.peers: Peers | None = peers
        self._max_tenants = tenants
        self.sources: Mapping[str, Source] = {} if sources is None else sources
        self.bodies: ByteBudget = ByteBudget(0) if bodies is None else bodies
        self._counters, self._histograms = dict[str, SeriesOf[Count]](), dict[str, SeriesOf[Buckets]]()
        self.families: dict[str, SeriesOf[Count] | SeriesOf[Buckets]] = {}
        for name, row in _FAMILIES.items():
            family = row.family(name)
            if row.bounds:
                self.families[name] = self._histograms[name] = SeriesOf(family, Buckets)
            else:
                self.families[name] = self._counters[name] = SeriesOf(family, Count)
        self.loop_lag = self._histograms["kvpin_loop_lag_seconds"][()]
        self._tenants: set[str] = set()  # those that have series
        self._engines: set[str] = set()  # those that have series
        self.ended = 0
        self.reload_ok: bool = True
        self.left_reuse = ReuseCounts()
        self.others: Sequence[WorkerNow] = ()
        self._reused: dict[str, deque[_Reused]] = {}  # by pool; not valued yet
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
        counters["kvpin_requests_total"][model, engine, status].number += 1
        counters["kvpin_request_ends_total"][(record.cause or Cause.BUG,)].number += 1
        counters["kvpin_retries_total"][(model,)].number += max(len(record.attempts) - 1, 0)
        if record.interrupted:
            result = "migrated" if record.error is None else "broken"
            self._count("kvpin_interrupted_streams_total", model, result)
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
            result = "same" if record.tokens_agree else "different"
            self._count("kvpin_tokenisation_checks_total", model, engine, result)
        if placement is None:
            return
        counters["kvpin_placements_total"][model, reason_of(placement)].number += 1
        if record.prompt is not None:
            self._count_reuse(record, placement, model, engine)

    def _count_reuse(self, record: RequestRecord, placement: Placement, model: str, engine: str) -> None:
        """Counts what was reused of a prompt that kvpin knows."""
        counters, labels = self._counters, (model, engine)
        counters["kvpin_prompt_tokens_total"][labels].number += placement.n_tokens
        counters["kvpin_available_cached_tokens_total"][labels].number += available_tokens(placement)
        counters["kvpin_predicted_cached_tokens_total"][labels].number += placement.predicted_tokens
        if (reported := record.reported_tokens) is not None:
            pool = self.fleet.pools.get(record.served_as or "")
            within = exact_within(self.fleet.engines.get(record.computed_by or ""), pool)
            missed = placement.firm and not is_exact(placement.predicted_tokens, reported, within)
            counters["kvpin_cached_tokens_total"][labels].number += reported
            counters["kvpin_saved_prefill_seconds_total"][labels].number += 0
            counters["kvpin_mispredictions_total"][labels].number += missed
        for served, saver, saved_s in self.saved_prefill(record):
            self._count("kvpin_saved_prefill_seconds_total", served, saver, by=saved_s)

    def saved_prefill(self, record: RequestRecord) -> Iterator[tuple[str, str, float]]:
        """Values the reuse that an engine reported of a finished request in seconds of prefill. Yields model,
        engine and seconds of all that can be valued now: reuse before the first learned rate of a pool waits
        for it. An engine that has left saves nothing."""
        name, placement, reported = record.served_as or "", record.placement, record.reported_tokens
        pool = self.fleet.pools.get(name)
        if placement is None or pool is None:
            return
        if reported:
            total, restore_s = placement.n_tokens, placement.chosen.restore_s
            model, computed = record.lora or name, max(total - reported, 0)
            reused = _Reused(model, placement.engine, total, computed, restore_s)
            self._reused.setdefault(name, deque(maxlen=MAX_WAITING)).append(reused)
        if not pool.placer.rates.learned:
            return
        for each in self._reused.pop(name, ()):
            book = pool.placer.books.get(each.engine)
            if book is not None:
                spared_s = book.rates.prefill_s(each.total) - book.rates.prefill_s(each.computed)
                yield each.model, each.engine, max(spared_s - each.restore_s, 0.0)

    def reuse(
        self, counts_for: Callable[[str, str], bool] = lambda _model, _engine: True
    ) -> dict[str, ReuseCounts]:
        """The reuse of the fleet's engines, by engine, and of requests that ended after theirs had left; only
        of those pairs of a model and an engine that `counts_for` selects."""
        found: dict[str, dict[str, float]] = {}
        for field, name in _REUSE.items():
            for (model, engine), series in self._counters[name].items():
                if not counts_for(model, engine):
                    continue
                counts = found.setdefault(engine, dict.fromkeys(_REUSE, 0))
                # Another worker's tokens are told as numbers with a point.
                counts[field] += series.number if field == "saved_s" else int(series.number)
        return {engine: msgspec.convert(counts, ReuseCounts) for engine, counts in found.items()}

    def total_reuse(self) -> ReuseCounts:
        """The reuse of all requests."""
        return summed(self.left_reuse, *self.reuse().values())

    def label(self, engine: str) -> str:
        """An engine's name in labels."""
        if engine not in self.fleet.engines:
            return LEFT
        if engine not in self._engines:
            self._drop_left()  # also where nobody reads the page
            self._engines.add(engine)
        return engine

    def _drop_left(self) -> None:
        """Drops the series of engines that have left the fleet."""
        left = self._engines - self.fleet.engines.keys()
        if left:
            self._engines -= left
            gone = (each for engine, each in self.reuse().items() if engine in left)
            self.left_reuse = summed(self.left_reuse, *gone)
            for family in self.families.values():
                family.drop("engine", left)
                family.drop("prefiller", left)

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[name][labels].number += by

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
            histograms["kvpin_request_duration_seconds"][model, engine].observe(record.duration_s, trace_id)
        if (placement_s := record.placement_s) is not None:
            histograms["kvpin_placement_seconds"][(model,)].observe(placement_s, trace_id)
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
            self._histograms[name][labels].observe(seconds, trace_id)

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

    def cpu_seconds(self) -> dict[tuple[str, str], float]:
        """The time that tenants' requests took here, by tenant and kind of work."""
        spent = defaultdict[tuple[str, str], float](float)
        for (tenant, what), seconds in THREADS.spent.items() if self._max_tenants else ():
            if tenant is not None:
                spent[self.tenant_label(tenant), what] += seconds
        return spent

    def refuse(self, status: int, reason: str | None = None) -> None:
        """Counts a request that was refused before it got a record. `reason`: of `kvpin_refused_total`."""
        self.ended += 1
        self._count("kvpin_requests_total", "", "", str(status))
        if reason is not None:
            self._count("kvpin_refused_total", reason)

    @property
    def declared(self) -> tuple[Family, ...]:
        """All families, whether they have series or not."""
        return tuple(row.family(name) for name, row in (_FAMILIES | _READ).items())

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
        self._begin_of_alerts()
        for family in self.families.values():
            yield from family.lines(openmetrics=openmetrics)
        for name, row in _READ.items():  # each is as it was when its first line was taken
            yield from row.family(name).lines(list(row.read(self)), openmetrics=openmetrics)
        yield "# EOF\n" if openmetrics else ""

    def _begin_of_alerts(self) -> None:
        """Begins series that alerts watch: Prometheus sees no increase where one appears with its event."""
        for pool in self.fleet.pools.values():
            for model in (pool.model, *pool.loras):
                self._count("kvpin_interrupted_streams_total", model, "broken", by=0)
                for engine in map(self.label, pool.engines):
                    self._count("kvpin_tokenisation_checks_total", model, engine, "different", by=0)


def _refusal(record: RequestRecord) -> str | None:
    """Why kvpin refused a request that it sent to no engine: `limit`, of its tenant, `busy`, or `model`, of
    its key. None: it did not refuse it."""
    if record.refusal is not None:
        return record.refusal
    if record.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "limit"
    has_waited = record.status == HTTPStatus.SERVICE_UNAVAILABLE and record.queued_s is not None
    return "busy" if has_waited else None
