"""Draws the pictures of docs/pictures/: how kvpin works, and what was measured.

    .venv/bin/python scripts/make_pictures.py

Figures are those of the pages' tables. Colours are those of the page at /ui/, light or dark as the reader's
system.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from scripts.reference.gate import STEPS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
_STYLE = ROOT / "proxy" / "api" / "static" / "style.css"
_WIDTH = 760  # of every picture, in pixels
_SMALL, _TEXT, _LARGE = 10.5, 12, 13
# Widths were measured with the first; the second is as wide, on systems that lack the first.
_FONTS = "'DejaVu Sans', Verdana, sans-serif"
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvpin",  # ids are the same in every run
    "font.family": ["DejaVu Sans"],
    "font.size": _TEXT,
}


class Colour(NamedTuple):
    """A colour of the page, in the light and in the dark."""

    light: str
    dark: str


def colours() -> dict[str, Colour]:
    """The page's colours by name."""
    light, dark = (
        dict(re.findall(r"--([a-z0-9-]+): (#\w+);", part))
        for part in _STYLE.read_text(encoding="utf-8").split("@media (prefers-color-scheme: dark)", 1)
    )
    return {name: Colour(_six_digits(light[name]), _six_digits(dark[name])) for name in light}


def _six_digits(colour: str) -> str:
    return "#" + "".join(2 * digit for digit in colour[1:]) if len(colour) == 4 else colour  # noqa: PLR2004


_USED = {
    name: colours()[name] for name in ("card", "text", "quiet", "line", "accent", "host", "disk", "prompt")
}
CARD, INK, QUIET, LINE, BLUE, PURPLE, AMBER, GREY = (colour.light for colour in _USED.values())


# --- how kvpin works -------------------------------------------------------------------------------


def request() -> Figure:
    """The path of a request: client, kvpin, three engines with what they hold of its prompt."""
    figure, axes = _canvas(336)
    _box(axes, 16, 138, 104, 60, "client", "base_url → kvpin")
    _box(axes, 196, 16, 300, 304)
    _say(axes, 346, 40, "kvpin", size=_LARGE, weight="bold", ha="center")
    steps = (
        "tokenise the prompt as the engine does",
        "look up who holds its blocks, and where",
        "add up seconds on each engine:\nqueue + restore + prefill + evictions",
        "forward where the sum is lowest",
        "follow KV events, check reports",
    )
    for number, (y, step) in enumerate(zip((84, 126, 174, 222, 284), steps, strict=True), 1):
        axes.text(
            216, y, str(number), color=CARD, size=_SMALL, weight="bold", ha="center", va="center_baseline",
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": BLUE, "linewidth": 0},
        )  # fmt: skip
        _say(axes, 234, y, step, size=_SMALL)
    _arrow(axes, (120, 156), (196, 156))
    _arrow(axes, (196, 182), (120, 182))
    _say(axes, 158, 146, "request", size=_SMALL, ha="center")
    _say(axes, 158, 196, "stream", size=_SMALL, ha="center")
    _say(axes, 16, 228, "its prompt, in blocks", QUIET, size=_SMALL)
    _blocks(axes, 16, 238, [BLUE] * 6)
    # Blocks of the prompt on the GPU, in host memory, on disk: each tier holds what follows.
    engines = (
        ("engine 1", "0.3 s", (4, 1, 0)),
        ("engine 2", "0.6 s", (2, 0, 2)),
        ("engine 3", "0.9 s", (0, 0, 0)),
    )
    for at, (name, seconds, held) in enumerate(engines):
        y, is_chosen, first = 16 + 104 * at, at == 0, 0
        _box(axes, 568, y, 176, 96, edge=BLUE if is_chosen else LINE)
        _say(axes, 580, y + 17, name, weight="bold")
        _say(axes, 732, y + 17, seconds, BLUE if is_chosen else QUIET, weight="bold", ha="right")
        tiers = zip(("GPU", "host", "disk"), (BLUE, PURPLE, AMBER), held, strict=True)
        for row, (tier, colour, blocks) in enumerate(tiers):
            _say(axes, 580, y + 41 + 19 * row, tier, QUIET, size=_SMALL)
            there = range(first, first + blocks)
            _blocks(axes, 622, y + 34 + 19 * row, [colour if each in there else None for each in range(6)])
            first += blocks
        axes.plot([532, 568], [y + 66, y + 66], "--", color=QUIET, linewidth=1.2)
    _arrow(axes, (496, 46), (568, 46), BLUE, width=2.2)
    axes.plot([532, 532], [82, 290], "--", color=QUIET, linewidth=1.2)
    _arrow(axes, (532, 284), (496, 284), QUIET)
    return figure


