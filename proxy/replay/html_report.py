"""Writes runs as one HTML file that needs no other: the curves, the table, what the figures do not say.

Its scripts and styles are those of the page at `/ui/`, whose files the caller reads. Nothing else may run or
load in it: its content-security-policy allows them by their hashes. All text in it is escaped.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256

import msgspec
from jinja2 import Environment, PackageLoader

from proxy.replay.report import COLUMNS, Row, cell, curves, over_seeds

_START = (
    "drawCurves(document.getElementById('curves'), JSON.parse(document.getElementById('data').textContent));"
)
# Columns with a bar behind the figure.
_BARS = ("hit_percent", "mean_ttft_s", "p99_ttft_s")
_environment = Environment(loader=PackageLoader("proxy.replay", ""), autoescape=True, trim_blocks=True)


def as_html(title: str, each: Sequence[Row], notes: Sequence[str], read: Callable[[str], str]) -> str:
    """The file. `read` gives the text of a file of the page, by its name."""
    style = read("vendor/uplot.css") + read("style.css")
    uplot, script = read("vendor/uplot.js"), f"{read('plots.js')}\n{_START}"
    merged = over_seeds(each)
    most = {key: max((row[key] or 0.0 for row in merged), default=0.0) for key in _BARS}
    return _environment.get_template("report.html").render(
        title=title,
        notes=notes,
        columns=COLUMNS,
        rows=merged,
        cell=cell,
        share=lambda row, key: round(100 * row[key] / most[key], 1) if row[key] and key in most else 0,
        bars=_BARS,
        curves=msgspec.to_builtins(curves(each)),
        style=style,
        uplot=uplot,
        script=script,
        licence=read("vendor/uplot.LICENSE"),
        policy=f"default-src 'none'; script-src {_hash(uplot)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'",
    )


def _hash(text: str) -> str:
    """A script or style, as a content-security-policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
