"""`kvpin` and its commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from proxy.cli import admin, bench, config, doctor, init, prompt_tables, replay, serve, top
from proxy.cli.help import App

app = App(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible reverse proxy that makes the KV caches of serving engines count.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - imports an e-mail parser

        typer.echo(f"kvpin {version('kvpin')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An OpenAI-compatible reverse proxy that makes the KV caches of serving engines count."""


serve.register(app)
admin.register(app)
prompt_tables.register(app)
doctor.register(app)
replay.register(app)
init.register(app)
config.register(app)
top.register(app)
bench.register(app)


def main() -> None:
    """The entry point of `kvpin`."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has ended, as in `kvpin stats | head`.
        sys.stderr.close()
        sys.exit(1)
