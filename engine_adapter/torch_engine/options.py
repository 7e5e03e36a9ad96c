"""The options of an engine: its sizes and limits, its model, its server."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_adapter.errors import EngineSpecError

DEFAULT_KV_BLOCKS = 1024
DEFAULT_PORT = 8100
DEFAULT_MAX_BODY_BYTES = 64 * 2**20
MEMORY_SHARE = 0.25
"""The KV cache's share of the free memory. The rest is for other engines and programs."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes and limits of one engine.

    Attributes:
        kv_blocks, kv_bytes: size of the GPU tier, in blocks or in bytes; for neither, see `gpu_blocks`.
        tokens_per_block: a power of two.
        host_cache_bytes: bytes of the host tier, 0 for none.
        max_num_seqs: most requests running at once.
        prefill_chunk: most prompt tokens computed in one step; half of it while other requests decode.
        pin_share: most of the GPU tier that pins may hold, 0 to 1; the rest is left to running requests.
        seed: draws the seeds of requests without one; None is random.

    Raises:
        EngineSpecError: a value is out of range; the text names it.
    """

    kv_blocks: int | None = None
    kv_bytes: int | None = None
    tokens_per_block: int = 16
    host_cache_bytes: int = 0
    max_num_seqs: int = 32
    prefill_chunk: int = 256
    pin_share: float = 0.8
    seed: int | None = None

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


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """The options of one engine process: its model, device, event address and limits.

    Attributes:
        model: directory or hub id, None for the built-in random-weight model.
        served_model_name: model name that clients send, None for the model's own.
        device, dtype: as torch names them; None takes the checkpoint's type.
        threads: CPU threads of torch, None for its default.
        host: address to publish KV events on.
        engine: sizes and limits.
    """

    model: str | None = None
    served_model_name: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    host: str = "127.0.0.1"
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the server: what it serves, and where.

    Attributes:
        service: model and engine.
        host: address to bind; loopback by default, as the routes have no key.
        port: 0 takes a free one.
        max_body_bytes: larger request bodies are refused.
        exit_with_parent: end when standard input closes.
    """

    service: ServiceOptions = field(default_factory=ServiceOptions)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    exit_with_parent: bool = False


def _blocks_in(room: int, block_bytes: int, what: str) -> int:
    blocks = room // block_bytes
    if blocks < 1:
        raise EngineSpecError(f"{what} {room}, less than one block of {block_bytes} bytes")
    return blocks
