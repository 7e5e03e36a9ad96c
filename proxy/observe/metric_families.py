"""Families of counters and histograms, and their lines in the text formats of Prometheus and OpenMetrics.

prometheus_client took 90 ms for the page of 256 engines, all of it on the event loop. Here each series
keeps the text of its name and labels, so that a page costs one format per series. Only the event loop's
thread may use a family.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/
https://prometheus.io/docs/specs/om/open_metrics_spec/: a counter's family has no `_total`, and buckets have
exemplars.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import Generic, NamedTuple, TypeVar, cast

from typing_extensions import override

Taken = float | tuple[list[int], float]
"""What a series counted: the number of a counter, or the counts of a histogram's buckets and their sum."""
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Family(NamedTuple):
    """The declaration of a family. docs/reference/metrics.md shows all.

    Attributes:
        kind: `counter`, `gauge` or `histogram`.
        text: its meaning, in one line.
        labels: their names.
    """

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]

    @property
    def head(self) -> str:
        """The two lines before its series."""
        return f"# HELP {self.name} {self.text}\n# TYPE {self.name} {self.kind}\n"


@lru_cache(16_384)
def labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """`{name="value",…}`, by name; empty without names."""
    pairs = (
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(zip(names, values, strict=True))
    )
    return f"{{{','.join(pairs)}}}" if names else ""


def gauge(family: Family, series: Iterable[tuple[tuple[str, ...], float]]) -> Iterator[str]:
    """The page's part for values as they are now, each a pair of label values and number: its head, then a
    line for each."""
    yield family.head
    for values, number in series:
        yield f"{family.name}{labelled(family.labels, values)} {float(number)}\n"


class Count:
    """One series of a counter."""

    __slots__ = ("line", "number")

    def __init__(self, line: str) -> None:
        """`line` is the series' name and labels."""
        self.line = line
        self.number: float = 0

    def add(self, number: float = 1) -> None:
        """Counts `number` more."""
        self.number += number

    def take(self) -> Taken | None:
        """The number, which begins anew; None for 0."""
        number, self.number = self.number, 0
        return number or None

    def give(self, taken: Taken) -> None:
        """Adds what another one's `take` gave."""
        self.number += cast("float", taken)


_Each = TypeVar("_Each")


class _Series(dict[tuple[str, ...], _Each]):
    """The series of a family by label values. One that is asked for appears on the page from then on."""

    def __init__(self, new: Callable[[tuple[str, ...]], _Each]) -> None:
        """`new` makes a series."""
        super().__init__()
        self._new = new

    def __missing__(self, values: tuple[str, ...]) -> _Each:
        series = self[values] = self._new(values)
        return series


class _SeriesByLabels(Generic[_Each]):
    """A family with one series for each combination of label values.

    Attributes:
        series: label values → series.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.series = _Series(self._new)

    def of(self, *values: str) -> _Each:
        """The series with these label values. It appears on the page from now on."""
        return self.series[values]

    def drop(self, label: str, values: AbstractSet[str]) -> None:
        """Drops the series with these values of a label, where the family has that label."""
        if label in self.family.labels:
            at = self.family.labels.index(label)
            for key in [each for each in self.series if each[at] in values]:
                del self.series[key]

    def lines(self, *, openmetrics: bool = False) -> Iterator[str]:
        """The family's part of the page: its head, then a part for each series."""
        raise NotImplementedError

    def _new(self, values: tuple[str, ...]) -> _Each:
        raise NotImplementedError


class Counter(_SeriesByLabels[Count]):
    """Numbers that only grow, one for each combination of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        """`name` ends in `_total`."""
        super().__init__(Family(name, "counter", text, tuple(labels)))

    @override
    def _new(self, values: tuple[str, ...]) -> Count:
        return Count(f"{self.family.name}{labelled(self.family.labels, values)}")

    @override
    def lines(self, *, openmetrics: bool = False) -> Iterator[str]:
        name = self.family.name.removesuffix("_total") if openmetrics else self.family.name
        yield self.family._replace(name=name).head
        for series in list(self.series.values()):
            yield f"{series.line} {float(series.number)}\n"


class Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "exemplars", "page", "sum")

    def __init__(self, bounds: Sequence[float], page: str) -> None:
        """`page` is the format of its lines: a `%d` per bucket, one for the count, a `%r` for the sum."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.page = page
        self.exemplars: dict[int, str] = {}  # the last one of each bucket, as it is written

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Counts one value. `trace_id` leads from the value to the trace of its request."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace_id is not None:
            self.exemplars[bucket] = f' # {{trace_id="{trace_id}"}} {value!r} {time.time():.3f}\n'

    def take(self) -> Taken | None:
        """The counts of its buckets and its sum, which begin anew; None without any."""
        if not any(self.counts):
            return None
        taken = self.counts, self.sum
        self.counts, self.sum = [0] * len(self.counts), 0.0
        return taken

    def give(self, taken: Taken) -> None:
        """Adds what another one's `take` gave."""
        counts, total = cast("tuple[list[int], float]", taken)
        self.counts = [*map(add, self.counts, counts)]
        self.sum += total

    def lines(self, *, exemplars: bool) -> str:
        """Its part of the page."""
        totals = (*accumulate(self.counts),)
        text = self.page % (*totals, totals[-1], self.sum)
        if not (exemplars and self.exemplars):
            return text
        lines = text.splitlines(keepends=True)
        for bucket, exemplar in self.exemplars.items():
            lines[bucket] = lines[bucket][:-1] + exemplar
        return "".join(lines)


class Histogram(_SeriesByLabels[Buckets]):
    """Counts of values in each of some ranges, for each combination of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the ranges, in rising order; a last range has no end."""
        super().__init__(Family(name, "histogram", text, tuple(labels)))
        self._bounds = tuple(bounds)

    @override
    def lines(self, *, openmetrics: bool = False) -> Iterator[str]:
        yield self.family.head
        for series in list(self.series.values()):
            yield series.lines(exemplars=openmetrics)

    @override
    def _new(self, values: tuple[str, ...]) -> Buckets:
        names, plain = (*self.family.labels, "le"), labelled(self.family.labels, values).replace("%", "%%")
        lines = []
        for bound in (*(str(float(bound)) for bound in self._bounds), "+Inf"):
            labels = labelled(names, (*values, bound)).replace("%", "%%")
            lines.append(f"{self.family.name}_bucket{labels} %d.0\n")
        name = self.family.name
        page = f"{''.join(lines)}{name}_count{plain} %d.0\n{name}_sum{plain} %r\n"
        return Buckets(self._bounds, page)
