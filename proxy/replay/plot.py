"""Draws runs: token hits and times to first token, by number of engines, their size and policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from proxy.replay.report import on, over_seeds

_HEIGHT_IN = 4.5
_WIDTH_IN = 14.0
_GROUP = 0.85  # share of the room between two numbers of engines that bars take


def draw(path: Path, each: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes a PNG. Needs matplotlib, from `kvpin[replay]`."""
    merged = over_seeds(each)
    groups = sorted({on(row) for row in merged})
    has_sizes = len({gpu_tokens for _, gpu_tokens in groups}) > 1
    policies = list(dict.fromkeys(row["policy"] for row in each))
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    figure.suptitle(title)
    hits, times = figure.subplots(1, 2)
    by_key = {(on(row), row["policy"]): row for row in merged}
    for at, policy in enumerate(policies):
        own = [by_key[group, policy] for group in groups]
        width = _GROUP / len(policies)
        places = [place + (at - (len(policies) - 1) / 2) * width for place in range(len(groups))]
        hits.bar(places, [row["hit_percent"] for row in own], width, label=policy)
        seconds = [row["mean_ttft_s"] or 0.0 for row in own]
        above = [max((row["p99_ttft_s"] or 0.0) - low, 0.0) for row, low in zip(own, seconds, strict=True)]
        times.bar(places, seconds, width)
        times.errorbar(places, seconds, yerr=[[0.0] * len(own), above], fmt="none", ecolor="0.6", capsize=2)
    for axes, label in ((hits, "token hits, %"), (times, "time to first token, s: mean, and up to p99")):
        axes.set_xticks(
            range(len(groups)), [f"{count}\n{size:,}" if has_sizes else str(count) for count, size in groups]
        )
        axes.set_xlabel("engines, and GPU tokens of each" if has_sizes else "engines")
        axes.set_title(label)
    if any(row["mean_ttft_s"] for row in merged):
        times.set_yscale("log")
    figure.legend(loc="outside right center")
    figure.savefig(path, format="png")
