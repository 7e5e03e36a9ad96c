"""Sends spans and metrics to a collector by OTLP over HTTP. OpenTelemetry's own variables say where and how.

Spans wait in memory and leave from a thread. Once a minute, another thread reads the metrics page.
A collector that does not answer costs log lines, never a request.

The variables: https://opentelemetry.io/docs/languages/sdk-configuration/
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    DataT,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from proxy.api.openai import DataPlane
from proxy.flow import Flow
from proxy.server.tracing.traced import TracedAttempts, TracedDataPlane, TracedFlow, trace_id
from proxy.settings import SettingsError
from proxy.steps.attempt import Attempts


def read(page: str, since_ns: int, now_ns: int) -> Iterator[Metric]:
    """The metrics of a page in the format of Prometheus. Times are Unix times in ns: from when its counters
    count, and when it was read."""
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        unit = "s" if "_seconds" in name else ""
        yield Metric(name, family.documentation, unit, _data(family, since_ns, now_ns))


def _data(family: Family, since_ns: int, now_ns: int) -> DataT:
    if family.type == "histogram":
        points = [_histogram(samples, since_ns, now_ns) for samples in _series(family)]
        return Histogram(points, AggregationTemporality.CUMULATIVE)
    numbers = [NumberDataPoint(each.labels, since_ns, now_ns, each.value) for each in family.samples]
    if family.type == "counter":
        return Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Gauge(numbers)


def _series(family: Family) -> Iterator[list[Sample]]:
    """The samples of each series of a histogram: its buckets, its count, its sum, in this order."""
    series: list[Sample] = []
    for sample in family.samples:
        series.append(sample)
        if sample.name.endswith("_sum"):
            yield series
            series = []


def _histogram(samples: list[Sample], since_ns: int, now_ns: int) -> HistogramDataPoint:
    *buckets, count, total = samples
    below = [0, *(round(bucket.value) for bucket in buckets)]
    bounds = [float(bucket.labels["le"]) for bucket in buckets]
    return HistogramDataPoint(
        attributes=total.labels,
        start_time_unix_nano=since_ns,
        time_unix_nano=now_ns,
        count=round(count.value),
        sum=total.value,
        bucket_counts=[upper - lower for lower, upper in pairwise(below)],
        explicit_bounds=bounds[:-1],
        min=None,  # type: ignore[arg-type]  # not known; the encoder leaves it out
        max=None,  # type: ignore[arg-type]  # likewise
    )


log = structlog.get_logger(__name__)

# Seconds between two lines.
EVERY_S = 60.0
_LOGGER = "opentelemetry"
_CAUSE = re.compile(r"\[Errno -?[0-9]+\] (?P<cause>[^\"')\]]+)")
_LONGEST = 120


class Complaints(logging.Handler):
    """Logs the first record of OpenTelemetry's packages, which complain of every attempt to send, and then at
    most one in `EVERY_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._quiet_until: float | None = None

    @classmethod
    def take(cls) -> None:
        """Takes all records of these packages."""
        logger = logging.getLogger(_LOGGER)
        logger.handlers, logger.propagate = [cls()], False

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the record, if none was logged in the last `EVERY_S`."""
        now = self._clock()
        if self._quiet_until is not None and now < self._quiet_until:
            return
        self._quiet_until = now + EVERY_S
        said = record.getMessage()
        found = _CAUSE.search(said)
        log.warning(
            "traces or metrics are not sent; kvpin goes on trying, and says so at most once a minute",
            error=found["cause"] if found else said[:_LONGEST],
        )


_NAME = "kvpin"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Between two exports of metrics, in ms, as OpenTelemetry has it.
_EVERY_MS = "60000"
# Seconds that what is left may take when kvpin stops.
STOP_S = 3.0


class Telemetry:
    """Sends spans and metrics of this kvpin to its collector.

    Attributes:
        flow: makes a flow, whose requests have traces if these are sent; takes the arguments of `Flow`.
        attempts: makes what runs attempts likewise.
        data_plane: makes a data plane likewise.
        trace_id: the id of the running request's trace, if the trace is kept.
    """

    trace_id = staticmethod(trace_id)

    def __init__(self, page: Callable[[], bytes]) -> None:
        """`page` renders the metrics. Raises SettingsError if OpenTelemetry's variables ask for what kvpin
        cannot do."""
        resource = _resource()
        Complaints.take()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.flow: Callable[..., Flow] = Flow
        self.attempts: Callable[..., Attempts] = Attempts
        self.data_plane: Callable[..., DataPlane] = DataPlane
        if _sends("TRACES"):
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            tracer = self._provider.get_tracer(_NAME, version(_NAME))
            self.flow = partial(TracedFlow, tracer=tracer)
            self.attempts = partial(TracedAttempts, tracer=tracer)
            self.data_plane = partial(TracedDataPlane, tracer=tracer)
        self._resource, self._page, self._since_ns = resource, page, time.time_ns()
        self._metrics = OTLPMetricExporter() if _sends("METRICS") else None
        self._every_s = _every_s()

    @staticmethod
    def check() -> None:
        """Raises SettingsError if OpenTelemetry's variables ask for something that kvpin cannot do."""
        _every_s()
        for signal in ("TRACES", "METRICS"):
            _sends(signal)

    async def run(self) -> None:
        """Sends metrics until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            if self._metrics is not None:
                await asyncio.to_thread(self._send, self._metrics, self._page(), time.time_ns())

    async def aclose(self) -> None:
        """Sends what is left, for at most `STOP_S`."""
        # A thread of its own: the loop's own threads would keep the process until they end.
        last = threading.Thread(target=self._close, args=(self._page(), time.time_ns()), daemon=True)
        last.start()
        await asyncio.to_thread(last.join, STOP_S)

    def _close(self, page: bytes, now_ns: int) -> None:
        self._provider.shutdown()
        if self._metrics is not None:
            self._send(self._metrics, page, now_ns)
            self._metrics.shutdown()

    def _send(self, exporter: OTLPMetricExporter, page: bytes, now_ns: int) -> None:
        metrics = [*read(page.decode(), self._since_ns, now_ns)]
        scope = ScopeMetrics(InstrumentationScope(_NAME, version(_NAME)), metrics, "")
        exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], "")]))


def _resource() -> Resource:
    """Who sends: this process of kvpin. Names in OpenTelemetry's variables win."""
    own = Resource(
        {"service.name": _NAME, "service.version": version(_NAME), "service.instance.id": str(uuid4())}
    )
    return Resource.create(dict(own.merge(OTELResourceDetector().detect()).attributes))


def _sends(signal: str) -> bool:
    """True if TRACES, or METRICS, are sent."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise SettingsError(f"OTEL_{signal}_EXPORTER is {exporter!r}: kvpin knows 'otlp' and 'none'")
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or general or "http/protobuf"
    if protocol != "http/protobuf":
        raise SettingsError(
            f"kvpin sends OTLP as 'http/protobuf' only, and OpenTelemetry is to use {protocol!r}"
        )
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", _ENDPOINT):
        _check_address(name)
    return True


def _check_address(name: str) -> None:
    """Raises SettingsError for a variable whose value is no address."""
    given = os.environ.get(name)
    if not given:
        return
    try:
        parts = urlsplit(given)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise SettingsError(f"{name} is {given!r}: it must look like http://host:4318")


def _every_s() -> float:
    """Seconds between two exports of metrics."""
    given = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or _EVERY_MS
    try:
        ms = float(given)
    except ValueError:
        ms = 0.0
    if not 0 < ms < float("inf"):
        raise SettingsError(f"OTEL_METRIC_EXPORT_INTERVAL is {given!r}: it must be a number of milliseconds")
    return ms / 1000