def life() -> Figure:
    """A request's life: its states, from the gate to the end."""
    figure, axes = _canvas(292)
    states = ("Arrived", "Admitted", "In turn", "Leased", "Answering")
    notes = ("head", "quota, memory", "its engine is free", "load counts", "bytes pass")
    left = [16 + 150 * at for at in range(len(states))]
    for x, state, note in zip(left, states, notes, strict=True):
        _box(axes, x, 96, 126, 60, state, note, fill=BLUE if state == "In turn" else None)
    for x, says in zip(left[1:], ("gate", "queue", "", "first byte"), strict=True):
        _arrow(axes, (x - 24, 126), (x, 126))
        _say(axes, x - 12, 84, says, QUIET, size=9, ha="center")
    for x in (left[3] + 63, left[4] + 63):
        axes.plot((x, x), (96, 42), color=AMBER, linewidth=1.3)
    axes.plot((left[1] + 63, left[4] + 63), (42, 42), color=AMBER, linewidth=1.3)
    _arrow(axes, (left[1] + 63, 42), (left[1] + 63, 96), AMBER)
    _say(axes, left[2] + 63, 28, "this engine failed, another may still answer", AMBER, size=9.5, ha="center")
    for x in left:
        _arrow(axes, (x + 63, 156), (x + 63, 222))
    _box(axes, 16, 222, 726, 48, "Ended(cause)", "once; everything it held is given back")
    _say(axes, left[0] + 70, 190, "quota, memory,\nslow body", QUIET, size=9)
    _say(axes, left[1] + 70, 190, "wrong, queue full,\nno engine", QUIET, size=9)
    _say(axes, left[3] + 70, 190, "retries used up,\ntoo late", QUIET, size=9)
    _say(axes, left[4] + 70, 190, "answered,\nbroken off", QUIET, size=9)
    return figure


