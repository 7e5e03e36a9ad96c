"""Reads prompt embeddings as clients send them: one tensor in safetensors, in base64.

In a chat they are content parts, in a completion the field `prompt_embeds`. Other servers take files of
`torch.save` there, which hold a pickle. These are refused, never read.
"""

from __future__ import annotations

import base64
import binascii
from array import array

from engine_adapter.errors import PromptTableError
from engine_adapter.prompt.extra_ids import Embeddings, parse_embeddings, prompt_embeds_extra_id
from engine_adapter.types import ExtraIds, TokenIds

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
