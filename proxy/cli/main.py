"""`kvpin` and its commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from proxy.cli import admin, advise, bench, config, doctor, init, replay, serve, top
from proxy.cli.help import App

_WHAT = "An OpenAI-compatible reverse proxy that makes the KV caches of serving engines count."
app = App(_WHAT, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - imports an e-mail parser

        typer.echo(f"kvpin {version('kvpin')}")
        raise typer.Exit


@app.callback(help=_WHAT)
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An OpenAI-compatible reverse proxy that makes the KV caches of serving engines count."""


app.command()(serve.serve)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(serve.engine)
for _function in (
    admin.stats,
    admin.flush,
    admin.offload,
    admin.restore,
    admin.warm,
    admin.pin,
    admin.route,
    admin.unpin,
    admin.requests,
    admin.usage,
    doctor.doctor,
    replay.replay,
    advise.advise,
    init.init,
    top.top,
    bench.bench,
):
    app.command()(_function)
for _group in (admin.engines_app, admin.tables_app, admin.keys_app, config.config_app):
    app.add_typer(_group)


def main() -> None:
    """The entry point of `kvpin`."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output has ended, as in `kvpin stats | head`.
        sys.stderr.close()
        sys.exit(1)
