"""Cache salts that keep apart what LMCache would mix.

LMCache names KV by the model, the token ids and the cache salt. It does not know of LoRA adapters, nor of
prompt embeddings, whose token ids are all the same: a request would be answered from the KV of another
adapter, or of other embeddings (observed with LMCache 0.5.6). So such requests get a salt of their own, which
vLLM and LMCache both keep to. A salt that LMCache refuses would hold its request up: it is sent as a digest.
"""

from __future__ import annotations

import hashlib

import msgspec

from engine_adapter.body import JsonBody

_FORBIDDEN = frozenset("@/\\\x00~")  # all but the last by LMCache; the last marks what is made here
_MAX_SALT = 128  # LMCache's
_DIGEST = 16  # bytes; in hex twice as many characters, after the mark
_MAX_OWN = _MAX_SALT - 2 * _DIGEST - 1
_EMBEDDINGS = "prompt_embeds"


def salt_for(salt: str | None, adapter: str | None = None, embeddings: str | None = None) -> str | None:
    """The salt that a request goes under.

    Args:
        salt: its own.
        adapter: the LoRA adapter it runs with.
        embeddings: what tells its prompt embeddings from others, None where it has none.
    """
    if salt is not None and (len(salt) > _MAX_OWN or not _FORBIDDEN.isdisjoint(salt)):
        salt = _mark("salt", salt)
    if adapter is None and embeddings is None:
        return salt
    return (salt or "") + _mark("kv", adapter, embeddings)


def without_adapter(sent: str | None, adapter: str | None) -> str | None:
    """The salt of a request with a LoRA adapter, from the one it went under."""
    if sent is None or adapter is None:
        return sent
    return sent.removesuffix(_mark("kv", adapter, None)) or None


def is_under(sent: str, salt: str) -> bool:
    """Whether a request that went under the one has the other as its own, whatever adapter it ran with."""
    own = salt_for(salt) or ""
    return sent == own or sent.startswith(f"{own}~")


def embeddings_of(body: JsonBody) -> str | None:
    """What tells a request's prompt embeddings from others; None where it has none."""
    # JSON may write any letter as \u00xx.
    if f'"{_EMBEDDINGS}"'.encode() not in body.raw and b"\\u00" not in body.raw:
        return None
    value = body.get(_EMBEDDINGS)
    if value is not None:
        return hashlib.sha256(msgspec.json.encode(value)).hexdigest()
    # Elsewhere in the request, in whatever way: only the very same request is the same.
    is_there = f'"{_EMBEDDINGS}"'.encode() in msgspec.json.encode(msgspec.json.decode(body.raw))
    return hashlib.sha256(body.raw).hexdigest() if is_there and _EMBEDDINGS not in body else None


def _mark(kind: str, *values: str | None) -> str:
    """Values of one kind, as a mark that no others have."""
    data = msgspec.json.encode(values)
    return "~" + hashlib.blake2b(data, digest_size=_DIGEST, person=kind.encode()).hexdigest()
