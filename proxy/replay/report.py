"""The outcomes of runs as rows, as a table, as JSON and CSV, as curves."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from statistics import fmean
from typing import Any

import msgspec

from proxy.replay.plan import Need
from proxy.replay.simulator import RunResult

# Columns that also show how far runs are apart.
_SPREAD = ("hit_percent", "mean_ttft_s", "p99_ttft_s")

Row = Mapping[str, Any]
_PERCENT = 100
# Columns of the table: key, heading, digits.
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("hit_percent", "hit %", 1),
    ("mean_ttft_s", "mean TTFT s", 3),
    ("p50_ttft_s", "p50", 3),
    ("p99_ttft_s", "p99", 2),
    ("imbalance", "busiest ÷ mean", 2),
    ("evicted_blocks", "evicted", 0),
    ("exact_percent", "exact %", 1),
)


def rows(outcomes: Iterable[RunResult]) -> list[dict[str, Any]]:
    """One row for each run; None for a figure that it does not have.

    Shares of tokens are in percent, times in seconds. `imbalance` is the busiest engine's computed tokens
    over the mean. `exact_percent` is the share of requests whose cached tokens were predicted to the token.
    """
    return [_row(outcome) for outcome in outcomes]


def _row(outcome: RunResult) -> dict[str, Any]:
    run, tokens = outcome.run, outcome.prompt_tokens
    exact = outcome.exact_share
    return {
        "policy": run.policy,
        "engines": run.engines,
        "gpu_tokens": run.model.gpu_tokens,
        "seed": run.seed,
        "speedup": run.speedup,
        "requests": outcome.requests,
        "too_long": outcome.too_long,
        "hit_percent": _PERCENT * outcome.hit_share,
        "gpu_hit_percent": _PERCENT * outcome.gpu_hits / tokens,
        "host_hit_percent": _PERCENT * outcome.host_hits / tokens,
        "mean_ttft_s": outcome.mean_ttft_s,
        "p50_ttft_s": outcome.ttft_s(0.5),
        "p99_ttft_s": outcome.ttft_s(0.99),
        "imbalance": outcome.imbalance,
        "evicted_blocks": outcome.evicted if outcome.ttfts else None,
        "exact_percent": None if exact is None else _PERCENT * exact,
        "off_tokens": None if exact is None else outcome.off_tokens,
    }


def over_seeds(each: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each policy, number of engines and size: the mean of its runs, and in `spread`, by column,
    how far a run is off the mean at most. Fewest engines first, then the smallest, then the lowest mean
    time."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in each:
        groups.setdefault((*on(row), row["policy"]), []).append(row)
    merged = [_merge(group) for group in groups.values()]
    return sorted(merged, key=lambda row: (*on(row), row["mean_ttft_s"] is None, row["mean_ttft_s"] or 0.0))


def on(row: Row) -> tuple[int, int]:
    """The fleet of a run: the number of engines, and the GPU tokens of each."""
    return row["engines"], row["gpu_tokens"]


def _merge(group: Sequence[Row]) -> dict[str, Any]:
    merged: dict[str, Any] = {key: group[0][key] for key in ("policy", "engines", "gpu_tokens")}
    merged["spread"] = {}
    for column, _, _ in COLUMNS:
        values = [row[column] for row in group]
        if None in values:
            merged[column] = None
            continue
        merged[column] = mean = fmean(values)
        merged["spread"][column] = max(abs(value - mean) for value in values)
    return merged


def cell(row: Row, column: str, digits: int) -> str:
    """A figure of a merged row as text, with how far runs are apart where the column shows that."""
    value = row[column]
    if value is None:
        return "–"
    spread = row["spread"][column] if column in _SPREAD else 0.0
    return f"{value:,.{digits}f}" + (f" ±{spread:,.{digits}f}" if spread else "")


def as_json(
    settings: Mapping[str, Any],
    each: Sequence[Row],
    doubts: Sequence[str] = (),
    needs: Sequence[Need] = (),
    *,
    title: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The replay in one line, its settings, why runs cannot be compared, what was left out, the engines that
    policies need, and an object for each run."""
    needed = [need.as_data() for need in needs]
    about = {"title": title, "settings": settings, "doubts": doubts, "notes": notes, "needs": needed}
    return msgspec.json.format(msgspec.json.encode({**about, "runs": each}), indent=1).decode() + "\n"


def as_csv(each: Sequence[Row]) -> str:
    """A header line, and one line for each run."""
    text = StringIO()
    lines = csv.DictWriter(text, fieldnames=list(each[0]), lineterminator="\n")
    lines.writeheader()
    lines.writerows(each)
    return text.getvalue()


_FIGURES = {
    "hit_percent": "token hits, %",
    "mean_ttft_s": "mean time to first token, s",
    "p99_ttft_s": "p99 of the time to first token, s",
}
_AXES = {"engines": "engines", "gpu_tokens": "GPU tokens of each engine"}
_OTHER = {"engines": "gpu_tokens", "gpu_tokens": "engines"}


def curves(each: Sequence[Row]) -> list[dict[str, Any]]:
    """The plots of some runs, hits first; none where all runs were on the same engines.

    The axis is what there are more of, numbers of engines or sizes: `x` are its places. Each value of the
    other has its plots. A line is a policy with a value for each place, None where there is none.
    `is_log`: values differ by factors, and belong on a logarithmic scale.
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
                is_log = figure != "hit_percent" and all(
                    y is None or y > 0 for line in lines for y in line["y"]
                )
                plot = {
                    "title": title + said,
                    "axis": _AXES[x],
                    "x": places,
                    "lines": lines,
                    "is_log": is_log,
                }
                drawn.append(plot)
    return drawn


def _lines(
    rows: Sequence[Row], policies: Sequence[str], x: str, places: Sequence[int], figure: str
) -> Iterator[dict[str, Any]]:
    values = {(row["policy"], row[x]): row[figure] for row in rows}
    for policy in policies:
        y = [values.get((policy, place)) for place in places]
        if any(value is not None for value in y):
            yield {"policy": policy, "y": y}
