"""The outcomes of runs as rows, as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from proxy.replay.capacity import Need
from proxy.replay.simulator import Outcome

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
# Columns that a narrow terminal does not show, in the order in which they go.
_LESS = ("imbalance", "evicted_blocks", "exact_percent", "p50_ttft_s")
# Wide enough to measure any table.
_ENDLESS = Console(width=10_000)


def rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row for each run; None for a figure that it does not have.

    Shares of tokens are in percent, times in seconds. `imbalance` is the busiest engine's computed tokens
    over the mean. `exact_percent` is the share of requests whose cached tokens were predicted to the token.
    """
    return [_row(outcome) for outcome in outcomes]


def _row(outcome: Outcome) -> dict[str, Any]:
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


def table(each: Sequence[Row], width: int | None = None) -> Table:
    """A table: one line for each policy, number of engines and size, the best times first.

    With `width`, columns of `_LESS` are left out until the table has at most that many characters; a line
    below names them.
    """
    left_out = 0
    shown = _table(each, ())
    while width is not None and width_of(shown) > width and left_out < len(_LESS):
        left_out += 1
        shown = _table(each, _LESS[:left_out])
    return shown


def width_of(shown: Table) -> int:
    """The characters of a line of the table when nothing is cut."""
    return _ENDLESS.measure(shown).maximum


def _table(each: Sequence[Row], hidden: Sequence[str]) -> Table:
    columns = [column for column in COLUMNS if column[0] not in hidden]
    shown = Table(caption_justify="left", caption_style="dim")
    if hidden:
        names = ", ".join(heading for key, heading, _ in COLUMNS if key in hidden)
        shown.caption = f"no room for: {names} (--csv - shows everything)"
    sizes = {row["gpu_tokens"] for row in each}
    shown.add_column("engines", justify="right", no_wrap=True)
    if len(sizes) > 1:
        shown.add_column("GPU tokens", justify="right", no_wrap=True)
    shown.add_column("policy", no_wrap=True)
    for _, heading, _ in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    before = None
    for row in over_seeds(each):
        if before is not None and on(row) != before:
            shown.add_section()
        before = on(row)
        size = [f"{row['gpu_tokens']:,}"] if len(sizes) > 1 else []
        cells = (cell(row, column, digits) for column, _, digits in columns)
        shown.add_row(str(row["engines"]), *size, row["policy"], *cells)
    return shown


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
    document = {
        "title": title,
        "settings": settings,
        "doubts": doubts,
        "notes": notes,
        "needs": needed,
        "runs": each,
    }
    encoded = msgspec.json.encode(document)
    return msgspec.json.format(encoded, indent=1).decode() + "\n"


def as_csv(each: Sequence[Row]) -> str:
    """A header line, and one line for each run."""
    text = StringIO()
    lines = csv.DictWriter(text, fieldnames=list(each[0]), lineterminator="\n")
    lines.writeheader()
    lines.writerows(each)
    return text.getvalue()
