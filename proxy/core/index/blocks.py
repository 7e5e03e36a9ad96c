"""Cache identity: a prompt as a chain of block hashes.

    h_i = xxh3_64(int32 tokens ‖ extra ids if any is non-zero, seed h_{i-1})

The root h_0 hashes a namespace whose parts have a type and a length, so that keys of two kinds never collide
by being the same string. Its hash is blake2b with a secret key: who does not know a root cannot aim at the
hashes of blocks that follow it. Equal hashes mean equal content up to that block, in the same namespace. A
collision can at worst misroute a request: engines compare content themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from itertools import chain as joined
from struct import Struct

import msgspec
from xxhash import xxh3_64_intdigest

BlockHash = int
_ROW = 16


class Chain(msgspec.Struct, frozen=True, gc=False):
    """The full blocks of a prompt."""

    hashes: tuple[BlockHash, ...]  # one per full block, each covering all before it
    n_tokens: int  # tokens of the prompt, including a tail that fills no block
    tokens_per_block: int

    @property
    def reusable(self) -> int:
        """The most blocks an engine can reuse: never the last prompt token."""
        return max(self.n_tokens - 1, 0) // self.tokens_per_block


def namespace_root(
    model: str, *, lora: str | None = None, salt: str | None = None, secret: bytes = b""
) -> BlockHash:
    """The root of all chains of a model, adapter (LoRA name and version) and tenant salt. `secret`: up to 64
    bytes that are the same wherever hashes are compared, and that no client knows."""
    frame = bytearray()
    for kind, value in (("model", model), ("lora", lora), ("salt", salt)):
        if value is not None:
            for part in (kind.encode(), value.encode()):
                frame += len(part).to_bytes(8, "little") + part
    return int.from_bytes(blake2b(frame, digest_size=8, key=secret).digest(), "little")


def extend(
    parent: BlockHash,
    token_ids: array[int] | memoryview,
    extra_ids: array[int] | memoryview | None,
    tokens_per_block: int,
) -> tuple[BlockHash, ...]:
    """Hashes of the full blocks of `token_ids` (int32) that follow the block or namespace root `parent`; a
    tail shorter than a block is left out. `extra_ids`: uint64 per token, or None when all are 0, which hashes
    the same."""
    tokens = _pieces(token_ids, 4 * tokens_per_block)
    if extra_ids is None:
        return tuple([parent := xxh3_64_intdigest(block, parent) for row in tokens for block in row])
    extras, text = _pieces(extra_ids, 8 * tokens_per_block), bytes(8 * tokens_per_block)
    hashes: list[BlockHash] = []
    for block, extra in zip(joined.from_iterable(tokens), joined.from_iterable(extras), strict=True):
        parent = xxh3_64_intdigest(block if extra == text else block + extra, parent)
        hashes.append(parent)
    return tuple(hashes)


def _pieces(ids: array[int] | memoryview, size: int) -> Iterator[tuple[bytes, ...]]:
    """Whole pieces of `size` bytes, in rows: piece by piece takes three times as long."""
    data = memoryview(ids).cast("B")
    by_row, by_one = _unpackers(size)
    rows, end = len(data) // (_ROW * size) * _ROW * size, len(data) // size * size
    return joined(by_row(data[:rows]), by_one(data[rows:end])) if rows else by_one(data[:end])


@cache
def _unpackers(size: int) -> tuple[Callable[[memoryview], Iterator[tuple[bytes, ...]]], ...]:
    """What unpacks rows of pieces, and single pieces."""
    return Struct(f"{size}s" * _ROW).iter_unpack, Struct(f"{size}s").iter_unpack


def chain(
    root: BlockHash,
    token_ids: array[int],
    extra_ids: array[int] | None,
    tokens_per_block: int,
    known: tuple[BlockHash, ...] = (),
) -> Chain:
    """The chain of a whole prompt under a namespace root. `known` are the hashes of its leading blocks where
    an earlier prompt under the same root began with the same tokens; they are not hashed again."""
    parent, start = known[-1] if known else root, len(known) * tokens_per_block
    rest = None if extra_ids is None else memoryview(extra_ids)[start:]
    hashes = known + extend(parent, memoryview(token_ids)[start:], rest, tokens_per_block)
    return Chain(hashes, len(token_ids), tokens_per_block)


def reusable_tokens(n_tokens: int, tokens_per_block: int) -> int:
    """The most tokens an engine can reuse: whole blocks, and never the last prompt token."""
    return max(n_tokens - 1, 0) // tokens_per_block * tokens_per_block
