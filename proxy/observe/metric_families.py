"""Families of counters and histograms, and their lines in the text formats of Prometheus and OpenMetrics.

prometheus_client took 90 ms for the page of 256 engines, all of it on the event loop. Here each series
keeps the text of its name and labels, so that a page costs one format per series. Only the event loop's
thread may use a family.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/
https://prometheus.io/docs/specs/om/open_metrics_spec/: a counter's family has no `_total`, and buckets have
exemplars.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from typing_extensions import override

Combine = Callable[[Iterable[float]], float]

# name and labels, value, exemplar
_SAMPLE = re.compile(r'([\w:]+(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?) (\S+)( #.*)?')
_EOF = "# EOF"


def merge_pages(pages: Sequence[str], gauges: Mapping[str, Combine]) -> str:
    """One page in the format of `pages`: counters and histograms are summed, gauges as `gauges` says by name.

    Of several exemplars of a series, the first stays.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, dict[str, tuple[list[float], str]]] = {}
    for page in pages:
        family = ""
        for line in page.split("\n"):  # a label's value may hold other ends of lines
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            if line.startswith("#"):
                lines = heads.setdefault(family, []) if line != _EOF else []
                lines += [line] if line not in lines else []
                continue
            found = _SAMPLE.fullmatch(line)
            if found is not None:
                values, _ = series.setdefault(family, {}).setdefault(found[1], ([], found[3] or ""))
                values.append(float(found[2]))
    merged: list[str] = []
    for family, lines in heads.items():
        combine = gauges.get(family, sum)
        merged += lines
        for name, (values, exemplar) in series.get(family, {}).items():
            merged.append(f"{name} {float(combine(values))}{exemplar}")
    merged += [_EOF] if any(page.rstrip().endswith(_EOF) for page in pages) else []
    return "\n".join((*merged, ""))


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
