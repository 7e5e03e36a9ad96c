"""Turns the blocks of a stored event into kvpin's runs: tokens, extra ids, salt and tier."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby

from engine_adapter.events.fields import MalformedEvents
from engine_adapter.prompt.extra_ids import UINT64_MAX
from engine_adapter.prompt.media import mark_media
from engine_adapter.tensorrt_llm.wire import Block, BlockName, Stored
from engine_adapter.types import BlocksStored, ExtraIds, MediaSpan, Tier, TokenIds

TIERS = (Tier.GPU, Tier.HOST, Tier.DISK)  # by cache level


def runs_of(data: Stored, blocks: Sequence[Block], size: int) -> Iterator[BlocksStored]:
    """The blocks as runs on one tier each.

    Raises:
        MalformedEvents: a block's content is unknown.
    """
    parent = data.parent_hash
    if len({(block.cache_salt, block.lora_id) for block in blocks}) > 1:
        raise MalformedEvents("the blocks of a run have several salts or adapters")
    for level, group in groupby(blocks, lambda block: block.cache_level):
        run, tier = list(group), tier_of(level)
        if tier is None:
            raise MalformedEvents(f"cache level {level} is not known")
        salt, lora = run[0].cache_salt, run[0].lora_id
        is_root = parent is None
        yield BlocksStored(
            tier=tier,
            parent=None if parent is None else name_of(parent),
            hashes=tuple(name_of(block.block_hash) for block in run),
            token_ids=_token_ids(run),
            tokens_per_block=size,
            extra_ids=_extra_ids(run, size),
            salt=salt if is_root and isinstance(salt, str) else None,
            # Events carry only the LoRA adapter's number; no request names an adapter like this.
            lora=f"lora_id {lora}" if is_root and isinstance(lora, int) else None,
        )
        parent = run[-1].block_hash


def _token_ids(run: Sequence[Block]) -> TokenIds[int]:
    try:
        return array("i", [token.token_id for block in run for token in block.tokens])
    except OverflowError as error:
        raise MalformedEvents(f"a token id is beyond int32: {error}") from error


def _extra_ids(run: Sequence[Block], size: int) -> ExtraIds[int] | None:
    """Extra ids, with a marker for each image, audio or video that begins in the run. Events do not say where
    in its block an item begins, so the marker stands on the block's first token."""
    try:
        ids = array("Q", [token.token_extra_id for block in run for token in block.tokens])
    except OverflowError as error:
        raise MalformedEvents(f"an extra id is beyond uint64: {error}") from error
    begins = [
        MediaSpan(key.hash, at * size, 0)
        for at, block in enumerate(run)
        for key in block.mm_keys or ()
        if key.start_offset == 0
    ]
    markers = mark_media(len(ids), begins)
    if not any(ids):
        return markers
    if markers is not None:
        for at in {span.offset for span in begins}:
            ids[at] = (ids[at] + markers[at]) & UINT64_MAX or 1
    return ids


def tier_of(level: int) -> Tier | None:
    """The tier of a cache level, None for an unknown level."""
    return TIERS[level] if 0 <= level < len(TIERS) else None


def name_of(name: BlockName) -> int | bytes:
    """A block's name in kvpin."""
    return name.encode() if isinstance(name, str) else name
