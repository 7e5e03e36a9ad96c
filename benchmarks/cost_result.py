"""The figures of `router_cost.py`: tables in Markdown, goals that were missed, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from cost_routers import KVPIN, SUBJECTS
from cost_work import LOADS, Load

from proxy.replay.simulator import quantile_of

FIRST, NEXT = "first", "next"
MISSED = "✗"
# Panels of the picture that stand side by side.
PANELS = 4
# Goals for kvpin beside those of the loads.
MEMORY_GOAL_MB = 250
TAIL_LOAD, TAIL_GOAL = "small c64", 3  # p99 ÷ p50

_Cell = Callable[[Load, str, Sequence["Figure"]], tuple[str, bool]]


class Figure(msgspec.Struct, frozen=True):
    """One load through one router, once.

    Attributes:
        router, load: their names.
        turn: `first` for new chats, `next` for the next turns of known ones.
        requests: that were answered.
        cpu_us: of the router and its descendants, per request.
        p50_ms, p99_ms: of a request, first byte sent to last byte received.
        per_s: requests answered in a second.
        others_us: CPU of the load generator and of the engines, per request.
        others_busy: share of their core that they used.
    """

    router: str
    load: str
    turn: str
    requests: int
    cpu_us: float
    p50_ms: float
    p99_ms: float
    per_s: float
    others_us: float
    others_busy: float


class Memory(msgspec.Struct, frozen=True):
    """Resident memory of one router, once, in MB: ready but unused, and after all loads."""

    router: str
    start_mb: float
    after_mb: float


class Figures(msgspec.Struct, frozen=True):
    """Everything that was measured.

    Attributes:
        figures, memory: one for each repeat.
        not_measured: routers that could not be, and why.
        failures: loads with requests that failed: what and how many.
    """

    figures: list[Figure]
    memory: list[Memory]
    not_measured: dict[str, str]
    failures: list[str]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed; 0 for none."""
    return quantile_of(sorted(values), share) if values else 0.0


def quantile_of_counts(counts: Iterable[tuple[float, int]], share: float) -> float:
    """The same of a histogram: pairs of a value and how many had it."""
    ranked = sorted(counts)
    wanted = share * sum(count for _, count in ranked)
    seen = 0
    for value, count in ranked:
        seen += count
        if seen >= wanted:
            return value
    return 0.0


def markdown(found: Figures) -> str:
    """All tables; a missed goal is marked."""
    loads = [load for load in LOADS if any(figure.load == load.name for figure in found.figures)]
    parts = [
        "CPU of the router per request, µs, best of the repeats",
        _table(loads, found, _cpu, (_goal_row(loads, FIRST), _goal_row(loads, NEXT))),
        "Time of a request, ms, p50 / p99, medians of the repeats",
        _table(loads, found, _times),
        "Requests a second, best of the repeats",
        _table(loads, found, _rate),
        "Load generator and engines: CPU per request in µs, share of their core, most of the repeats",
        _table(loads, found, _others),
        "Resident memory, MB, most of the repeats",
        _memory_table(found),
    ]
    missed = sum(part.count(MISSED) for part in parts)
    parts.append(f"{MISSED} marks a missed goal of kvpin: {missed}.")
    parts += [f"Not measured: {SUBJECTS[router].title}: {why}." for router, why in found.not_measured.items()]
    parts += [f"Failed requests: {failure}." for failure in found.failures]
    return "\n\n".join(parts) + "\n"


