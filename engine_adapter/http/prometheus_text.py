"""Reads a few metrics from an engine's `/metrics` page.

A page may have 100 kB, and every engine's page is read every second. So only the lines of the requested
metrics are looked at, and the labels of a series, which stay the same from page to page, are parsed once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

from engine_adapter.errors import EngineUnhealthy

# Series whose labels are kept parsed, of all engines together. Engines of one model share theirs.
_SERIES = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class Samples:
    """The requested values of a page."""

    def __init__(self, samples: Collection[Sample]) -> None:
        self._samples = tuple(samples)

    def all(self, name: str, **labels: str) -> list[Sample]:
        """The samples of a name whose labels include `labels`."""
        wanted = labels.items()
        return [s for s in self._samples if s.name == name and wanted <= s.labels.items()]

    def sum(self, name: str, **labels: str) -> float | None:
        """The sum of such samples; None if there are none."""
        values = [sample.value for sample in self.all(name, **labels)]
        return sum(values) if values else None

    def labels(self, name: str, **labels: str) -> Mapping[str, str]:
        """All labels of the first such sample; {} if there are none."""
        return next((sample.labels for sample in self.all(name, **labels)), {})


def read_samples(page: bytes, names: Collection[str]) -> Samples:
    """The samples of `page` with one of these names and a finite value: NaN and infinity tell nothing.

    Raises:
        EngineUnhealthy: the page is not in Prometheus text format.
    """
    try:
        text = f"\n{page.decode()}"
        samples = [_sample(name, line) for name in names for line in _group(text, name)]
    except ValueError as error:
        raise EngineUnhealthy(f"/metrics cannot be read: {error}") from error
    return Samples([sample for sample in samples if math.isfinite(sample.value)])


def _group(page: str, name: str) -> Iterator[str]:
    """The samples of a metric. The format keeps them in one group, so the search ends after the first one."""
    start = f"\n{name}"
    at = page.find(start)
    while at >= 0 and not page.startswith(("{", " "), at + len(start)):  # a longer name
        at = page.find(start, at + 1)
    while at >= 0 and page.startswith((f"{start}{{", f"{start} "), at):
        stop = page.find("\n", at + 1)
        yield page[at + 1 : stop] if stop >= 0 else page[at + 1 :]
        at = stop


def _sample(name: str, line: str) -> Sample:
    """A line is `name{labels} value`, perhaps with a time stamp. Raises ValueError for any other."""
    series, brace, rest = line.rpartition("}") if "{" in line else line.partition(" ")
    values = rest.split(None, 1)
    if not brace or not values:
        raise ValueError(f"{line!r} is not a sample")
    return Sample(name, _labels(series + brace), float(values[0]))


@lru_cache(_SERIES)
def _labels(series: str) -> Mapping[str, str]:
    """The labels of `name{labels}`. Raises ValueError."""
    (family,) = text_string_to_metric_families(f"{series} 0")
    (sample,) = family.samples
    return sample.labels
