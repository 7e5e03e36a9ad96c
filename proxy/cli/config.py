"""`kvpin config`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.cli.help import App

if TYPE_CHECKING:
    from proxy.settings import Settings

_FAULTS = 2
config_app = App("Check settings.", "config", no_args_is_help=True)


@config_app.callback()
def config() -> None:
    """Check settings."""


@config_app.command("check")
def check(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings in a TOML file [the one that KVPIN_CONFIG names]."),
    ] = None,
) -> None:
    """Check the settings file and the environment.

    Every fault is one sentence. Nothing is started. Exit status 2: there are faults. Keys that open nothing
    are warned of, rules that change no prompt, and a port that anyone may use.
    """
    from proxy.server.checks import (  # noqa: PLC0415 - other commands start quicker
        OPEN_TO_ALL,
        is_open_to_all,
        warnings_of,
    )
    from proxy.settings import check_settings, settings_file  # noqa: PLC0415 - see above

    settings, faults = check_settings(config)
    if settings is not None:
        faults += _faults_of_this_machine(settings)
    for fault in faults:
        typer.echo(f"kvpin: {fault}", err=True)
    if settings is None or faults:
        raise typer.Exit(_FAULTS)
    for warning in [*warnings_of(settings), *([OPEN_TO_ALL] if is_open_to_all(settings) else [])]:
        typer.echo(f"kvpin: warning: {warning}", err=True)
    file = settings_file(config)
    typer.echo(f"{file if file is not None else 'environment'}: {_summary(settings)}")


def _faults_of_this_machine(settings: Settings) -> Iterator[str]:
    """A sentence for each engine and file that cannot be used here."""
    from proxy.server.checks import faults_here  # noqa: PLC0415 - see above
    from proxy.settings import SettingsError, read_engines  # noqa: PLC0415 - see above

    yield from faults_here(settings)
    try:
        if settings.engines_file is not None:
            read_engines(settings.engines_file)  # `kvpin serve` waits for a better one
    except SettingsError as error:
        yield str(error)


def _summary(settings: Settings) -> str:
    found = {
        "engines": len(settings.engines),
        "engines to start": len(settings.managed),
        "sources of engines": len(settings.discovery) + (settings.engines_file is not None),
        "API keys": len(settings.api_keys),
        "reuse": "on" if settings.reuse else "off",
    }
    return "no faults; " + ", ".join(f"{name}: {value}" for name, value in found.items())
