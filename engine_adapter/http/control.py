"""The shared parts of adapters: turning a client's request into the engine's, control calls, and errors."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import httpx
import msgspec

from engine_adapter.body import UNREADABLE, JsonBody
from engine_adapter.errors import EngineRejected, EngineSpecError, EngineUnavailable
from engine_adapter.hold import RequestBody
from engine_adapter.http.client import HttpTransport
from engine_adapter.http.error_bodies import read_error
from engine_adapter.http.headers import HeaderPairs, Headers
from engine_adapter.http.tls import tls_context
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.types import EngineSpec

ANSWER_S = 60.0
# The longest answer: the token ids of the longest prompt fit in it several times.
MAX_ANSWER_BYTES = 64 << 20
_CONNECT_S = 5.0
# Engines whose address and headers are remembered in the form that requests need.
_MAX_ENGINES = 4096
# Characters that a path may contain besides letters and digits. The path is percent-encoded already, or a
# plain name.
_UNQUOTED = "/?&=%:@!$'()*+,;-._~"
# A client's headers that engines never get: hop-by-hop ones (RFC 9110 7.6.1), and those of the next
# connection. No compression: kvpin reads the usage.
ENDS_HERE = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_KEYS = frozenset({"authorization", "x-api-key"})
# Fields of a model's card that kvpin sets itself, or that differ each time. A `root` may be a path.
_NOT_THE_ENGINES = frozenset({"id", "object", "created", "owned_by", "root", "parent", "permission"})
_OWN_PREFIX = b"x-kvpin-"
# Values of the header `connection` that nearly every client sends.
_NAMES_NO_HEADER = (b"keep-alive", b"close")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")


@lru_cache(_MAX_ENGINES)
def base_url(spec: EngineSpec) -> str:
    """The engine's address without `/v1` and without a slash at its end.

    Raises:
        EngineSpecError: it is not an http or https address.
    """
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


def route_of(path: str) -> str:
    """The route of a path as a server reads it: without query, decoded, single slashes. A route spelt in
    another way must get the same treatment, above all its salt."""
    route = unquote(path.partition("?")[0])
    while "//" in route:
        route = route.replace("//", "/")
    return route


def prepare_request(
    spec: EngineSpec,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: RequestBody,
) -> OutgoingRequest:
    """The client's request with the engine's address and credentials; see `EngineAdapter.prepare`."""
    engine = _engine_of(spec)
    pairs = Headers.pairs_of(headers)
    ends_here = engine.ends_here
    for name, value in pairs:
        if name == b"connection" and value not in _NAMES_NO_HEADER:
            ends_here |= {each.strip().lower() for each in value.split(b",")}
    kept = [pair for pair in pairs if pair[0] not in ends_here and not pair[0].startswith(_OWN_PREFIX)]
    kept += engine.headers
    if isinstance(body, JsonBody):
        return OutgoingRequest(method, engine.url + path, kept, body.raw, engine.tls)
    if body is None:
        return OutgoingRequest(method, engine.url + path, kept, None, engine.tls)
    if body.length is not None:
        kept.append((b"content-length", b"%d" % body.length))
    return OutgoingRequest(method, engine.url + path, kept, body.chunks, engine.tls)


class ControlClient:
    """Calls an engine's own routes, apart from the data plane.

    Every call raises EngineUnavailable if there is no answer, and EngineRejected if the answer is an error.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        _check_headers(spec)
        self._engine = _engine_of(spec)
        self._transport = HttpTransport(connect_timeout_s=_CONNECT_S)
        self._closed = False

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """The JSON at `path`."""
        return await self.call("GET", path)

    async def call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_S,
    ) -> Any:  # noqa: ANN401 - JSON
        """Sends JSON or raw bytes; returns the JSON of the answer. See `fetch`."""
        if content is None and json is not None:
            content = msgspec.json.encode(json)
        raw = await self.fetch(method, path, content, headers, answer_s=answer_s)
        try:
            return msgspec.json.decode(raw)
        except UNREADABLE as error:
            raise EngineUnavailable(f"{method} {path}: the answer is not JSON") from error

    async def fetch(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        answer_s: float = ANSWER_S,
    ) -> bytes:
        """The bytes of the answer. `answer_s` limits how long the engine may be silent."""
        if self._closed:
            raise EngineUnavailable("the engine was removed")
        pairs = [*self._engine.headers, *Headers.pairs_of(headers or {})]
        if content is not None:
            pairs.append((b"content-type", b"application/json"))
        url = self._engine.url + quote(path, _UNQUOTED)
        try:
            status, raw = await self._answer(
                OutgoingRequest(method, url, pairs, content, self._engine.tls), answer_s
            )
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{method} {path}: {error}", dropped=error.dropped) from error
        except TimeoutError as error:
            raise EngineUnavailable(f"{method} {path}: no answer within {answer_s:g} s") from error
        if not 200 <= status < 300:  # noqa: PLR2004 - HTTP
            raise _rejection(status, raw)
        return raw

    async def aclose(self) -> None:
        """Closes its connections."""
        self._closed = True
        await self._transport.aclose()

    async def _answer(self, request: OutgoingRequest, answer_s: float) -> tuple[int, bytes]:
        loop, parts, size = asyncio.get_running_loop(), [], 0
        async with asyncio.timeout(answer_s) as silence, await self._transport.send(request) as response:
            while part := await response.receive():
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise EngineUnavailable(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
                silence.reschedule(loop.time() + answer_s)
        return response.status, b"".join(parts)


def model_name(models: object) -> str:
    """The first model of a `/v1/models` answer.

    Raises:
        EngineUnavailable: it lists none.
    """
    match models:
        case {"data": [{"id": str(name)}, *_]}:
            return name
        case _:
            raise EngineUnavailable("/v1/models names no model")


def model_card(models: object, name: str | None = None) -> dict[str, Any]:
    """The fields of a model in a `/v1/models` answer, without those that kvpin sets itself; {} if none.

    Without a name: those of the first model.
    """
    match models:
        case {"data": [*cards]}:
            found = [card for card in cards if isinstance(card, dict) and name in (None, card.get("id"))]
        case _:
            found = []
    return {field: value for field, value in (found or [{}])[0].items() if field not in _NOT_THE_ENGINES}


def max_model_len(models: object) -> int | None:
    """The context length of the first model of a `/v1/models` answer, if it says so."""
    match models:
        case {"data": [{"max_model_len": int(length)}, *_]}:
            return length
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Engine:
    """The part that all requests to an engine have in common.

    Attributes:
        url: the engine's address without `/v1`.
        headers: the headers that kvpin and the operator add.
        ends_here: names of the client's headers that are not passed on.
        tls: the TLS context for the engine.
    """

    url: str
    headers: HeaderPairs = field(repr=False)
    ends_here: frozenset[bytes]
    tls: ssl.SSLContext | None


@lru_cache(_MAX_ENGINES)
def _engine_of(spec: EngineSpec) -> _Engine:
    url = base_url(spec)
    own = _own_headers(spec)
    # The operator's key for the engine replaces every client's key.
    replaced = own.keys() | (_KEYS if spec.api_key else frozenset())
    return _Engine(
        url,
        Headers.of([("accept-encoding", "identity"), *own.items()]).raw,
        frozenset(name.encode() for name in ENDS_HERE | replaced),
        tls_context(spec),
    )


def _own_headers(spec: EngineSpec) -> dict[str, str]:
    """The headers that the operator adds to every request to the engine; names in lower case."""
    headers = {name.lower(): value for name, value in spec.headers.items()}
    return headers | ({"authorization": f"Bearer {spec.api_key}"} if spec.api_key else {})


def _check_headers(spec: EngineSpec) -> None:
    """Raises EngineSpecError, which does not repeat a value: it may be secret."""
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


def _rejection(status: int, content: bytes) -> EngineRejected | EngineUnavailable:
    """The exception for an error answer."""
    error = read_error(content)
    if status in (502, 503, 504):
        return EngineUnavailable(f"the engine answered {status}: {error.message}")
    return EngineRejected(error.message, status=status, param=error.param)
