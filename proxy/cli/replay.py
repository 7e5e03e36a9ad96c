"""`kvpin replay`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer

from proxy.cli.examples import example

if TYPE_CHECKING:
    from proxy.replay.capacity import Need
    from proxy.replay.plan import Plan
    from proxy.replay.report import Row
    from proxy.replay.simulator import Outcome, Run
    from proxy.replay.trace import Trace

_UNUSABLE = 2
_STDOUT = Path("-")
# Width of the table if the output is no terminal.
_FILE_WIDTH = 140


class _Outputs(NamedTuple):
    """The files that were asked for."""

    json: Path | None
    csv: Path | None
    plot: Path | None
    html: Path | None


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay", epilog=example("replay"))(replay)


def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake jsonl or kvpin's recording, plain or .gz.")],
    *,
    engines: Annotated[
        str | None, typer.Option(metavar="N[,N…]", help="How many engines [4].", show_default=False)
    ] = None,
    gpu_tokens: Annotated[
        str, typer.Option(metavar="N[,N…]", help="KV on the GPU of each engine: tokens or bytes.")
    ] = "500k",
    host_tokens: Annotated[str, typer.Option(help="KV on its host tier: tokens or bytes; 0: none.")] = "0",
    bytes_per_token: Annotated[
        str | None, typer.Option(help="KV bytes of a token, if sizes are in bytes: 128KiB.")
    ] = None,
    model: Annotated[str, typer.Option(help="fifo: prefill alone; chunked: with decode.")] = "fifo",
    prefill_rate: Annotated[str, typer.Option(help="Prompt tokens an engine computes per second.")] = "20k",
    restore_rate: Annotated[str, typer.Option(help="Tokens per second from its host tier.")] = "200k",
    context_tokens: Annotated[
        str, typer.Option(help="Context at which attention takes half the time; 0: prefill is linear.")
    ] = "0",
    chunk_tokens: Annotated[str, typer.Option(help="Tokens of a step with prefill.")] = "2048",
    decode_step_ms: Annotated[float, typer.Option(min=0, help="Time of a decode step.")] = 15.0,
    decode_stream_ms: Annotated[float, typer.Option(min=0, help="Time each stream adds to a step.")] = 0.3,
    load: Annotated[
        float | None,
        typer.Option(help="Scale arrivals to this utilisation, if nothing were cached: 0.9."),
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Arrivals this many times faster than recorded [1].")
    ] = None,
    target_p99: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Find how many engines keep this p99 TTFT, in place of --engines."
        ),
    ] = None,
    max_engines: Annotated[int, typer.Option(min=1, help="The most that --target-p99 tries.")] = 64,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="all, ablations, or some: kvpin,sglang,oracle [all; with --target-p99 kvpin].",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="N[,N…]", help="0: arrivals as recorded; others vary.")] = "0",
    limit: Annotated[int | None, typer.Option(min=1, help="Read only this many lines.")] = None,
    model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model of a recording of several.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes [one a CPU].")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every run as JSON; - prints.")
    ] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write every run as CSV; - prints.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw a PNG.")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write curves and table as one HTML file; - prints.")
    ] = None,
) -> None:
    """Replay a trace on simulated engines: compare placement policies, or find how many engines it needs.

    Exit status 2: the trace or an option cannot be used.
    """
    from proxy.replay import options  # noqa: PLC0415 - the other commands start quicker without
    from proxy.replay.trace import TraceError, read_trace  # noqa: PLC0415 - likewise

    try:
        models = options.engine_models(
            gpu_tokens=gpu_tokens,
            host_tokens=host_tokens,
            bytes_per_token=bytes_per_token,
            model=model,
            prefill_rate=prefill_rate,
            restore_rate=restore_rate,
            context_tokens=context_tokens,
            chunk_tokens=chunk_tokens,
            decode_step_ms=decode_step_ms,
            decode_stream_ms=decode_stream_ms,
        )
        plan = options.plan(
            models,
            engines=engines,
            policies=policies,
            seeds=seeds,
            load=load,
            speedup=speedup,
            target_p99=target_p99,
            max_engines=max_engines,
        )
        outputs = _Outputs(json_path, csv_path, plot_path, html_path)
        _check_outputs(outputs)
        read = read_trace(trace, limit=limit, model=model_name)
        needs, outcomes = _run_plan(plan, read, jobs or os.cpu_count() or 1)
        _write_all(plan, read, needs, outcomes, outputs)
    except (ValueError, TraceError) as error:
        _refuse(str(error))


def _run_plan(plan: Plan, trace: Trace, jobs: int) -> tuple[Sequence[Need], Sequence[Outcome]]:
    """The engines that policies need, if asked for, and the outcomes of all runs."""
    if plan.target is None:
        return (), _run(trace, plan.runs(trace), jobs)
    from proxy.replay.capacity import search  # noqa: PLC0415 - see above

    return search(plan, plan.target, trace, lambda runs: _run(trace, runs, jobs))


def _run(trace: Trace, runs: Sequence[Run], jobs: int) -> list[Outcome]:
    """All runs, with a progress bar on a terminal."""
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.progress import Progress  # noqa: PLC0415 - see above

    from proxy.replay.batch import run_all  # noqa: PLC0415 - see above

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(runs)} runs", total=len(runs) * len(trace.requests))
        return run_all(trace, runs, jobs=jobs, progress=lambda done: progress.advance(task, done))


def _write_all(
    plan: Plan,
    trace: Trace,
    needs: Sequence[Need],
    outcomes: Sequence[Outcome],
    outputs: _Outputs,
) -> None:
    """Writes the files that were asked for, and the table unless a file goes to the standard output."""
    from proxy.replay.doubts import doubts  # noqa: PLC0415 - see above
    from proxy.replay.plan import notes  # noqa: PLC0415 - see above
    from proxy.replay.report import as_csv, as_json, rows  # noqa: PLC0415 - see above

    each, title, why_not = rows(outcomes), plan.title(trace), doubts(trace, outcomes)
    noted = notes(trace, outcomes)
    said = [*map(str, needs), *why_not, *noted]
    if outputs.json is not None:
        _write(outputs.json, as_json(plan.settings(trace), each, why_not, needs, title=title, notes=noted))
    if outputs.csv is not None:
        _write(outputs.csv, as_csv(each))
    if outputs.html is not None:
        from proxy.api.page import text_of  # noqa: PLC0415 - see above
        from proxy.replay.html_report import as_html  # noqa: PLC0415 - see above

        _write(outputs.html, as_html(title, each, said, text_of))
    if outputs.plot is not None:
        from proxy.replay.plot import draw  # noqa: PLC0415 - an extra

        with _writing(outputs.plot):
            draw(outputs.plot, each, title)
    if _STDOUT not in outputs:
        with _writing(_STDOUT):
            _show(title, each, said)


def _show(title: str, each: Sequence[Row], notes: Sequence[str]) -> None:
    """Prints the table and the notes."""
    from rich.console import Console  # noqa: PLC0415 - see above

    from proxy.replay.report import table, width_of  # noqa: PLC0415 - see above

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(title, soft_wrap=True)
    shown = table(each, console.width)
    console.print(shown, width=max(console.width, width_of(shown)), crop=False)
    for note in notes:
        console.print(note, soft_wrap=True)


def _check_outputs(outputs: _Outputs) -> None:
    """Checks the output files before the work.

    Raises:
        ValueError: one of them cannot be written.
    """
    if outputs.plot == _STDOUT:
        raise ValueError("--plot -: a picture cannot be printed; name a file, such as runs.png")
    for path in outputs:
        if path is not None and path != _STDOUT:
            _try(path)
    if outputs.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'kvpin[replay]'")


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
    """Names the file in errors of writing.

    Raises:
        ValueError: the file cannot be written. A closed pipe is left to `main`.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "the standard output" if path == _STDOUT else str(path)
        raise ValueError(f"{name}: cannot be written: {error.strerror or error}") from error


def _refuse(why: str) -> NoReturn:
    typer.echo(f"kvpin: {why}", err=True)
    raise typer.Exit(_UNUSABLE)
