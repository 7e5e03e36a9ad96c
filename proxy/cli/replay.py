"""`kvpin replay`: the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.replay_options import ReplayOptions

_UNUSABLE = 2


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", help="Mooncake jsonl, or recordings that kvpins made at one time; also .gz."
        ),
    ],
    *,
    options: ReplayOptions,
) -> None:
    """Replay a trace on simulated engines.

    Compares placement policies, or finds how many engines the trace needs.
    Exit status 2: the trace or an option cannot be used.
    """
    from proxy.cli.replay_run import run  # noqa: PLC0415 - the other commands start quicker without
    from proxy.replay.trace import TraceError  # noqa: PLC0415 - likewise

    try:
        run(traces, options)
    except (ValueError, TraceError) as error:
        typer.echo(f"kvpin: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