def gate() -> Figure:
    """The gate: its steps, what each needs, and what refuses there."""
    figure, axes = _canvas(236)
    notes = {
        "connection": ("a socket", "closed, 503"),
        "head": ("64 KiB", "431"),
        "key": ("a digest", "401"),
        "quota": ("tenant, length", "429, 503"),
        "size": ("bytes come", "413, 408"),
        "shape": ("bytes, counted", "400, 413"),
        "model": ("one field", "404"),
        "length": ("text, tokens", "400"),
        "structure": ("the engine", "400"),
        "queue": ("a free engine", "503"),
    }
    per_row = len(STEPS) // 2
    for at, step in enumerate(STEPS):
        x, y = 16 + 150 * (at % per_row), 16 + 112 * (at // per_row)
        needs, refuses = notes[step]
        _box(axes, x, y, 126, 56, step, needs, fill=BLUE if step == "quota" else None)
        _say(axes, x + 63, y + 72, refuses, AMBER, size=9, ha="center")
        if at % per_row:
            _arrow(axes, (x - 24, y + 28), (x, y + 28))
    axes.plot((742, 752, 752, 8, 8), (44, 44, 106, 106, 156), color=QUIET, linewidth=1.3)
    _arrow(axes, (8, 156), (16, 156))
    _say(axes, 16, 222, "the body: read after quota, decoded after shape", QUIET, size=9)
    return figure


def sharing() -> Figure:
    """Prompts as chains of blocks: which blocks of the first one others share."""
    figure, axes = _canvas(262)
    first = ("system", "image A", "document", "document", "question 1")
    rows = (
        ("a first request", "", first, 5, ""),
        ("another question", "differs at the end", (*first[:4], "question 2"), 4, "4 blocks shared"),
        ("another image", "same token ids", ("system", "image B", *first[2:]), 1, "1 block shared"),
        ("a date in front", "same words after it", ("date, system", *first[1:]), 0, "nothing shared"),
    )
    for at in range(5):
        _say(axes, 188 + 93 * at, 16, f"block {at + 1}", QUIET, size=_SMALL, ha="center")
    for row, (title, note, blocks, shared, verdict) in enumerate(rows):
        y = 48 + 58 * row
        _say(axes, 12, y - (8 if note else 0), title, weight="bold")
        _say(axes, 12, y + 9, note, QUIET, size=_SMALL)
        for at, block in enumerate(blocks):
            x, is_shared = 148 + 93 * at, at < shared
            _box(axes, x, y - 20, 80, 40, fill=BLUE if is_shared else None, edge=BLUE if is_shared else GREY)
            extra = {"image A": "extra id 1", "image B": "extra id 2"}.get(block)
            _say(axes, x + 40, y - (7 if extra else 0), block, size=_SMALL, ha="center")
            _say(axes, x + 40, y + 9, extra or "", QUIET, size=9, ha="center")
            if at:
                _arrow(axes, (x - 13, y), (x, y), BLUE if is_shared else GREY)
        _say(axes, 612, y, verdict, BLUE if shared else QUIET, weight="bold")
    return figure


def weighing() -> Figure:
    """The burst of docs/placement.md: for each request, the cost on both engines, and which was chosen."""
    rows = list(table(DOCS / "placement.md", "## A burst, decision by decision"))
    (_, _, there, _, here, _), decisions = rows[0], rows[1:]
    names = [re.search(r"cost on ([\w-]+)", title)[1] for title in (there, here)]
    figure = _plot(284)
    axes = _plain(figure.subplots())
    places, labels = [], []
    for at, (request_name, chosen, *costs) in enumerate(decisions):
        for engine, name in enumerate(names):
            queue, prefill = _numbers(costs[2 * engine])
            (total,) = _numbers(costs[2 * engine + 1])
            place = 2.6 * at + engine
            left = 0.0
            for part, colour in ((queue, AMBER), (prefill, BLUE), (total - queue - prefill, GREY)):
                axes.barh(place, part, 0.8, left, color=colour)
                left += part
            is_chosen = name in chosen
            said = f"{total:,.0f} ms" + ("  ◀ lowest, chosen" if is_chosen else "")
            axes.text(
                total + 25, place, said, color=INK if is_chosen else QUIET, va="center",
                size=_SMALL, weight="bold" if is_chosen else "normal",
            )  # fmt: skip
            places.append(place)
            labels.append(f"{'request ' if request_name.isdigit() else ''}{request_name} on {name}")
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 3500)
    axes.set_xticks([])
    _legend(figure, {"queue": AMBER, "prefill": BLUE, "what others pay": GREY})
    return figure


# --- what was measured -----------------------------------------------------------------------------


def first_token() -> Figure:
    """Time to the first token, cold and with KV that was kept, in three benchmarks."""
    page = DOCS / "benchmarks" / "reuse.md"
    document = dict(zip(*list(table(page, "benchmarks/ttft.py`"))[:2], strict=True))
    panels = (
        ("a document of 2,440 tokens", [(name, document[name]) for name in list(document)[1:4]]),
        ("a llama-server's slot, 2,036 tokens", _pairs(page, "benchmarks/slot_restore.py`")),
        ("blocks offloaded to host memory", _pairs(page, "benchmarks/offload.py`")),
    )
    shorter = {
        "in the slot that still holds it": "still in its slot",
        "restored after the slots went to others": "restored from a file",
        "restored on the other server": "… on another server",
        "restored after kvpin and both servers were started again": "… after a restart",
        "offloaded, restored by the admin API": "restored by an operator",
        "offloaded, restored by the engine when the prompt came": "restored on demand",
    }
    figure = _plot(350)
    rows = figure.subplots(3, 1, sharex=True, height_ratios=[len(pairs) for _, pairs in panels])
    for axes, (title, pairs) in zip(rows, panels, strict=True):
        names = [shorter.get(name, name) for name, _ in pairs]
        filled = [GREY] + [BLUE] * (len(pairs) - 1)
        _bars(axes, names, [_numbers(ms)[0] for _, ms in pairs], "{:,.0f} ms", filled)
        axes.set_title(title, size=_TEXT, color=INK, loc="left", weight="bold")
        axes.margins(x=0.14)
    return figure


