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
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import Generic, NamedTuple, TypeVar, cast

Taken = float | tuple[list[int], float]
"""What a series counted: the number of a counter, or the counts of a histogram's buckets and their sum."""
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Family(NamedTuple):
    """The declaration of a family. docs/reference/metrics.md shows all.

    Attributes:
        text: its meaning, in one line.
        labels: their names.
        bounds: of a histogram: the upper ends of its ranges, in rising order; a last range has no end.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """`counter`, `gauge` or `histogram`."""
        return "histogram" if self.bounds else "counter" if self.name.endswith("_total") else "gauge"

    def head(self, *, openmetrics: bool) -> str:
        """The two lines before its series."""
        name = self.name.removesuffix("_total") if openmetrics else self.name
        return f"# HELP {name} {self.text}\n# TYPE {name} {self.kind}\n"

    def lines(
        self, series: Iterable[tuple[tuple[str, ...], float]], *, openmetrics: bool = False
    ) -> Iterator[str]:
        """The page's part for values as they are now, each a pair of label values and number: its head, then
        a line for each."""
        yield self.head(openmetrics=openmetrics)
        for values, number in series:
            yield f"{self.name}{labelled(self.labels, values)} {float(number)}\n"


@lru_cache(16_384)
def labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """`{name="value",…}`, by name; empty without names."""
    pairs = (
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(zip(names, values, strict=True))
    )
    return f"{{{','.join(pairs)}}}" if names else ""


class Count:
    """One series of a counter."""

    __slots__ = ("_line", "number")

    def __init__(self, family: Family, values: tuple[str, ...]) -> None:
        """`values`: of the labels."""
        self._line = f"{family.name}{labelled(family.labels, values)}"
        self.number: float = 0

    def take(self) -> Taken | None:
        """The number, which begins anew; None for 0."""
        number, self.number = self.number, 0
        return number or None

    def give(self, taken: Taken) -> None:
        """Adds what another one's `take` gave."""
        self.number += cast("float", taken)

    def lines(self, *, exemplars: bool) -> str:  # noqa: ARG002 - counters have none
        """Its part of the page."""
        return f"{self._line} {float(self.number)}\n"


class Buckets:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_page", "counts", "exemplars", "sum")

    def __init__(self, family: Family, values: tuple[str, ...]) -> None:
        """`values`: of the labels."""
        name, names = family.name, (*family.labels, "le")
        plain = labelled(family.labels, values).replace("%", "%%")
        lines = []
        for bound in (*(str(float(bound)) for bound in family.bounds), "+Inf"):
            labels = labelled(names, (*values, bound)).replace("%", "%%")
            lines.append(f"{name}_bucket{labels} %d.0\n")
        # A `%d` per bucket, one for the count, a `%r` for the sum.
        self._page = f"{''.join(lines)}{name}_count{plain} %d.0\n{name}_sum{plain} %r\n"
        self._bounds = family.bounds
        self.counts = [0] * (len(family.bounds) + 1)
        self.sum = 0.0
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
        text = self._page % (*totals, totals[-1], self.sum)
        if not (exemplars and self.exemplars):
            return text
        lines = text.splitlines(keepends=True)
        for bucket, exemplar in self.exemplars.items():
            lines[bucket] = lines[bucket][:-1] + exemplar
        return "".join(lines)


_Each = TypeVar("_Each", Count, Buckets)


class SeriesOf(dict[tuple[str, ...], _Each], Generic[_Each]):
    """The series of a family by label values. One that is asked for appears on the page from then on."""

    def __init__(self, family: Family, new: Callable[[Family, tuple[str, ...]], _Each]) -> None:
        """`new` makes a series: `Count` or `Buckets`."""
        super().__init__()
        self.family = family
        self._new: Callable[[Family, tuple[str, ...]], _Each] = new

    def __missing__(self, values: tuple[str, ...]) -> _Each:
        series = self[values] = self._new(self.family, values)
        return series

    def drop(self, label: str, values: AbstractSet[str]) -> None:
        """Drops the series with these values of a label, where the family has that label."""
        if label in self.family.labels:
            at = self.family.labels.index(label)
            for key in [each for each in self if each[at] in values]:
                del self[key]

    def lines(self, *, openmetrics: bool = False) -> Iterator[str]:
        """The family's part of the page: its head, then a part for each series."""
        yield self.family.head(openmetrics=openmetrics)
        for series in list(self.values()):
            yield series.lines(exemplars=openmetrics)
