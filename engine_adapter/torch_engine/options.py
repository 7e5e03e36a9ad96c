"""The options of `kvpin engine`: its model, its sizes and limits, its server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ByteSize, TypeAdapter, ValidationError
from typer import BadParameter, Option

from engine_adapter.errors import EngineSpecError

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
    """The options, with what the command line says of each.

    Raises:
        EngineSpecError: a value is out of range; the text names it.
    """

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
        int,
        Option(metavar="N", help="Most prompt tokens per step; half of it while other requests decode."),
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
        """Blocks of the GPU tier.

        Without `kv_blocks` and `kv_bytes`: as many as `max_num_seqs` requests of `context` tokens need, in at
        most `MEMORY_SHARE` of the `available` bytes. `DEFAULT_KV_BLOCKS` if those are unknown.

        Raises:
            EngineSpecError: there is no room for one block.
        """
        if self.kv_blocks is not None:
            return self.kv_blocks
        if self.kv_bytes is not None:
            return _blocks_in(self.kv_bytes, block_bytes, "kv_bytes is")
        if available is None:
            return DEFAULT_KV_BLOCKS
        needed = self.max_num_seqs * -(-context // self.tokens_per_block)
        room = int(available * MEMORY_SHARE)
        return min(needed, _blocks_in(room, block_bytes, f"{MEMORY_SHARE:.0%} of the free memory is"))

    def host_blocks(self, block_bytes: int) -> int:
        """Blocks of the host tier."""
        return self.host_cache_bytes // block_bytes


def _blocks_in(room: int, block_bytes: int, what: str) -> int:
    blocks = room // block_bytes
    if blocks < 1:
        raise EngineSpecError(f"{what} {room}, less than one block of {block_bytes} bytes")
    return blocks
