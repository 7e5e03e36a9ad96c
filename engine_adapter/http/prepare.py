"""A request as an engine gets it, and what may go wrong on the way: headers, address, credentials, TLS."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, overload
from urllib.parse import unquote

import httpx
import msgspec

from engine_adapter.body import JsonBody, Upload
from engine_adapter.errors import EngineSpecError
from engine_adapter.hold import RequestBody
from engine_adapter.types import EngineSpec

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


# --- the client's request as an engine gets it: the engine's address, credentials and headers -----------


def tls_context(spec: EngineSpec) -> ssl.SSLContext | None:
    """The context of an https engine, None for any other.

    With `ca`, only those authorities are trusted; without, the machine's own. Raises EngineSpecError: a file
    cannot be read, or does not hold what it should."""
    if spec.url.lower().startswith("https://"):
        try:
            return _context(spec.ca, spec.cert, spec.key)
        except EngineSpecError as error:
            raise EngineSpecError(f"engine {spec.id!r}: {error}") from error
    return None


@lru_cache
def _context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Shared by engines with the same files: a context takes about 20 ms to make."""
    if key is not None and cert is None:
        raise EngineSpecError("key is given without cert: name the certificate it belongs to")
    for name, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path is not None:
            _check_file(name, path)
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise EngineSpecError(f"ca: {ca!r} holds no certificates in PEM form") from error
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise EngineSpecError(
                f"cert {cert!r} and key {key or cert!r} do not go together as a PEM certificate and its "
                "unencrypted private key"
            ) from error
    return context


def _check_file(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise EngineSpecError(f"{name}: {path!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a null byte
        raise EngineSpecError(f"{name}: {path!r} is no path: {error}") from error


def _no_password() -> str:
    """Replaces OpenSSL's question for a password on the terminal."""
    raise ValueError("the private key is encrypted")


# Engines whose address and headers are remembered in the form that requests need.
_MAX_ENGINES = 4096
# Paths whose route is remembered: a request asks for its own some 20 times. A path has up to 64 KiB.
_MAX_PATHS = 64
# Hop-by-hop headers (RFC 9110 7.6.1), and those of the next connection. No compression: kvpin reads the
# usage.
ENDS_HERE = frozenset(
    {
        "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive",
        "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
_KEYS = frozenset({"authorization", "x-api-key"})
_OWN_PREFIX = b"x-kvpin-"
# Values of the header `connection` that nearly every client sends.
_NAMES_NO_HEADER = (b"keep-alive", b"close")
_NO_HEADERS: HeaderPairs = []
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")


@lru_cache(_MAX_ENGINES)
def base_url(spec: EngineSpec) -> str:
    """The engine's address without `/v1` and without a slash at its end. Raises EngineSpecError: it is not an
    http or https address."""
    try:
        url = httpx.URL(spec.url)
    except httpx.InvalidURL as error:
        raise EngineSpecError(f"engine {spec.id!r}: {spec.url!r} is not an address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise EngineSpecError(f"engine {spec.id!r}: {spec.url!r} is not an http:// or https:// address")
    if url.userinfo:
        raise EngineSpecError(
            f"engine {spec.id!r}: its address has a name or password: use api_key or headers"
        )
    if url.query or url.fragment:
        raise EngineSpecError(f"engine {spec.id!r}: {spec.url!r} has a query or a fragment")
    return spec.url.rstrip("/").removesuffix("/v1").rstrip("/")


@lru_cache(_MAX_PATHS)
def route_of(path: str) -> str:
    """The route of a path as a server reads it: without query, decoded, single slashes, none at the end. A
    route spelt in another way must get the same treatment, above all its salt."""
    route = unquote(path.partition("?")[0])
    while "//" in route:
        route = route.replace("//", "/")
    return route.rstrip("/") or "/"


def prepare_request(
    spec: EngineSpec,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: RequestBody,
    own: HeaderPairs = _NO_HEADERS,
) -> OutgoingRequest:
    """The client's request with the engine's address and credentials; see `EngineAdapter.prepare`. `own`:
    headers that replace the client's of the same name."""
    engine = parts_of(spec)
    pairs = Headers.pairs_of(headers)
    ends_here = engine.ends_here
    if own:
        ends_here |= {name for name, _ in own}
    for name, value in pairs:
        if name == b"connection" and value not in _NAMES_NO_HEADER:
            ends_here |= {each.strip().lower() for each in value.split(b",")}
    kept = [pair for pair in pairs if pair[0] not in ends_here and not pair[0].startswith(_OWN_PREFIX)]
    kept += engine.headers + own
    content: bytes | AsyncIterator[bytes] | None = body.raw if isinstance(body, JsonBody) else None
    if isinstance(body, Upload):
        content = body.chunks
        if body.length is not None:
            kept.append((b"content-length", b"%d" % body.length))
    return OutgoingRequest(method, engine.url + path, kept, content, engine.tls)


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts that all requests to an engine share.

    Attributes:
        url: the engine's address without `/v1`.
        headers: the headers that kvpin and the operator add.
        ends_here: names of the client's headers that are not passed on.
    """

    url: str
    headers: HeaderPairs = field(repr=False)
    ends_here: frozenset[bytes]
    tls: ssl.SSLContext | None


@lru_cache(_MAX_ENGINES)
def parts_of(spec: EngineSpec) -> RequestParts:
    """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
    url = base_url(spec)
    # No error repeats a value: it may be secret.
    if spec.api_key and not _HEADER_VALUE.fullmatch(spec.api_key):
        raise EngineSpecError(f"engine {spec.id!r}: api_key is not printable ASCII, or has space at an end")
    for name, value in spec.headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise EngineSpecError(f"engine {spec.id!r}: headers: {name!r} is not a header name")
        if name.lower() in ENDS_HERE:
            raise EngineSpecError(f"engine {spec.id!r}: headers: kvpin sets {name!r} itself: leave it out")
        if not _HEADER_VALUE.fullmatch(value):
            raise EngineSpecError(
                f"engine {spec.id!r}: headers: {name!r} has a value that is not printable ASCII"
            )
    own = {"accept-encoding": "identity"} | {name.lower(): value for name, value in spec.headers.items()}
    if spec.api_key:
        own["authorization"] = f"Bearer {spec.api_key}"
    # The operator's key for the engine replaces every client's key.
    replaced = own.keys() | (_KEYS if spec.api_key else frozenset())
    return RequestParts(
        url,
        Headers.of(own.items()).raw,
        frozenset(name.encode() for name in ENDS_HERE | replaced),
        tls_context(spec),
    )
