"""Reads a few metrics from an engine's `/metrics` page.

A page may have 100 kB and is read every second, so lines are filtered by name before they are parsed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

from prometheus_client.parser import text_string_to_metric_families

from engine_adapter.errors import EngineUnavailable


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
    """The samples of `page` with one of these names.

    Raises:
        EngineUnavailable: the page is not in Prometheus text format.
    """
    starts = tuple(chain.from_iterable((f"{name}{{", f"{name} ") for name in names))
    try:
        lines = [line for line in page.decode().splitlines() if line.startswith(starts)]
        families = list(text_string_to_metric_families("\n".join(lines)))
    except ValueError as error:
        raise EngineUnavailable(f"/metrics cannot be read: {error}") from error
    return Samples(
        [Sample(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]
    )
