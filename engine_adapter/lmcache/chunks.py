"""The chunks that LMCache holds. A chunk has one object per rank. It lies on a tier if all its objects do."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine_adapter.lmcache.client import Key, KeyPlacements, Placement
from engine_adapter.types import BelowGpu, KvTarget


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of KV.

    Attributes:
        keys: its objects.
        on_host: all lie in the node's L1.
        on_disk: all lie on an L2 that the node reaches.
        bytes: of one copy.
    """

    keys: tuple[Key, ...]
    on_host: bool
    on_disk: bool
    bytes: int

    @property
    def held(self) -> bool:
        """Whether any tier of the node holds it."""
        return self.on_host or self.on_disk


def chunks_of(objects: Iterable[KeyPlacements], instance_id: str) -> list[Chunk]:
    """Groups objects into the chunks of one node, in the order of their first objects."""
    groups: dict[tuple[str, str, str], list[KeyPlacements]] = {}
    for each in objects:
        name = (each.key.chunk_hash_hex, each.key.model_name, each.key.cache_salt)
        groups.setdefault(name, []).append(each)
    return [_chunk(group, instance_id) for group in groups.values()]


def leading(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks before the first that is not held."""
    return list(takewhile(lambda chunk: chunk.held, chunks))


def below_gpu(chunks: Sequence[Chunk], n_tokens: int, tokens_per_chunk: int) -> BelowGpu:
    """The part of a prompt that an engine would reuse with these chunks.

    If every token is held, the engine computes the last one again, so one token less is reused.
    """
    held = leading(chunks)
    host = sum(1 for _ in takewhile(lambda chunk: chunk.on_host, held)) * tokens_per_chunk
    total = len(held) * tokens_per_chunk
    return BelowGpu(host, total - host, min(total, n_tokens - 1))


def text_of(target: KvTarget, tokens_per_chunk: int) -> array[int]:
    """The whole chunks of a prompt before its first image, because LMCache names chunks with images
    differently."""
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
