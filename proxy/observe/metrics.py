"""Prometheus metrics: counts of finished requests, and the page that a scrape gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus

from proxy.core.budget import ByteBudget
from proxy.core.life import Cause
from proxy.fleet.discovery import Source
from proxy.fleet.fleet import Fleet
from proxy.observe.gauges import GAUGES, State, counters_of, gauges_of
from proxy.observe.metric_families import Counter, Family, Histogram
from proxy.observe.reasons import reason_of
from proxy.observe.reuse import ReuseCounts, reuse_of
from proxy.peers.peers import Peers
from proxy.request.records import RequestRecord

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_PLACEMENT_SECONDS = (0.0001, 0.0002, 0.0005, *_LAG_SECONDS)
# As vLLM's and those of OpenTelemetry's GenAI conventions: one panel may show them beside ours.
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_PER_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_BY_ENGINE = ("model", "engine")
# Stands for the tenants that have no metrics of their own. No tenant's name: those have no spaces.
OTHER_TENANTS = "all others"
# Stands for engines that left before their last requests ended.
LEFT = "has left"
# Series between which a page lets the event loop serve requests: 1 ms.
_SLICE = 100


class Metrics:
    """All metrics of one proxy.

    The series of an engine are dropped when it has left the fleet. What is summed up here is not.

    Attributes:
        loop_lag: how late the event loop was, see `loop_lag.py`.
        ended: requests that have ended.
        total_reuse: the reuse of all requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        sources: Mapping[str, Source] | None = None,
        peers: Peers | None = None,
        tenants: int = 0,
        bodies: ByteBudget | None = None,
    ) -> None:
        """Args:
        fleet: the engines.
        sources: where engines are found, by name.
        peers: other kvpins; None without an exchange.
        tenants: how many tenants have metrics of their own.
        bodies: memory for requests' bodies.
        """
        self._fleet, self._peers, self._max_tenants = fleet, peers, tenants
        self._sources = {} if sources is None else sources
        self._bodies = ByteBudget(0) if bodies is None else bodies
        self._families: list[Counter | Histogram] = []  # in the order of the page

        def counter(name: str, text: str, labels: Sequence[str]) -> Counter:
            self._families.append(made := Counter(name, text, labels))
            return made

        def histogram(name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> Histogram:
            self._families.append(made := Histogram(name, text, labels, bounds))
            return made

        self._requests = counter(
            "kvpin_requests_total",
            "Requests answered; model: the model or LoRA adapter that served, whatever name was "
            "sent; status: failed where kvpin crashed",
            (*_BY_ENGINE, "status"),
        )
        self._ends = counter("kvpin_request_ends_total", "Requests that ended, by cause", ("cause",))
        self._retries = counter("kvpin_retries_total", "Attempts beyond a request's first", ("model",))
        self._interrupted = counter(
            "kvpin_interrupted_streams_total",
            "Streams whose engine died in mid-answer, by result: migrated (another engine went on) or broken",
            ("model", "result"),
        )
        self._placements = counter(
            "kvpin_placements_total",
            "Requests placed, by reason: held (the engine has the most of the prompt), gathered "
            "(it will have it, after requests in flight have stored it), released (another has "
            "more, but costs more), spread (no engine has any of it), only (no other engine could "
            "take it), balanced (the prompt is not known: by load alone)",
            ("model", "reason"),
        )
        self._prompt = counter(
            "kvpin_prompt_tokens_total", "Prompt tokens of requests whose prompt kvpin knows", _BY_ENGINE
        )
        self._available = counter(
            "kvpin_available_cached_tokens_total",
            "Of the prompt tokens, those on the eligible engine that held most of each prompt; "
            "engine: the chosen one",
            _BY_ENGINE,
        )
        self._predicted = counter(
            "kvpin_predicted_cached_tokens_total",
            "Of the prompt tokens, those that kvpin predicted to come from cache",
            _BY_ENGINE,
        )
        self._reported = counter(
            "kvpin_cached_tokens_total",
            "Of the prompt tokens, those that engines reported from cache",
            _BY_ENGINE,
        )
        self._generated = counter(
            "kvpin_generation_tokens_total", "Tokens of answers, where engines report them", _BY_ENGINE
        )
        self._saved = counter(
            "kvpin_saved_prefill_seconds_total",
            "Seconds of prefill that cached tokens saved, by learned rates, less restores",
            _BY_ENGINE,
        )
        self._inexact = counter(
            "kvpin_mispredictions_total",
            "Requests whose reported cached tokens differ from the prediction",
            _BY_ENGINE,
        )
        self._tokens = counter(
            "kvpin_tokenisation_checks_total",
            "Prompts whose tokens an engine reported, by result: same as kvpin's, or different",
            (*_BY_ENGINE, "result"),
        )
        self._placing = histogram(
            "kvpin_placement_seconds",
            "kvpin's own time to read, tokenise and place a request, without its wait for busy "
            "engines; requests that were placed twice are not in it",
            ("model",),
            _PLACEMENT_SECONDS,
        )
        self._first_token = histogram(
            "kvpin_time_to_first_token_seconds",
            "From a request's arrival to the first byte of its stream; answers that are no stream "
            "are not in it",
            _BY_ENGINE,
            _FIRST_TOKEN_SECONDS,
        )
        self._per_token = histogram(
            "kvpin_time_per_output_token_seconds",
            "Mean time between the tokens of a stream, one value per stream that ended well; "
            "where the engine reports no tokens, events of the stream are counted",
            _BY_ENGINE,
            _PER_TOKEN_SECONDS,
        )
        self._duration = histogram(
            "kvpin_request_duration_seconds",
            "From a request's arrival at kvpin to the end of its answer",
            _BY_ENGINE,
            _SECONDS,
        )
        self._queued = histogram(
            "kvpin_queued_seconds",
            "How long requests waited for engines that were busy; requests that did not wait are not in it",
            ("model",),
            _SECONDS,
        )
        self._refused = counter(
            "kvpin_refused_total",
            "Requests refused before an engine was asked, by reason: busy (all engines are), "
            "limit (of its tenant), memory (of requests' bodies)",
            ("reason",),
        )
        self.loop_lag = histogram(
            "kvpin_loop_lag_seconds",
            "How late kvpin's event loop is, measured every 50 ms: all requests wait that long",
            (),
            _LAG_SECONDS,
        ).of()
        by_tenant = ("tenant",)
        self._of_tenants = (
            counter(
                "kvpin_tenant_requests_total",
                "Requests; as all families by tenant, only if tenant_metrics is set",
                (*by_tenant, "status"),
            ),
            counter("kvpin_tenant_prompt_tokens_total", "Prompt tokens", by_tenant),
            counter(
                "kvpin_tenant_cached_tokens_total",
                "Of the prompt tokens, those that engines reported from cache",
                by_tenant,
            ),
            counter("kvpin_tenant_generation_tokens_total", "Tokens of answers", by_tenant),
        )
        self._tenants: set[str] = set()  # those that have series
        self._engines: set[str] = set()  # those that have series
        self.ended = 0
        self.total_reuse = ReuseCounts()

    def observe(self, record: RequestRecord, trace_id: str | None = None) -> None:
        """Counts one finished request. `trace_id`: of its trace, if it has one."""
        placement = record.placement
        # Not the client's name for it, which may be anything.
        model = (record.lora or record.served_as or "") if placement is not None else ""
        engine = self._label(placement.engine) if placement is not None else ""
        self.ended += 1
        self._requests.of(model, engine, str(record.status or "failed")).add()
        self._ends.of(record.cause or Cause.BUG).add()
        self._retries.of(model).add(max(len(record.attempts) - 1, 0))
        if record.interrupted:
            self._interrupted.of(model, "migrated" if record.error is None else "broken").add()
        if (reason := _refusal(record)) is not None:
            self._refused.of(reason).add()
        self._observe_times(record, model, engine, trace_id)
        if self._max_tenants and record.tenant is not None:
            self._count_tenant(record, record.tenant)
        if record.output_tokens is not None:
            self._generated.of(model, engine).add(record.output_tokens)
        if record.tokens_agree is not None:
            self._tokens.of(model, engine, "same" if record.tokens_agree else "different").add()
        if placement is None:
            return
        self._placements.of(model, reason_of(placement).value).add()
        if record.prompt is not None:
            reuse = reuse_of(self._fleet, record, placement)
            self.total_reuse = self.total_reuse.plus(reuse)
            self._prompt.of(model, engine).add(reuse.prompt_tokens)
            self._available.of(model, engine).add(reuse.available_tokens)
            self._predicted.of(model, engine).add(reuse.selected_tokens)
            if record.reported_tokens is not None:
                self._reported.of(model, engine).add(reuse.delivered_tokens)
                self._saved.of(model, engine).add(reuse.saved_s)
                missed = record.reported_tokens != placement.predicted_tokens
                self._inexact.of(model, engine).add(int(missed))

    def _label(self, engine: str) -> str:
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
            for family in self._families:
                family.drop("engine", left)

    def _observe_times(self, record: RequestRecord, model: str, engine: str, trace_id: str | None) -> None:
        """Counts how long one finished request took, and its parts."""
        if record.duration_s is not None:
            self._duration.of(model, engine).observe(record.duration_s, trace_id)
        if record.queued_s is not None:
            self._queued.of(record.served_as or "").observe(record.queued_s, trace_id)
        if (placement_s := record.placement_s) is not None:
            self._placing.of(model).observe(placement_s, trace_id)
        if (first_token_s := record.first_token_s) is not None:
            self._first_token.of(model, engine).observe(first_token_s, trace_id)
        if (per_token_s := record.per_token_s) is not None:
            self._per_token.of(model, engine).observe(per_token_s, trace_id)

    def _count_tenant(self, record: RequestRecord, tenant: str) -> None:
        """Counts one finished request of a tenant. The first ones that come have series of their own."""
        if tenant not in self._tenants:
            if len(self._tenants) < self._max_tenants:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        requests, prompt, reported, generated = self._of_tenants
        requests.of(tenant, str(record.status or "failed")).add()
        prompt.of(tenant).add(record.n_tokens or 0)
        reported.of(tenant).add(record.reported_tokens or 0)
        generated.of(tenant).add(record.output_tokens or 0)

    def refuse(self, status: int, reason: str | None = None) -> None:
        """Counts a request that was refused before it got a record. `reason`: of `kvpin_refused_total`."""
        self.ended += 1
        self._requests.of("", "", str(status)).add()
        if reason is not None:
            self._refused.of(reason).add()

    def reuse(self) -> dict[str, ReuseCounts]:
        """Reuse by engine."""
        counters = self._prompt, self._available, self._predicted, self._reported
        prompt, available, selected, delivered = (counter.sums("engine") for counter in counters)
        saved = self._saved.sums("engine")
        return {
            engine: ReuseCounts(
                prompt_tokens=round(tokens),
                available_tokens=round(available[engine]),
                selected_tokens=round(selected[engine]),
                delivered_tokens=round(delivered.get(engine, 0)),
                saved_s=round(saved.get(engine, 0.0), 3),
            )
            for engine, tokens in prompt.items()
        }

    @property
    def declared(self) -> tuple[Family, ...]:
        """All families, whether they have series or not."""
        counted = (*self._families, *counters_of(self._fleet, self._peers))
        return (*(each.family for each in counted), *GAUGES)

    def render(self, *, openmetrics: bool = False) -> bytes:
        """The page, in Prometheus' text format or in that of OpenMetrics."""
        return "".join(self._parts(openmetrics)).encode()

    async def page(self, *, openmetrics: bool = False) -> bytes:
        """The same. Requests are served in between: with many engines, the page is long."""
        parts = list[str]()
        for part in self._parts(openmetrics):
            parts.append(part)
            if not len(parts) % _SLICE:
                await asyncio.sleep(0)
        return "".join(parts).encode()

    def _parts(self, openmetrics: bool) -> Iterator[str]:
        self._drop_left()
        for family in (*self._families, *counters_of(self._fleet, self._peers)):
            yield from family.lines(openmetrics=openmetrics)
        yield from gauges_of(State(self._fleet, self._sources, self._peers, self._bodies))
        yield "# EOF\n" if openmetrics else ""


def _refusal(record: RequestRecord) -> str | None:
    """Why kvpin refused a request that it might have sent to an engine: `limit`, of its tenant, or `busy`."""
    if record.attempts:
        return None
    if record.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "limit"
    has_waited = record.status == HTTPStatus.SERVICE_UNAVAILABLE and record.queued_s is not None
    return "busy" if has_waited else None