def beside_others() -> Figure:
    """Mean and p99 time to first token, and hits, of kvpin and sglang-router under three loads."""
    _, *rows = table(DOCS / "benchmarks" / "routing.md", "### Beside sglang-router")
    by_name = {name: cells for name, *cells in rows}
    panels = {
        "mean time to first token, ms": [_numbers(cell)[0] for cell in by_name["mean"]],
        "p99, ms": [_numbers(cell)[1] for cell in by_name["mean"]],
        "hits, %": [_numbers(cell)[0] for cell in by_name["hits"]],
    }
    loads = ("(a) chats and documents", "(b) the same, less memory", "(c) one system prompt")
    figure = _plot(290)
    grid = figure.subplots(3, 3, sharey=True)
    for lines, (measure, figures) in zip(grid, panels.items(), strict=True):
        for at, (axes, load) in enumerate(zip(lines, loads, strict=True)):
            both = figures[2 * at : 2 * at + 2]
            _bars(axes, ("kvpin", "sglang-router"), both, "{:,g}", [BLUE, GREY])
            axes.set_xlim(right=1.3 * max(both))
            title = f"{load}\n{measure}" if measure.startswith("mean") else measure
            axes.set_title(title, size=_SMALL, color=INK, loc="left")
    return figure


def cost() -> Figure:
    """CPU of each router for a request: whole answers to short and long chats, and streams."""
    titles, *rows = table(DOCS / "benchmarks" / "cost.md", "CPU of the router per request in µs")
    rows = [row for row in rows if not row[0].startswith("goal")]
    panels = {
        "small c16": "100 tokens, 16 at a time",
        "long c16": "8,000 tokens, 16 at a time",
        "SSE 64": "a stream of 64 chunks",
    }
    figure = _plot(290)
    for axes, (load, title) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        at = titles.index(load)
        figures = [_numbers(row[at])[0] if re.search(r"\d", row[at]) else 0 for row in rows]
        names = [row[0] for row in rows]
        filled = [BLUE if name.startswith("kvpin") else GREY for name in names]
        _bars(axes, names, figures, "{:,.0f}", filled)
        axes.set_title(title, size=_SMALL, color=INK, loc="left")
        axes.set_xlim(right=1.3 * max(figures))
    figure.supxlabel("µs of CPU for each request", size=_SMALL, color=QUIET)
    return figure


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "request.svg": request,
    "life.svg": life,
    "gate.svg": gate,
    "sharing.svg": sharing,
    "weighing.svg": weighing,
    "first-token.svg": first_token,
    "beside-others.svg": beside_others,
    "cost.svg": cost,
}


# --- tables of pages -------------------------------------------------------------------------------


def table(page: Path, after: str) -> Iterator[list[str]]:
    """The rows of the first table after a text of a page, its titles first. Raises ValueError without one."""
    _, found, text = page.read_text(encoding="utf-8").partition(after)
    match = re.search(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)
    if not found or match is None:
        raise ValueError(f"{page.name} has no table after {after!r}")
    for line in match[0].splitlines():
        if not re.fullmatch(r"[|:\- ]+", line):
            yield [cell.strip().replace("**", "").replace("`", "") for cell in line.strip("|").split("|")]


def _pairs(page: Path, after: str) -> list[tuple[str, str]]:
    """The first two cells of each row."""
    _, *rows = table(page, after)
    return [(row[0], row[1]) for row in rows]