def draw(found: Figures, path: Path) -> None:
    """Draws the CPU of each router: a panel for each load, the goal as a dashed line."""
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415 - it takes a second to import

    loads = [load for load in LOADS if any(figure.load == load.name for figure in found.figures)]
    rows = _rows(found)
    lines, columns = -(-len(loads) // PANELS), min(len(loads), PANELS)
    canvas = Canvas(figsize=(3.2 * columns + 2.5, (0.4 * len(rows) + 0.8) * lines), layout="constrained")
    panels = canvas.subplots(lines, columns, sharey=True, squeeze=False).flat
    for panel in panels[len(loads) :]:
        panel.remove()
    for panel, load in zip(panels, loads, strict=False):
        for at, (router, turn) in enumerate(rows):
            figures = _of(found, router, turn, load)
            if not figures:
                continue
            best = min(figure.cpu_us for figure in figures)
            bar = panel.barh(at, best, color="tab:blue" if router.startswith(KVPIN) else "tab:grey")
            panel.bar_label(bar, fmt="{:,.0f}", padding=2, fontsize=8)
            goal = _goal(load, turn)
            if goal is not None and SUBJECTS[router].has_goals:
                panel.plot([goal, goal], [at - 0.45, at + 0.45], "--", color="tab:red", linewidth=1.5)
        panel.set_title(load.name, fontsize=10)
        panel.margins(x=0.2)
    panels[0].set_yticks(range(len(rows)), [_title(*row) for row in rows])
    panels[0].invert_yaxis()
    canvas.supxlabel("CPU of the router per request, µs (dashed: goal)", fontsize=9)
    canvas.savefig(path, dpi=110)


def _rows(found: Figures) -> list[tuple[str, str]]:
    """Routers and turns, in the order of the routers."""
    measured = {(figure.router, figure.turn) for figure in found.figures}
    return [(router, turn) for router in SUBJECTS for turn in (FIRST, NEXT) if (router, turn) in measured]


def _title(router: str, turn: str) -> str:
    subject = SUBJECTS[router]
    if not subject.knows_chats:
        return subject.title
    return f"{subject.title}, {'new chats' if turn == FIRST else 'next turns'}"


def _goal(load: Load, turn: str) -> float | None:
    return load.goal_us if turn == FIRST or load.next_goal_us is None else load.next_goal_us


def _of(found: Figures, router: str, turn: str, load: Load) -> list[Figure]:
    wanted = (router, turn, load.name)
    return [figure for figure in found.figures if (figure.router, figure.turn, figure.load) == wanted]


def _table(loads: Sequence[Load], found: Figures, cell: _Cell, last: Sequence[str] = ()) -> str:
    """A row for each router and turn, a column for each load. `cell` also says whether a goal was missed."""
    lines = ["| | " + " | ".join(load.name for load in loads) + " |", "|---|" + "---:|" * len(loads)]
    for router, turn in _rows(found):
        cells = []
        for load in loads:
            figures = _of(found, router, turn, load)
            text, misses = cell(load, turn, figures) if figures else ("–", False)
            cells.append(f"{text} {MISSED}" if misses and SUBJECTS[router].has_goals else text)
        lines.append(f"| {_title(router, turn)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *last])


def _goal_row(loads: Sequence[Load], turn: str) -> str:
    goals = [_goal(load, turn) for load in loads]
    cells = ["–" if goal is None else f"≤ {goal:,.0f}" for goal in goals]
    return f"| goal, {'new chats' if turn == FIRST else 'next turns'} | " + " | ".join(cells) + " |"


def _cpu(load: Load, turn: str, figures: Sequence[Figure]) -> tuple[str, bool]:
    best, goal = min(figure.cpu_us for figure in figures), _goal(load, turn)
    return f"{best:,.0f}", goal is not None and best > goal


def _times(load: Load, _: str, figures: Sequence[Figure]) -> tuple[str, bool]:
    p50 = statistics.median(figure.p50_ms for figure in figures)
    p99 = statistics.median(figure.p99_ms for figure in figures)
    return f"{p50:.1f} / {p99:.1f}", load.name == TAIL_LOAD and p99 > TAIL_GOAL * p50


def _rate(_: Load, __: str, figures: Sequence[Figure]) -> tuple[str, bool]:
    return f"{max(figure.per_s for figure in figures):,.0f}", False


def _others(_: Load, __: str, figures: Sequence[Figure]) -> tuple[str, bool]:
    micros, busy = max(f.others_us for f in figures), max(f.others_busy for f in figures)
    return f"{micros:,.0f}, {busy:.0%}", False


def _memory_table(found: Figures) -> str:
    lines = ["| | ready | after all loads |", "|---|---:|---:|"]
    for router, subject in SUBJECTS.items():
        readings = [memory for memory in found.memory if memory.router == router]
        if readings:
            start, after = max(r.start_mb for r in readings), max(r.after_mb for r in readings)
            mark = f" {MISSED}" if subject.has_goals and after > MEMORY_GOAL_MB else ""
            lines.append(f"| {subject.title} | {start:,.0f} | {after:,.0f}{mark} |")
    return "\n".join([*lines, f"| goal | | ≤ {MEMORY_GOAL_MB} |"])
