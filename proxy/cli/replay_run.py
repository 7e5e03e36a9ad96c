"""The work of `kvpin replay`: reads the trace, runs the plan, writes files and the table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import BinaryIO, cast

import typer

from proxy.cli.grid import TerminalTable, bars, console
from proxy.cli.replay import ReplayOptions
from proxy.replay.figures import check
from proxy.replay.plan import Need, doubts, notes, search
from proxy.replay.report import COLUMNS, Row, as_csv, as_json, cell, on, over_seeds, rows
from proxy.replay.simulator import ReplayRun, RunResult, run_all
from proxy.replay.trace import Trace, read_trace

_STDOUT = Path("-")
_PIECE_BYTES = 1 << 20


def run(traces: Sequence[Path], options: ReplayOptions) -> None:
    """Replays the trace, and writes what was asked for. Raises ValueError or TraceError."""
    options.plan()  # wrong options are told before a long trace is read
    for path in options.paths:
        if path != _STDOUT:
            _try(path)
    trace = _read(traces, options.limit, options.model_name)
    plan, run_these = options.plan(trace.figures), partial(_run, trace, options.jobs or os.cpu_count() or 1)
    needs, outcomes = list[Need](), list[RunResult]()
    if plan.target is None:
        outcomes = run_these(plan.runs(trace))
    else:
        needs, outcomes = search(plan, plan.target, trace, run_these)
    each, title, why_not = rows(outcomes), plan.title(trace), doubts(plan, trace, outcomes)
    noted = notes(plan, trace, outcomes)
    if (checked := check(trace, plan.models[0], run_these)) is not None:
        sentence, is_doubt = checked
        (why_not if is_doubt else noted).append(sentence)
    if options.json_path is not None:
        told = as_json(plan.settings(trace), each, why_not, needs, title=title, notes=noted)
        _write(options.json_path, told)
    if options.csv_path is not None:
        _write(options.csv_path, as_csv(each))
    if _STDOUT not in options.paths:
        with _writing(_STDOUT):
            _show(title, why_not, each, [*map(str, needs), *noted])


def _read(paths: Sequence[Path], limit: int | None, model: str | None) -> Trace:
    """Reads the trace, with a progress bar on a terminal; raises TraceError."""
    with bars() as progress:

        def opened(path: Path) -> BinaryIO:
            raw = progress.open(path, "rb", buffering=0, description=f"reading {path.name}")
            # In pieces: a step of the bar takes as long as a line.
            return BufferedReader(cast("RawIOBase", raw), _PIECE_BYTES)

        return read_trace(*paths, limit=limit, model=model, opened=opened)


def _run(trace: Trace, jobs: int, runs: Sequence[ReplayRun]) -> list[RunResult]:
    """All runs, with a progress bar on a terminal."""
    with bars() as progress:
        task = progress.add_task(f"{len(runs)} runs", total=len(runs) * len(trace.requests))
        return run_all(trace, runs, jobs=jobs, progress=lambda done: progress.advance(task, done))


def _show(title: str, doubts: Sequence[str], each: Sequence[Row], notes: Sequence[str]) -> None:
    """Prints the doubts, the table and the notes."""
    out = console()
    for line in (title, *doubts):
        out.print(line, soft_wrap=True, markup=False)
    table_of(each).print(out)
    for note in notes:
        out.print(note, soft_wrap=True, markup=False)


def table_of(each: Sequence[Row]) -> TerminalTable:
    """A line for each policy, number of engines and size, the best times first."""
    figures = [heading for _, heading, _ in COLUMNS]
    sizes = ["GPU tokens"] if len({row["gpu_tokens"] for row in each}) > 1 else []
    table = TerminalTable(
        ("engines", *sizes, "policy", *figures),
        less=("busiest ÷ mean", "evicted", "exact %", "p50"),
        numbers=("engines", *sizes, *figures),
        lined=True,
        whole="--csv -",
    )
    before = None
    for row in over_seeds(each):
        if before not in (None, on(row)):
            table.end_section()
        before = on(row)
        size = [f"{row['gpu_tokens']:,}"] * len(sizes)
        table.add(
            row["engines"], *size, row["policy"], *(cell(row, key, digits) for key, _, digits in COLUMNS)
        )
    return table


def _try(path: Path) -> None:
    """Opens a file for writing and leaves it unchanged."""
    with _writing(path):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: cannot be written: there is no folder {path.parent}")
        is_new = not path.exists()
        # Without O_NONBLOCK, opening a pipe would wait for a reader.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666))
        if is_new:
            path.resolve().unlink()


def _write(path: Path, text: str) -> None:
    with _writing(path):
        if path == _STDOUT:
            typer.echo(text, nl=False)
        else:
            path.write_text(text, encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Names the file in errors of writing. Raises ValueError if the file cannot be written. A closed pipe is
    left to `main`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "the standard output" if path == _STDOUT else str(path)
        raise ValueError(f"{name}: cannot be written: {error.strerror or error}") from error
