"""`kvpin engine`: its options. torch is imported only once they are right."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from typer.exceptions import TyperException
from typer.main import get_command

from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.torch_engine.options import (
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_PORT,
    EngineOptions,
    ServeOptions,
    ServiceOptions,
)

_SIZES = EngineOptions()  # the defaults

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Serve the embedded engine.")


def _size(text: str) -> int:
    """Parses a size in bytes, with or without a unit."""
    try:
        return int(_read_size(text))
    except ValidationError:
        raise typer.BadParameter("give bytes, or a number with a unit such as 512MiB") from None


_read_size = TypeAdapter(ByteSize).validate_python


@app.command(epilog="\b\nExample:\n  kvpin engine --port 8001 --kv-blocks 2048")
def engine(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR_OR_ID", help="Directory or hub id. Default: a tiny model with random weights."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name that clients send.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to bind.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", help="0 takes a free one.", min=0, max=65535)
    ] = DEFAULT_PORT,
    kv_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="Blocks of the GPU tier. Default: by the free memory.")
    ] = None,
    kv_bytes: Annotated[
        int | None, typer.Option(metavar="SIZE", help="Size of the GPU tier, e.g. 2GiB.", parser=_size)
    ] = None,
    tokens_per_block: Annotated[
        int, typer.Option(metavar="N", help="A power of two.")
    ] = _SIZES.tokens_per_block,
    host_cache_bytes: Annotated[
        int, typer.Option(metavar="SIZE", help="Size of the host tier, e.g. 1GiB.", parser=_size)
    ] = _SIZES.host_cache_bytes,
    max_num_seqs: Annotated[
        int, typer.Option(metavar="N", help="Most requests running at once.")
    ] = _SIZES.max_num_seqs,
    prefill_chunk: Annotated[
        int,
        typer.Option(
            metavar="N", help="Most prompt tokens per step; half of it while other requests decode."
        ),
    ] = _SIZES.prefill_chunk,
    pin_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Most of the GPU tier that pins may hold, 0 to 1.")
    ] = _SIZES.pin_share,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="float32, bfloat16 or float16. Default: the model's own."),
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads of torch.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of sampling, to repeat a run.")] = None,
    max_body_bytes: Annotated[
        int, typer.Option(metavar="BYTES", help="Largest request body in bytes.", min=1)
    ] = DEFAULT_MAX_BODY_BYTES,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="Exit when standard input closes.")
    ] = False,
) -> None:
    """Serve the embedded engine."""
    given = locals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "transformers", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        options = _options(given)
        logging.getLogger("kvpin.engine").info("importing torch")
        from engine_adapter.torch_engine.process import serve_engine  # noqa: PLC0415 - imports torch

        serve_engine(options)
    except EngineSpecError as error:
        typer.echo(f"kvpin engine: {error}", err=True)
        raise typer.Exit(2) from error
    except EngineUnavailable as error:
        typer.echo(f"kvpin engine: {error}", err=True)
        raise typer.Exit(1) from error
    _end_now()


def check_words(words: Sequence[str]) -> None:
    """Raises EngineSpecError for options that `kvpin engine` does not take."""
    try:
        given = get_command(app).make_context("kvpin engine", list(words)).params
    except TyperException as error:
        raise EngineSpecError(error.format_message()) from error
    except typer.Exit as error:
        raise EngineSpecError("--help starts no engine") from error
    _options(given)


def _options(given: Mapping[str, Any]) -> ServeOptions:
    """The options, by the names of the parameters of `engine`. Raises EngineSpecError."""

    def of(kind: type[EngineOptions | ServiceOptions | ServeOptions]) -> dict[str, Any]:
        return {each.name: given[each.name] for each in fields(kind) if each.name in given}

    service = ServiceOptions(**of(ServiceOptions), engine=EngineOptions(**of(EngineOptions)))
    return ServeOptions(**of(ServeOptions), service=service)


def _end_now() -> None:
    """Ends the process. All is closed by now, and Python's own end takes torch 1 to 3 s."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
