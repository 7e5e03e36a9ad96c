"""Identity of images, audio and video in a prompt: one marker each, at the first of its placeholder tokens.

A marker where the item begins is enough, since a block's hash covers all before it; and it is the same for
every block size. Requests and events of engines both come by it here, so that they always agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from engine_adapter.prompt.extra_ids import UINT64_MAX, extra_id
from engine_adapter.types import ExtraIds, MediaSpan


def media_extra_id(identity: str) -> int:
    """The extra id of an item by what the engine tells it apart by: its hash, or the client's uuid."""
    return extra_id("media", identity.encode())


def mark_media(n_tokens: int, media: Iterable[MediaSpan]) -> ExtraIds[int] | None:
    """Extra ids of a prompt of `n_tokens` tokens that holds these items, None when there are none.

    Raises:
        ValueError: an item begins outside the prompt.
    """
    ids: ExtraIds[int] | None = None
    for span in media:
        if not 0 <= span.offset < n_tokens:
            raise ValueError(f"an item begins at token {span.offset} of a prompt of {n_tokens}")
        if ids is None:
            ids = array("Q", bytes(8 * n_tokens))
        # Items that begin at the same token stand for each other in no order.
        ids[span.offset] = (ids[span.offset] + media_extra_id(span.identity)) & UINT64_MAX or 1
    return ids
