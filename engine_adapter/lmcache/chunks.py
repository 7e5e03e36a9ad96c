"""What LMCache holds, in chunks: one chunk of a prompt is an object for each rank, and lies where all do."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine_adapter.lmcache.wire import Key, KeyPlacements, Placement
from engine_adapter.types import BelowGpu, KvTarget


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of KV.

    Attributes:
        keys: its objects.
        on_host: all of them lie in the node's L1.
        on_disk: all of them lie on an L2 the node reaches.
        bytes: of one copy.
    """

    keys: tuple[Key, ...]
    on_host: bool
    on_disk: bool
    bytes: int

    @property
    def held(self) -> bool:
        """Whether the node has it on any tier."""
        return self.on_host or self.on_disk


def chunks_of(objects: Iterable[KeyPlacements], instance_id: str) -> list[Chunk]:
    """Objects as the chunks of one node, in the order of their first objects."""
    groups: dict[tuple[str, str, str], list[KeyPlacements]] = {}
    for each in objects:
        name = (each.key.chunk_hash_hex, each.key.model_name, each.key.cache_salt)
        groups.setdefault(name, []).append(each)
    return [_chunk(group, instance_id) for group in groups.values()]


def leading(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks up to the first that is not held."""
    return list(takewhile(lambda chunk: chunk.held, chunks))


def below_gpu(chunks: Sequence[Chunk], n_tokens: int, tokens_per_chunk: int) -> BelowGpu:
    """What an engine would take of a prompt that has these chunks.

    A prompt of which every token is held has its last one computed again: one less is reused.
    """
    held = leading(chunks)
    host = sum(1 for _ in takewhile(lambda chunk: chunk.on_host, held)) * tokens_per_chunk
    total = len(held) * tokens_per_chunk
    return BelowGpu(host, total - host, min(total, n_tokens - 1))


def text_of(target: KvTarget, tokens_per_chunk: int) -> array[int]:
    """The whole chunks of a prompt up to the first that holds an image, which LMCache names otherwise."""
    token_ids = target.token_ids if target.token_ids is not None else array("i")
    end = len(token_ids)
    if target.extra_ids is not None:
        end = next((at for at, extra in enumerate(target.extra_ids) if extra), end)
    return token_ids[: end // tokens_per_chunk * tokens_per_chunk]


def _chunk(objects: Sequence[KeyPlacements], instance_id: str) -> Chunk:
    def lies(tier: str, each: KeyPlacements) -> bool:
        return any(_reaches(place, tier, instance_id) for place in each.placements)

    return Chunk(
        keys=tuple(each.key for each in objects),
        on_host=all(lies("l1", each) for each in objects),
        on_disk=all(lies("l2", each) for each in objects),
        bytes=sum(max((place.size_bytes for place in each.placements), default=0) for each in objects),
    )


def _reaches(place: Placement, tier: str, instance_id: str) -> bool:
    return place.tier == tier and (place.shared or place.instance_id == instance_id)
