"""`kvpin engine`: its options and its command. torch is imported only once the options are right."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from typer import BadParameter, Option
from typer.exceptions import TyperException
from typer.main import get_command

from engine_adapter.errors import EngineSpecError, EngineUnavailable

DEFAULT_KV_BLOCKS = 1024
DEFAULT_MAX_BODY_BYTES = 64 * 2**20
KEY_VARIABLE = "KVPIN_ENGINE_KEY"
"""The environment variable that gives the engine its key. Other users could read a command line."""
MEMORY_SHARE = 0.25
"""The KV cache's share of the free memory. The rest is for other engines and programs."""

_read_size = TypeAdapter(ByteSize).validate_python


def _size(text: str) -> int:
    try:
        return int(_read_size(text))
    except ValidationError:
        raise BadParameter("give bytes, or a number with a unit such as 512MiB") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """The options, with what the command line says of each. EngineSpecError names a value out of range."""

    model: Annotated[
        str | None,
        Option(metavar="DIR_OR_ID", help="Directory or hub id. Default: a tiny model with random weights."),
    ] = None
    served_model_name: Annotated[str | None, Option(metavar="NAME", help="Model name that clients send.")] = (
        None
    )
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Option(metavar="PORT", help="0 takes a free one.", min=0, max=65535)] = 8100
    kv_blocks: Annotated[
        int | None, Option(metavar="N", help="Blocks of the GPU tier. Default: by the free memory.")
    ] = None
    kv_bytes: Annotated[
        int | None, Option(metavar="SIZE", help="Size of the GPU tier, e.g. 2GiB.", parser=_size)
    ] = None
    tokens_per_block: Annotated[int, Option(metavar="N", help="A power of two.")] = 16
    host_cache_bytes: Annotated[
        int, Option(metavar="SIZE", help="Size of the host tier, e.g. 1GiB.", parser=_size)
    ] = 0
    max_num_seqs: Annotated[int, Option(metavar="N", help="Most requests running at once.")] = 32
    prefill_chunk: Annotated[
        int, Option(metavar="N", help="Most prompt tokens per step; half of it while other requests decode.")
    ] = 256
    pin_share: Annotated[
        float, Option(metavar="SHARE", help="Most of the GPU tier that pins may hold, 0 to 1.")
    ] = 0.8
    device: Annotated[str, Option(metavar="DEVICE", help="cpu or cuda.")] = "cpu"
    dtype: Annotated[
        str | None, Option(metavar="TYPE", help="float32, bfloat16 or float16. Default: the model's own.")
    ] = None
    threads: Annotated[int | None, Option(metavar="N", help="CPU threads of torch.", min=1)] = None
    seed: Annotated[int | None, Option(metavar="N", help="Seed of sampling, to repeat a run.")] = None
    max_body_bytes: Annotated[int, Option(metavar="BYTES", help="Largest request body in bytes.", min=1)] = (
        DEFAULT_MAX_BODY_BYTES
    )
    exit_with_parent: Annotated[
        bool, Option("--exit-with-parent", help="Exit when standard input closes.")
    ] = False

    def __post_init__(self) -> None:
        size = self.tokens_per_block
        if size < 1 or size & (size - 1):
            raise EngineSpecError(f"tokens_per_block is {size}; a power of two is needed")
        if self.kv_blocks is not None and self.kv_bytes is not None:
            raise EngineSpecError("kv_blocks and kv_bytes both set the size of the cache: give one of them")
        for name in ("kv_blocks", "kv_bytes", "max_num_seqs", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineSpecError(f"{name} is {value}; at least 1 is needed")
        if not 0 <= self.pin_share <= 1:
            raise EngineSpecError(f"pin_share is {self.pin_share}; a share from 0 to 1 is needed")
        if self.host_cache_bytes < 0:
            raise EngineSpecError(f"host_cache_bytes is {self.host_cache_bytes}; 0 or more is needed")

    def gpu_blocks(self, block_bytes: int, *, context: int, available: int | None) -> int:
        """Blocks of the GPU tier. Without `kv_blocks` and `kv_bytes`: as many as `max_num_seqs` requests of
        `context` tokens need, in at most `MEMORY_SHARE` of the `available` bytes. `DEFAULT_KV_BLOCKS` if
        those are unknown. Raises EngineSpecError without room for one block."""
        if self.kv_blocks is not None:
            return self.kv_blocks
        if self.kv_bytes is not None:
            return _blocks_in(self.kv_bytes, block_bytes, "kv_bytes is")
        if available is None:
            return DEFAULT_KV_BLOCKS
        needed = self.max_num_seqs * -(-context // self.tokens_per_block)
        room = int(available * MEMORY_SHARE)
        return min(needed, _blocks_in(room, block_bytes, f"{MEMORY_SHARE:.0%} of the free memory is"))


def _blocks_in(room: int, block_bytes: int, what: str) -> int:
    blocks = room // block_bytes
    if blocks < 1:
        raise EngineSpecError(f"{what} {room}, less than one block of {block_bytes} bytes")
    return blocks


# --- `kvpin engine`: its options. torch is imported only once they are right ----------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Serve the embedded engine.")


def engine(**given: Any) -> None:  # noqa: ANN401 - the fields of `EmbeddedOptions`
    """Serve the embedded engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "transformers", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        options = EmbeddedOptions(**given)
        logging.getLogger("kvpin.engine").info("importing torch")
        from engine_adapter.torch_engine.server import serve_engine  # noqa: PLC0415 - imports torch

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
