"""What adapters share: turning a client's request into the engine's, control calls, and errors."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import unquote

import httpx
import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineSpecError, EngineUnavailable
from engine_adapter.http.error_bodies import read_error
from engine_adapter.http.tls import tls_context
from engine_adapter.http.transport import KEEPALIVE_S, AiohttpTransport, OutgoingRequest, describe
from engine_adapter.types import EngineSpec

_CONNECT_S, _ANSWER_S = 5.0, 60.0
_MAX_CONNECTIONS = 32
# Hop-by-hop headers (RFC 9110 7.6.1), and those of the next connection. No compression: kvpin reads the
# usage.
_ENDS_HERE = frozenset(
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
_OWN_PREFIX = "x-kvpin-"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")


@lru_cache
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
    body: JsonBody | AsyncIterator[bytes] | None,
) -> OutgoingRequest:
    """The client's request with the engine's address and credentials; see `EngineAdapter.prepare`."""
    named = {
        name.strip().lower()
        for key, value in headers.items()
        if key.lower() == "connection"
        for name in value.split(",")
    }
    own = _own_headers(spec)
    # The operator's key for the engine replaces every client's key.
    ends_here = _ENDS_HERE | own.keys() | (_KEYS if spec.api_key else frozenset())
    kept = {
        name: value
        for name, value in headers.items()
        if (lower := name.lower()) not in ends_here
        and lower not in named
        and not lower.startswith(_OWN_PREFIX)
    }
    kept["accept-encoding"] = "identity"
    kept.update(own)
    raw = body.raw if isinstance(body, JsonBody) else body
    return OutgoingRequest(method, base_url(spec) + path, kept, raw, tls_context(spec))


class ControlClient:
    """Calls an engine's own routes, apart from the data plane.

    Every call raises EngineUnavailable if there is no answer, and EngineRejected if the answer is an error.

    Attributes:
        lean: for calls that requests wait for.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        _check_headers(spec)
        self._client = httpx.AsyncClient(
            base_url=base_url(spec),
            headers=_own_headers(spec),
            verify=tls_context(spec) or False,  # an http address needs no certificates, and they load slowly
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )
        self.lean = LeanClient(spec)

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
        answer_s: float | None = None,
    ) -> Any:  # noqa: ANN401 - JSON
        """Sends JSON or raw bytes; returns the JSON of the answer. `answer_s` replaces the time limit."""
        if content is None and json is not None:
            content = msgspec.json.encode(json)
        return _decoded(
            await self.fetch(method, path, content, headers, answer_s=answer_s), f"{method} {path}"
        )

    async def fetch(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        answer_s: float | None = None,
    ) -> bytes:
        """The bytes of the answer; see `call`."""
        kind = {"content-type": "application/json"} if content is not None else {}
        timeout = httpx.Timeout(answer_s, connect=_CONNECT_S) if answer_s else httpx.USE_CLIENT_DEFAULT
        try:
            response = await self._client.request(
                method, path, content=content, headers={**kind, **(headers or {})}, timeout=timeout
            )
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{method} {path}: {_describe(error)}") from error
        if response.is_success:
            return response.content
        raise _rejection(response.status_code, response.content)

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._client.aclose()
        await self.lean.aclose()


class JsonCaller(Protocol):
    """Calls an engine's routes with JSON: `ControlClient`, or its `lean` part."""

    async def call(self, method: str, path: str, *, json: object = None, content: bytes | None = None) -> Any:  # noqa: ANN401 - JSON
        """Sends JSON or raw bytes; returns the JSON answered. Raises EngineUnavailable and EngineRejected."""


class LeanClient:
    """Calls an engine's own routes over the data plane's transport, at a tenth of httpx's CPU.

    It waits as long as its caller: set a time-out.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._transport: AiohttpTransport | None = None
        self._closed = False

    async def call(self, method: str, path: str, *, json: object = None, content: bytes | None = None) -> Any:  # noqa: ANN401 - JSON
        """See `JsonCaller.call`."""
        if self._closed:
            raise EngineUnavailable("the engine was removed")
        if self._transport is None:  # made here, as it needs a running event loop
            self._transport = AiohttpTransport()
        body = JsonBody(content if content is not None else msgspec.json.encode(json))
        headers = {"content-type": "application/json"}
        request = prepare_request(self._spec, method, path, headers, body)
        async with await self._transport.send(request) as response:
            raw = await response.read()
        if not httpx.codes.is_success(response.status):
            raise _rejection(response.status, raw)
        return _decoded(raw, f"{method} {path}")

    async def aclose(self) -> None:
        """Closes its connections."""
        self._closed = True
        if self._transport is not None:
            await self._transport.aclose()


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


def max_model_len(models: object) -> int | None:
    """The context length of the first model of a `/v1/models` answer, if it says so."""
    match models:
        case {"data": [{"max_model_len": int(length)}, *_]}:
            return length
        case _:
            return None


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
        if name.lower() in _ENDS_HERE:
            raise EngineSpecError(f"engine {spec.id!r}: headers: kvpin sets {name!r} itself: leave it out")
        if not _HEADER_VALUE.fullmatch(value):
            raise EngineSpecError(
                f"engine {spec.id!r}: headers: {name!r} has a value that is not printable ASCII"
            )


def _describe(error: httpx.HTTPError) -> str:
    text = describe(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"{text}; name the authorities that signed its certificate: ca=FILE"
    return text


def _decoded(raw: bytes, call: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailable(f"{call}: the answer is not JSON") from error


def _rejection(status: int, content: bytes) -> EngineRejected | EngineUnavailable:
    """The exception for an error answer."""
    error = read_error(content)
    if status in (502, 503, 504):
        return EngineUnavailable(f"the engine answered {status}: {error.message}")
    return EngineRejected(error.message, status=status, param=error.param)
