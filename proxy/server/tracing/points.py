"""The metrics page as metrics of OpenTelemetry: the same names, labels and numbers.

The page is read as a collector would read it. So each metric is declared once, and what a request costs does
not depend on where its metrics go.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    DataT,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


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
