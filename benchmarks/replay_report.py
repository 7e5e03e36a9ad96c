"""Draws the runs that `kvpin replay --json` wrote: as one HTML file, or as a PNG.

The HTML file has curves, table, and what the figures do not say, and needs no other file. Its scripts and
styles are those of the page at `/ui/`. Nothing else may run or load in it: its content-security-policy allows
them by their hashes. All text in it is escaped. The PNG needs matplotlib.

    kvpin replay TRACE --json runs.json
    python benchmarks/replay_report.py runs.json report.html
    python benchmarks/replay_report.py runs.json report.png
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from proxy.api.page import text_of
from proxy.replay.plan import Need, P99Target
from proxy.replay.report import COLUMNS, Row, cell, curves, on, over_seeds

_HEIGHT_IN = 4.5
_WIDTH_IN = 14.0
_GROUP = 0.85  # share of the room between two numbers of engines that bars take


def draw(path: Path, each: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - HTML needs none

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


_START = (
    "drawCurves(document.getElementById('curves'), JSON.parse(document.getElementById('data').textContent));"
)
# Columns with a bar behind the figure.
_BARS = ("hit_percent", "mean_ttft_s", "p99_ttft_s")
_environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)


def as_html(title: str, each: Sequence[Row], notes: Sequence[str]) -> str:
    """The file."""
    style = text_of("vendor/uplot.css") + text_of("style.css")
    uplot, script = text_of("vendor/uplot.js"), f"{text_of('plots.js')}\n{_START}"
    merged = over_seeds(each)
    most = {key: max((row[key] or 0.0 for row in merged), default=0.0) for key in _BARS}
    return _environment.get_template("replay_report.html").render(
        title=title,
        notes=notes,
        columns=COLUMNS,
        rows=merged,
        cell=cell,
        share=lambda row, key: round(100 * row[key] / most[key], 1) if row[key] and key in most else 0,
        bars=_BARS,
        curves=curves(each),
        style=style,
        uplot=uplot,
        script=script,
        licence=text_of("vendor/uplot.LICENSE"),
        policy=f"default-src 'none'; script-src {_hash(uplot)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'",
    )


def _hash(text: str) -> str:
    """A script or style, as a content-security-policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def needs_in(document: Mapping[str, Any]) -> list[str]:
    """A sentence about the engines that each policy needs, where they were searched for."""
    seeds = len({run["seed"] for run in document["runs"]})
    return [
        str(
            Need(
                need["policy"],
                P99Target(need["target_p99_s"], need["max_engines"], need["margin"]),
                need["engines"],
                need["p99_ttft_s"],
                need["p99_ttft_s_with_one_less"],
                need["engines_with_margin"],
                need["p99_ttft_s_with_margin"],
                seeds,
            )
        )
        for need in document["needs"]
    ]


def main() -> None:
    """Reads the runs and writes the picture."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    document = json.loads(source.read_text(encoding="utf-8"))
    if target.suffix == ".png":
        draw(target, document["runs"], document["title"])
        return
    notes = [*document["doubts"], *needs_in(document), *document["notes"]]
    target.write_text(as_html(document["title"], document["runs"], notes), encoding="utf-8")


if __name__ == "__main__":
    main()
