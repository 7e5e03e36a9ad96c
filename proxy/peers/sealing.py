"""Seals operators' orders on an exchange that others than this user may read and write.

An engine that is added gets prompts. So a kvpin takes such an order only from one that has the same admin
key, and tells no engine's key or headers. All other orders can do no more harm than the other messages.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from proxy.core.engine_book import EngineMark, encode_marks

# Settings of an engine that are told to nobody who may listen.
_SECRET = ("api_key", "headers")


NEEDS_KEY = "the key itself (admin_key_file), not its digest (sha256:…)"
"""What kvpins must be given to seal and to sign."""
_HASHED = "sha256:"


def secret_of(admin_key: str | None) -> bytes | None:
    """What seals and signs for the kvpins that have this admin key. None if the settings have none, or only
    its digest: that stands in files that others may read, and must open and sign nothing."""
    return None if admin_key is None or admin_key.startswith(_HASHED) else admin_key.encode()


class Sealing:
    """Seals the orders to add engines, and checks the seals of others."""

    def __init__(self, admin_key: Callable[[], str | None]) -> None:
        """`admin_key` gives the key of the operators now. Only the key itself seals, see `secret_of`."""
        self._admin_key = admin_key

    def told(self, marks: Iterable[EngineMark]) -> list[EngineMark]:
        """Those that may be told, sealed."""
        key = secret_of(self._admin_key())
        return [
            replace(mark, seal=_seal(mark, key)) if mark.added and key else mark
            for mark in marks
            if not mark.added or (key and not _is_secret(mark))
        ]

    def heard(self, marks: Iterable[EngineMark]) -> list[EngineMark]:
        """Those that a kvpin of the group told."""
        key = secret_of(self._admin_key())
        return [
            replace(mark, seal=b"")
            for mark in marks
            if not mark.added or (key and hmac.compare_digest(mark.seal, _seal(mark, key)))
        ]


def _seal(mark: EngineMark, key: bytes) -> bytes:
    return hmac.digest(key, encode_marks([replace(mark, seal=b"")]), hashlib.sha256)


def _is_secret(mark: EngineMark) -> bool:
    settings = msgspec.json.decode(mark.added)
    return any(settings.get(name) for name in _SECRET)
