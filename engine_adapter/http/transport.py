"""Requests to engines, and what went wrong on the way."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar, overload

import msgspec

# --- HTTP headers as the bytes that came, readable as text ----------------------------------------------

HeaderPairs = list[tuple[bytes, bytes]]
_T = TypeVar("_T")


@lru_cache(1024)
def _in_bytes(name: str) -> bytes:
    return name.lower().encode("latin-1")


class Headers(Mapping[str, str]):
    """Headers in the order they came, names in lower case. Of a repeated name, `get` gives the first value.

    As a mapping it shows Latin-1 text.

    Attributes:
        raw: (name, value) pairs, names in lower case. They stay as they are.
        first: name → its first value.
    """

    __slots__ = ("first", "raw")

    def __init__(self, raw: HeaderPairs) -> None:
        self.raw = raw
        self.first = dict(reversed(raw))

    @classmethod
    def of(cls, fields: Iterable[tuple[str, str]]) -> Headers:
        """Headers of text; names in any case."""
        return cls([(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields])

    @classmethod
    def pairs_of(cls, headers: Mapping[str, str]) -> HeaderPairs:
        """The pairs of any mapping; those of `Headers` are not copied."""
        return headers.raw if isinstance(headers, Headers) else cls.of(headers.items()).raw

    @overload
    def get(self, name: str, /) -> str | None: ...

    @overload
    def get(self, name: str, /, default: str | _T) -> str | _T: ...

    def get(self, name: str, /, default: str | _T | None = None) -> str | _T | None:
        """The first value of a header. Called often, so it does not raise and catch as `Mapping.get` does."""
        value = self.first.get(_in_bytes(name))
        return default if value is None else value.decode("latin-1")

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self.raw))

    def __len__(self) -> int:
        return len({name for name, _ in self.raw})

    def __repr__(self) -> str:
        """Names only: values may be secrets."""
        return f"Headers({[name.decode('latin-1') for name, _ in self.raw]})"


# --- transport ------------------------------------------------------------------------------------------


class OutgoingRequest(msgspec.Struct, frozen=True):
    """A request to one engine.

    Attributes:
        url: sent as it is, already percent-encoded.
        headers: names in lower case. The transport adds `host` and the length or the coding of the body.
        body: whole, or streamed. A streamed body is chunked unless `headers` has its `content-length`.
        tls: the engine's own context, None where it has none.
        socket: what the client sends on the WebSocket that the request asks for; None for a plain request. It
            is sent once the engine has agreed (status 101).
        unix: path of the Unix socket to connect to, in place of the host of the URL; None for TCP.
    """

    method: str
    url: str
    headers: HeaderPairs = []  # each request gets its own
    body: bytes | AsyncIterator[bytes] | None = None
    tls: ssl.SSLContext | None = None
    socket: AsyncIterator[bytes] | None = None
    unix: str | None = None

    def __repr__(self) -> str:
        """Without headers and body, which may be secret."""
        return f"OutgoingRequest({self.method!r}, {self.url!r})"


def describe(error: BaseException) -> str:
    """An I/O error in one line, also if its text is empty."""
    return str(error) or type(error).__name__
