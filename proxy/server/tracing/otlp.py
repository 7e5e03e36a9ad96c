"""Sends spans and metrics to a collector by OTLP over HTTP. OpenTelemetry's own variables say where and how.

Spans wait in memory and leave from a thread. Once a minute, another thread reads the metrics page.
A collector that does not answer costs log lines, never a request.

The variables: https://opentelemetry.io/docs/languages/sdk-configuration/
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Literal, TypeVar
from uuid import uuid4

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import AnyHttpUrl, Field, FiniteFloat, TypeAdapter, ValidationError

from proxy.server.tracing.traced import Traces
from proxy.settings import SettingsError


def read(page: str, since_ns: int, now_ns: int) -> Iterator[export.Metric]:
    """The metrics of a page in the format of Prometheus. Times are Unix times in ns: from when its counters
    count, and when it was read."""
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        unit = "s" if "_seconds" in name else ""
        yield export.Metric(name, family.documentation, unit, _data(family, since_ns, now_ns))


def _data(family: Family, since_ns: int, now_ns: int) -> export.DataT:
    if family.type == "histogram":
        points = [_histogram(samples, since_ns, now_ns) for samples in _series(family)]
        return export.Histogram(points, export.AggregationTemporality.CUMULATIVE)
    numbers = [export.NumberDataPoint(each.labels, since_ns, now_ns, each.value) for each in family.samples]
    if family.type == "counter":
        return export.Sum(numbers, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return export.Gauge(numbers)


def _series(family: Family) -> Iterator[list[Sample]]:
    """The samples of each series of a histogram: its buckets, its count, its sum, in this order."""
    series: list[Sample] = []
    for sample in family.samples:
        series.append(sample)
        if sample.name.endswith("_sum"):
            yield series
            series = []


def _histogram(samples: list[Sample], since_ns: int, now_ns: int) -> export.HistogramDataPoint:
    *buckets, count, total = samples
    below = [0, *(round(bucket.value) for bucket in buckets)]
    return export.HistogramDataPoint(
        attributes=total.labels,
        start_time_unix_nano=since_ns,
        time_unix_nano=now_ns,
        count=round(count.value),
        sum=total.value,
        bucket_counts=[upper - lower for lower, upper in pairwise(below)],
        explicit_bounds=[float(bucket.labels["le"]) for bucket in buckets[:-1]],
        min=None,  # type: ignore[arg-type]  # not known; the encoder leaves it out
        max=None,  # type: ignore[arg-type]  # likewise
    )


log = structlog.get_logger(__name__)

# Seconds between two lines.
EVERY_S = 60.0
_LONGEST = 300


class Complaints(logging.Handler):
    """Logs the first record of OpenTelemetry's packages, which complain of every attempt to send, and then at
    most one in `EVERY_S`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet_until = 0.0

    @classmethod
    def take(cls) -> None:
        """Takes all records of these packages."""
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [cls()], False

    def emit(self, record: logging.LogRecord) -> None:
        """Logs the record, if none was logged in the last `EVERY_S`."""
        if record.created < self._quiet_until:
            return
        self._quiet_until = record.created + EVERY_S
        log.warning(
            "traces or metrics are not sent; kvpin goes on trying, and says so at most once a minute",
            error=record.getMessage()[:_LONGEST],
        )


_NAME = "kvpin"
STOP_S = 3.0  # seconds that what is left may take when kvpin stops


class Telemetry:
    """Sends spans and metrics of this kvpin to its collector. `traces` makes the spans; None if none
    are sent."""

    def __init__(self, page: Callable[[], bytes]) -> None:
        """`page` renders the metrics. Raises SettingsError if OpenTelemetry's variables ask for what kvpin
        cannot do."""
        resource = _resource()
        Complaints.take()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.traces: Traces | None = None
        if _sends("TRACES"):
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            self.traces = Traces(self._provider.get_tracer(_NAME, version(_NAME)))
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
        scope = export.ScopeMetrics(InstrumentationScope(_NAME, version(_NAME)), metrics, "")
        exporter.export(export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")]))


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
    if _variable(f"OTEL_{signal}_EXPORTER", _EXPORTER, "otlp", "be 'otlp' or 'none'") == "none":
        return False
    own, general = f"OTEL_EXPORTER_OTLP_{signal}", "OTEL_EXPORTER_OTLP"
    protocol = f"{own if os.environ.get(f'{own}_PROTOCOL') else general}_PROTOCOL"
    _variable(protocol, _PROTOCOL, "http/protobuf", "be 'http/protobuf': kvpin has no gRPC")
    for each in (own, general):
        _variable(f"{each}_ENDPOINT", _ADDRESS, "http://localhost:4318", "look like http://host:4318")
    return True


def _every_s() -> float:
    """Seconds between two exports of metrics."""
    return (
        _variable("OTEL_METRIC_EXPORT_INTERVAL", _MILLISECONDS, "60000", "be a number of milliseconds") / 1000
    )


_Value = TypeVar("_Value")
_EXPORTER, _PROTOCOL = TypeAdapter(Literal["otlp", "none"]), TypeAdapter(Literal["http/protobuf"])
_ADDRESS, _MILLISECONDS = TypeAdapter(AnyHttpUrl), TypeAdapter(Annotated[FiniteFloat, Field(gt=0)])


def _variable(name: str, values: TypeAdapter[_Value], default: str, must: str) -> _Value:
    """The value of a variable of OpenTelemetry. Raises SettingsError if it is none of these values."""
    given = os.environ.get(name) or default
    try:
        return values.validate_python(given)
    except ValidationError:
        raise SettingsError(f"{name} is {given!r}: it must {must}") from None
