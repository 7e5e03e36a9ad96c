"""`kvpin engine`: its options. torch is imported only once they are right."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.torch_engine.options import EmbeddedOptions

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Serve the embedded engine.")


def engine(**given: Any) -> None:  # noqa: ANN401 - the fields of `EmbeddedOptions`
    """Serve the embedded engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "transformers", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        options = EmbeddedOptions(**given)
        logging.getLogger("kvpin.engine").info("importing torch")
        from engine_adapter.torch_engine.process import serve_engine  # noqa: PLC0415 - imports torch

        serve_engine(options)
    except EngineSpecError as error:
        typer.echo(f"kvpin engine: {error}", err=True)
        raise typer.Exit(2) from error
    except EngineUnavailable as error:
        typer.echo(f"kvpin engine: {error}", err=True)
        _end_now(1)
    _end_now(0)


_hints = get_type_hints(EmbeddedOptions, include_extras=True)
engine.__annotations__ = _hints
engine.__signature__ = Signature(  # type: ignore[attr-defined]  # typer reads the options from it
    [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=_hints[each.name])
        for each in fields(EmbeddedOptions)
    ]
)
app.command(epilog="\b\nExample:\n  kvpin engine --port 8001 --kv-blocks 2048")(engine)


def check_words(words: Sequence[str]) -> None:
    """Raises EngineSpecError for options that `kvpin engine` does not take."""
    try:
        given = get_command(app).make_context("kvpin engine", list(words)).params
    except TyperException as error:
        raise EngineSpecError(error.format_message()) from error
    except typer.Exit as error:
        raise EngineSpecError("--help starts no engine") from error
    EmbeddedOptions(**given)


def _end_now(status: int) -> None:
    """Ends the process. All is closed by now, and Python's own end takes torch 1 to 3 s. After an error of
    the device, it aborts: torch cannot free the host tier's pinned memory."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
