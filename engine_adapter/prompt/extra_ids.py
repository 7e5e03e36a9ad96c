"""Identity of what is not text in a prompt: extra ids, prompt tables, prompt embeddings and media."""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import safetensors

from engine_adapter.errors import PromptTableError
from engine_adapter.types import ExtraIds, MediaSpan, TokenIds

# --- identity of embeddings: extra ids, prompt tables and prompt embeddings -----------------------------
# A token id below the vocabulary size is text. A fake id (>= vocabulary size) is row `id - vocab_size` of
# some table, and the extra id beside it names the table. The proxy and the embedded engine both derive
# extra ids here, from content, so that the same embeddings always get the same extra id.
#
# A client that passes extra ids itself follows TensorRT-LLM's rules: one per prompt token, 0 for text,
# above 0 for fake ids, all within uint64.

UINT64_MAX = 2**64 - 1
# Bytes of a safetensors header, which the library decodes whole: one tensor and notes of its maker.
_MAX_HEADER = 64 << 10
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def extra_id(kind: str, *content: bytes | bytearray) -> int:
    """64 bits of blake2b over the length-framed kind and content, given in parts; never 0, which stands for
    text. Clients choose the content, so nobody may find another one with the same id."""
    name, size = kind.encode(), sum(map(len, content))
    frame = len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little")
    hashed = blake2b(frame, digest_size=8)
    for part in content:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "little") or 1


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A 2-d float tensor read from safetensors bytes.

    Attributes:
        rows: virtual tokens.
        dtype: safetensors' name of the element type.
        values: row-major bytes, hashed and never copied: a table has up to 128 MiB.
    """

    rows: int
    hidden: int
    dtype: str
    values: bytes | bytearray = field(repr=False)

    def extra_id(self, kind: str) -> int:
        """The extra id of these embeddings."""
        return extra_id(kind, *self._identity())

    def content(self) -> bytes:
        """A digest of element type, shape and values."""
        hashed = blake2b(digest_size=16)
        for part in self._identity():
            hashed.update(part)
        return hashed.digest()

    def _identity(self) -> tuple[bytes | bytearray, ...]:
        frame = f"{self.dtype}:{self.rows}x{self.hidden}:".encode()
        return frame, self.values


def parse_embeddings(data: bytes, *, param: str) -> Embeddings:
    """Reads one 2-d float tensor from safetensors bytes. Raises PromptTableError: not safetensors (the
    message names a pickle), not exactly one tensor, not 2-d, not floating point, without rows, or with too
    long a header. `param` is the field that the error names."""
    if data[:2] == b"PK" or data[:1] == b"\x80":
        raise PromptTableError(
            f"{param} is a pickled tensor; pickles can run code and are refused: save it as safetensors",
            param=param,
        )
    if (n_bytes := int.from_bytes(data[:8], "little")) > _MAX_HEADER and n_bytes <= len(data):
        raise PromptTableError(
            f"{param} has a safetensors header of {n_bytes} bytes; one tensor takes at most {_MAX_HEADER}",
            param=param,
        )
    try:
        tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # a Rust module
    except safetensors.SafetensorError as error:
        raise PromptTableError(f"{param} is not safetensors: {error}", param=param) from error
    if len(tensors) != 1:
        raise PromptTableError(f"{param} holds {len(tensors)} tensors; exactly one is needed", param=param)
    tensor = tensors[0][1]
    shape, dtype = list(tensor["shape"]), str(tensor["dtype"])
    if len(shape) != 2 or 0 in shape:  # noqa: PLR2004 - [rows, hidden]
        raise PromptTableError(f"{param} has shape {shape}; [rows, hidden] is needed", param=param)
    if dtype not in _FLOAT_DTYPES:
        raise PromptTableError(
            f"{param} has type {dtype}; one of {', '.join(_FLOAT_DTYPES)} is needed", param=param
        )
    return Embeddings(rows=shape[0], hidden=shape[1], dtype=dtype, values=tensor["data"])


def prompt_table_extra_id(table: Embeddings) -> int:
    """The extra id of a p-tuning table."""
    return table.extra_id("prompt_table")


def prompt_embeds_extra_id(embeddings: Embeddings) -> int:
    """The extra id of embeddings in a message."""
    return embeddings.extra_id("prompt_embeds")


def client_extra_id(table_extra_id: int, label: int) -> int:
    """The extra id of a fake token for which the client named a table and gave its own label.

    The table is part of the hash: with the label alone, two tables under one label would share KV."""
    return extra_id("client", table_extra_id.to_bytes(8, "little") + label.to_bytes(8, "little"))


@dataclass(frozen=True, slots=True)
class TableRef:
    """The extra id and the number of rows of a table."""

    extra_id: int
    rows: int


@dataclass(frozen=True, slots=True)
class ResolvedExtraIds:
    """Extra ids of a prompt, None when it is all text, and the table behind each of them."""

    extra_ids: ExtraIds[int] | None
    tables: Mapping[int, TableRef]


def resolve_extra_ids(
    token_ids: TokenIds[int],
    *,
    vocab_size: int,
    explicit: Sequence[Any] | None,
    table: TableRef | None,
    registered: Mapping[int, TableRef],
) -> ResolvedExtraIds:
    """Extra ids of a prompt given as token ids.

    With `table` (the request names a prompt table), fake ids are its rows; `explicit` ids, if any, are the
    client's labels, hashed together with the table. Without `table`, every non-zero explicit id is the extra
    id of a table in `registered` (keyed by extra id). Raises PromptTableError, which names the index of the
    first id that breaks a rule."""
    if explicit is not None:
        _check_alignment(token_ids, explicit, vocab_size)
    if min(token_ids, default=0) < 0:
        index = next(i for i, token in enumerate(token_ids) if token < 0)
        raise PromptTableError(f"prompt[{index}] is negative", param=f"prompt[{index}]")
    if max(token_ids, default=0) < vocab_size:
        return ResolvedExtraIds(None, {})
    extra_ids = array("Q", bytes(8 * len(token_ids)))
    tables: dict[int, TableRef] = {}
    for index, token in enumerate(token_ids):
        if token < vocab_size:
            continue
        label = explicit[index] if explicit is not None else None
        source, identity = _table_of(index, token, label, table, registered, vocab_size)
        if token - vocab_size >= source.rows:
            raise PromptTableError(
                f"prompt[{index}] is {token}, row {token - vocab_size} of a table of {source.rows} rows",
                param=f"prompt[{index}]",
            )
        extra_ids[index] = identity
        tables[identity] = source
    return ResolvedExtraIds(extra_ids, tables)


# Ids that are looked at one by one in about 1 ms.
_IDS_PER_MS = 400


def resolving_ms(token_ids: TokenIds[int], explicit: object, table: object) -> float:
    """Milliseconds that `resolve_extra_ids` takes. Text is told by its least and greatest id."""
    return 0.0 if explicit is None and table is None else len(token_ids) / _IDS_PER_MS


def _table_of(
    index: int,
    token: int,
    label: int | None,
    table: TableRef | None,
    registered: Mapping[int, TableRef],
    vocab_size: int,
) -> tuple[TableRef, int]:
    """The table of a fake id, and the extra id that the fake id gets."""
    if table is not None:
        if label is None or label == table.extra_id:
            return table, table.extra_id
        return table, client_extra_id(table.extra_id, label)
    if label is None:
        raise PromptTableError(
            f"prompt[{index}] is {token}, outside the vocabulary of {vocab_size}: only a prompt_table gives "
            "such ids a meaning",
            param=f"prompt[{index}]",
        )
    source = registered.get(label)
    if source is None:
        raise PromptTableError(
            f"extra_ids[{index}] is {label}, which is the extra id of no prompt table",
            param=f"extra_ids[{index}]",
        )
    return source, label


def _check_alignment(token_ids: TokenIds[int], explicit: Sequence[Any], vocab_size: int) -> None:
    """Checks TensorRT-LLM's rules for extra ids from a client."""
    if len(explicit) != len(token_ids):
        raise PromptTableError(
            f"extra_ids has {len(explicit)} entries for {len(token_ids)} prompt tokens", param="extra_ids"
        )
    for index, (token, value) in enumerate(zip(token_ids, explicit, strict=True)):
        name = f"extra_ids[{index}]"
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= UINT64_MAX:
            raise PromptTableError(f"{name} is {value!r}; an integer from 0 to 2**64-1 is needed", param=name)
        if value == 0 and token >= vocab_size:
            raise PromptTableError(
                f"{name} is 0 beside the fake id {token}; fake ids need one above 0", param=name
            )
        if value > 0 and token < vocab_size:
            raise PromptTableError(f"{name} is {value} beside the text id {token}; text needs 0", param=name)


# --- media ----------------------------------------------------------------------------------------------
# Identity of what is not text in a prompt. Requests and KV events both get it here, so they always agree.
#
# Images, audio and video have one marker per item, at its first placeholder token. One is enough, as a
# block's hash covers all tokens before it, and it is the same for every block size. Prompt embeddings have
# a marker at the first token of each block of their engine's cache.


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