def _numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


# --- drawing ---------------------------------------------------------------------------------------


def _canvas(height: int) -> tuple[Figure, Axes]:
    """Room to draw on, in pixels from the upper left."""
    figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72, facecolor=CARD)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def _plot(height: int) -> Figure:
    """Room for axes that matplotlib lays out."""
    layout = ConstrainedLayoutEngine(w_pad=12 / 72, h_pad=8 / 72)
    return Figure(figsize=(_WIDTH / 72, height / 72), dpi=72, facecolor=CARD, layout=layout)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str = "", note: str = "",
    *, fill: str | None = None, edge: str = LINE,
) -> None:  # fmt: skip
    """A box, with a title and a smaller note in its middle."""
    shape = {"boxstyle": "round,pad=0,rounding_size=5", "linewidth": 1.5}
    if fill is not None:
        axes.add_patch(
            FancyBboxPatch((x, y), width, height, facecolor=fill, edgecolor="none", alpha=0.18, **shape)
        )
    axes.add_patch(FancyBboxPatch((x, y), width, height, facecolor="none", edgecolor=edge, **shape))
    middle = y + height / 2
    _say(axes, x + width / 2, middle - (10 if note else 0), title, weight="bold", ha="center")
    _say(axes, x + width / 2, middle + 9, note, QUIET, size=9, ha="center")


def _blocks(axes: Axes, x: float, y: float, held: Sequence[str | None]) -> None:
    """Small squares in a row: filled with a colour, or empty."""
    for at, colour in enumerate(held):
        axes.add_patch(
            FancyBboxPatch(
                (x + 18 * at, y), 14, 14, boxstyle="round,pad=0,rounding_size=2", linewidth=1,
                facecolor=colour or "none", edgecolor=colour or LINE,
            )
        )  # fmt: skip


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = QUIET, width: float = 1.3
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            color=colour,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
        )
    )


def _say(
    axes: Axes, x: float, y: float, text: str, colour: str = INK,
    *, size: float = _TEXT, weight: str = "normal", ha: str = "left",
) -> None:  # fmt: skip
    if text:
        axes.text(x, y, text, color=colour, size=size, weight=weight, ha=ha, va="center", linespacing=1.4)


def _plain(axes: Axes) -> Axes:
    """Axes without a frame."""
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=_SMALL, labelcolor=INK)
    return axes


def _bars(
    axes: Axes, names: Sequence[str], figures: Sequence[float], shown: str, filled: Sequence[str]
) -> None:
    """A bar for each figure, which stands beside it; those of 0 were not measured."""
    bars = _plain(axes).barh(range(len(names)), figures, 0.72, color=filled)
    labels = [shown.format(number) if number else "–" for number in figures]
    axes.bar_label(bars, labels, padding=4, size=_SMALL, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks([])
    axes.set_ylim(len(names) - 0.5, -0.5)


def _legend(figure: Figure, names: dict[str, str]) -> None:
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in names.items()],
        loc="outside upper left", ncols=len(names), frameon=False, fontsize=_SMALL, labelcolor=INK,
    )  # fmt: skip


def svg(draw: Callable[[], Figure]) -> str:
    """One picture. A reader's system that is dark gets dark colours."""
    file = io.StringIO()
    with mpl.rc_context(_SETTINGS):
        draw().savefig(
            file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = re.sub(r"(width|height)=\"([\d.]+)pt\"", r'\1="\2"', file.getvalue(), count=2)
    text = text.replace("'DejaVu Sans'", _FONTS)
    dark = "".join(
        f'[style*="{kind}: {colour.light}"]{{{kind}:{colour.dark}!important}}'
        for colour in _USED.values()
        for kind in ("fill", "stroke")
    )
    text = text.replace("</style>", f"@media (prefers-color-scheme:dark){{{dark}}}</style>", 1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    """Writes all of them."""
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PICTURES / name).write_text(svg(draw), encoding="utf-8")


if __name__ == "__main__":
    main()
