"""Identity of what is not text in a prompt. Requests and KV events both get it here, so they always agree.

Images, audio and video have one marker per item, at its first placeholder token. One is enough, as a block's
hash covers all tokens before it, and it is the same for every block size. Prompt embeddings have a marker at
the first token of each block of their engine's cache.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterable

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt.extra_ids import (
    UINT64_MAX,
    Embeddings,
    extra_id,
    parse_embeddings,
    prompt_embeds_extra_id,
)
from engine_adapter.types import ExtraIds, MediaSpan, TokenIds


def media_extra_id(identity: str) -> int:
    """The extra id of an item, from the engine's identity of it: its hash, or the client's uuid."""
    return extra_id("media", identity.encode())


def mark_media(
    n_tokens: int, media: Iterable[MediaSpan], embeds: Iterable[tuple[int, bytes]] = ()
) -> ExtraIds[int] | None:
    """Extra ids of a prompt of `n_tokens` tokens with these items and embeddings; None without any. `embeds`
    are the first token of each block, and the engine's digest of its embeddings. Raises ValueError if an item
    begins outside the prompt."""
    marks = [(span.offset, media_extra_id(span.identity)) for span in media]
    marks += [(at, extra_id("prompt_embeds_rows", digest)) for at, digest in embeds]
    if not marks:
        return None
    ids: ExtraIds[int] = array("Q", bytes(8 * n_tokens))
    for at, identity in marks:
        if not 0 <= at < n_tokens:
            raise ValueError(f"an item begins at token {at} of a prompt of {n_tokens}")
        # Items that begin at the same token are added: their order does not matter.
        ids[at] = (ids[at] + identity) & UINT64_MAX or 1
    return ids


# Characters of base64 that are decoded and hashed in about 1 ms.
_CHARS_PER_MS = 128 * 1024


def read_embeds(data: object, *, param: str, hidden_size: int) -> Embeddings:
    """The embeddings in the field `param` of a request: base64 of safetensors bytes. Raises PromptTableError
    if they are something else, or do not fit the model."""
    if not isinstance(data, str):
        raise PromptTableError(f"{param} must be base64 text", param=param)
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptTableError(f"{param} is not base64: {error}", param=param) from error
    embeddings = parse_embeddings(raw, param=param)
    if embeddings.hidden != hidden_size:
        raise PromptTableError(
            f"{param} has {embeddings.hidden} columns; the model's hidden size is {hidden_size}", param=param
        )
    return embeddings


def reading_ms(data: object) -> float:
    """Milliseconds that `read_embeds` and `tokens_of` take."""
    return len(data) / _CHARS_PER_MS if isinstance(data, str) else 0.0


def tokens_of(embeddings: Embeddings, vocab_size: int) -> tuple[TokenIds[int], ExtraIds[int]]:
    """A fake id for each row, `vocab_size` and up, and the extra ids beside them, which are all the same."""
    identity = prompt_embeds_extra_id(embeddings)
    token_ids = array("i", range(vocab_size, vocab_size + embeddings.rows))
    return token_ids, array("Q", [identity]) * embeddings.rows
