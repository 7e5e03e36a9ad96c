"""The curves of runs: token hits and times to first token, over the engines or over their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.replay.report import Row, over_seeds

_FIGURES = {
    "hit_percent": "token hits, %",
    "mean_ttft_s": "mean time to first token, s",
    "p99_ttft_s": "p99 of the time to first token, s",
}
_AXES = {"engines": "engines", "gpu_tokens": "GPU tokens of each engine"}
_OTHER = {"engines": "gpu_tokens", "gpu_tokens": "engines"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy: a value for each place on the axis, None where there is none."""

    policy: str
    y: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Curves:
    """One plot.

    Attributes:
        axis: what its places are.
        lines: one for each policy that has a value.
        is_log: values differ by factors: draw them on a logarithmic scale.
    """

    title: str
    axis: str
    x: Sequence[int]
    lines: Sequence[Curve]
    is_log: bool = False


def curves(each: Sequence[Row]) -> list[Curves]:
    """The plots of some runs, hits first; none where all runs were on the same engines.

    The axis is what there are more of, numbers of engines or sizes. Each value of the other has its plots.
    """
    x = max(_AXES, key=lambda name: len({row[name] for row in each}))
    other = _OTHER[x]
    groups = sorted({row[other] for row in each})
    merged = over_seeds(each)
    policies = list(dict.fromkeys(row["policy"] for row in each))
    drawn = []
    for group in groups:
        rows = [row for row in merged if row[other] == group]
        places = sorted({row[x] for row in rows})
        said = f" ({_AXES[other]}: {group:,})" if len(groups) > 1 else ""
        for figure, title in _FIGURES.items():
            lines = list(_lines(rows, policies, x, places, figure))
            if len(places) > 1 and lines:
                is_log = figure != "hit_percent" and all(y is None or y > 0 for line in lines for y in line.y)
                drawn.append(Curves(title + said, _AXES[x], places, lines, is_log))
    return drawn


def _lines(
    rows: Sequence[Row], policies: Sequence[str], x: str, places: Sequence[int], figure: str
) -> Iterator[Curve]:
    values = {(row["policy"], row[x]): row[figure] for row in rows}
    for policy in policies:
        y = [values.get((policy, place)) for place in places]
        if any(value is not None for value in y):
            yield Curve(policy, y)
