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


class Sealing:
    """Seals the orders to add engines, and checks the seals of others."""

    def __init__(self, admin_key: Callable[[], str | None]) -> None:
        """`admin_key` gives the key of the operators now."""
        self._admin_key = admin_key

    def told(self, marks: Iterable[EngineMark]) -> list[EngineMark]:
        """Those that may be told, sealed."""
        key = self._admin_key()
        return [
            replace(mark, seal=_seal(mark, key)) if mark.added and key else mark
            for mark in marks
            if not mark.added or (key and not _is_secret(mark))
        ]

    def heard(self, marks: Iterable[EngineMark]) -> list[EngineMark]:
        """Those that a kvpin of the group told."""
        key = self._admin_key()
        return [
            replace(mark, seal=b"")
            for mark in marks
            if not mark.added or (key and hmac.compare_digest(mark.seal, _seal(mark, key)))
        ]


def _seal(mark: EngineMark, key: str) -> bytes:
    return hmac.digest(key.encode(), encode_marks([replace(mark, seal=b"")]), hashlib.sha256)


def _is_secret(mark: EngineMark) -> bool:
    settings = msgspec.json.decode(mark.added)
    return any(settings.get(name) for name in _SECRET)
