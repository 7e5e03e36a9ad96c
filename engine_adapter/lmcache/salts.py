"""Cache salts for KV that LMCache would mix up.

LMCache identifies KV by model, token ids and cache salt. It ignores LoRA adapters and prompt embeddings,
whose token ids are all equal. A request could be answered from the KV of another LoRA adapter or of other
embeddings (observed with LMCache 0.5.6). So kvpin gives such requests their own salt, which vLLM and LMCache
both respect. LMCache refuses some salts and would stall the request, so kvpin sends a digest of those.
"""

from __future__ import annotations

import hashlib

import msgspec

from engine_adapter.body import JsonBody

_FORBIDDEN = frozenset("@/\\\x00~")  # LMCache refuses all but the last; the last marks salts made here
_MAX_SALT = 128  # LMCache's
_DIGEST = 16  # bytes; twice as many hex characters follow the mark
_MAX_OWN = _MAX_SALT - 2 * _DIGEST - 1
_EMBEDDINGS = "prompt_embeds"


def salt_for(salt: str | None, lora: str | None = None, embeddings: str | None = None) -> str | None:
    """The salt to send with a request, from its own salt, LoRA adapter and identity of prompt embeddings."""
    if salt is not None and (len(salt) > _MAX_OWN or not _FORBIDDEN.isdisjoint(salt)):
        salt = _mark("salt", salt)
    if lora is None and embeddings is None:
        return salt
    return (salt or "") + _mark("kv", lora, embeddings)


def without_lora(sent: str | None, lora: str | None) -> str | None:
    """A request's own salt, from the salt that was sent with it and its LoRA adapter."""
    if sent is None or lora is None:
        return sent
    return sent.removesuffix(_mark("kv", lora, None)) or None


def is_under(sent: str, salt: str) -> bool:
    """True if a sent salt belongs to a request with this own salt, with any LoRA adapter."""
    own = salt_for(salt) or ""
    return sent == own or sent.startswith(f"{own}~")


def embeddings_of(body: JsonBody) -> str | None:
    """Identity of a request's prompt embeddings; None if it has none."""
    # JSON may escape any letter as \u00xx.
    if f'"{_EMBEDDINGS}"'.encode() not in body.raw and b"\\u00" not in body.raw:
        return None
    value = body.get(_EMBEDDINGS)
    if value is not None:
        return hashlib.sha256(msgspec.json.encode(value)).hexdigest()
    # The embeddings may be anywhere in the request, so only an identical request counts as equal.
    is_there = f'"{_EMBEDDINGS}"'.encode() in msgspec.json.encode(msgspec.json.decode(body.raw))
    return hashlib.sha256(body.raw).hexdigest() if is_there and _EMBEDDINGS not in body else None


def _mark(kind: str, *values: str | None) -> str:
    """A mark for values of one kind, different from the marks of other values."""
    data = msgspec.json.encode(values)
    return "~" + hashlib.blake2b(data, digest_size=_DIGEST, person=kind.encode()).hexdigest()
