"""The headers of an engine's answer that its client gets, and the form of those that kvpin adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from engine_adapter import EngineSpec, HeaderPairs, Headers, IncomingResponse, base_url
from proxy.core.quotas import Left
from proxy.headers import CACHED_HEADER, DROPPED_HEADERS, LIMIT_PREFIX, OWN_PREFIX, RETRY_HEADERS

_DROPPED = frozenset(name.encode() for name in DROPPED_HEADERS)
# Of an answer that has no other address.
_DROPPED_IF_OK = _DROPPED | {b"location"}
_OWN_PREFIX, _LIMIT_PREFIX = OWN_PREFIX.encode(), LIMIT_PREFIX.encode()
_CREATED, _MULTIPLE_CHOICES = 201, 300
_SECOND_MS, _MINUTE_MS = 1000, 60_000
_OF_AN_ERROR = frozenset({*RETRY_HEADERS, "allow"})
# Headers of a stream that do not apply to the JSON answer assembled from it.
_OF_A_STREAM = frozenset({b"content-type", b"content-length", b"cache-control", b"x-accel-buffering"})


def passed_on(response: IncomingResponse, spec: EngineSpec) -> HeaderPairs:
    """The headers of an engine's answer that its client gets."""
    is_redirection = response.status >= _MULTIPLE_CHOICES
    dropped = _DROPPED if is_redirection or response.status == _CREATED else _DROPPED_IF_OK
    kept = [
        pair
        for pair in response.headers.raw
        if pair[0] not in dropped and not pair[0].startswith(_OWN_PREFIX)
    ]
    return [pair for each in kept if (pair := _at_kvpin(each, spec)) is not None] if is_redirection else kept


def of_json(headers: HeaderPairs) -> HeaderPairs:
    """The headers of the JSON answer that was assembled from a stream with these headers."""
    kept = [pair for pair in headers if pair[0] not in _OF_A_STREAM]
    return [*kept, (b"content-type", b"application/json")]


def told_with_error(headers: Headers) -> dict[str, str]:
    """The headers of an engine's error that its client gets: about retries, and the methods of a route."""
    return {
        name: value
        for name, value in headers.items()
        if value.isascii() and (name in _OF_AN_ERROR or name.startswith(LIMIT_PREFIX))
    }


def pairs(headers: Mapping[str, str]) -> HeaderPairs:
    """Headers that kvpin adds, as bytes; names are in lower case."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def with_limits(headers: HeaderPairs, limits: Iterable[Left]) -> HeaderPairs:
    """Headers of an answer to a tenant with these limits, as OpenAI tells them. An engine's own are left out:
    they are about kvpin's key there."""
    kept = [pair for pair in headers if not pair[0].startswith(_LIMIT_PREFIX)]
    for each in limits:
        told = {"limit": each.limit, "remaining": each.remaining, "reset": _duration(each.reset_s)}
        kept += pairs({f"{LIMIT_PREFIX}{name}-{each.what}": str(value) for name, value in told.items()})
    return kept


def _duration(seconds: float) -> str:
    """Seconds as OpenAI writes them, rounded up to milliseconds: `120ms`, `1.5s`, `6m0s`."""
    ms = max(ceil(seconds * 1000), 0)
    if ms < _SECOND_MS:
        return f"{ms}ms"
    minutes, rest = divmod(ms, _MINUTE_MS)
    return f"{minutes}m{rest / _SECOND_MS:g}s" if minutes else f"{rest / _SECOND_MS:g}s"


def of_cached(cached: int | None) -> HeaderPairs:
    """The header that tells a client how many of its prompt's tokens were cached, if that is known."""
    return [] if cached is None else pairs({CACHED_HEADER: str(cached)})


def _at_kvpin(header: tuple[bytes, bytes], spec: EngineSpec) -> tuple[bytes, bytes] | None:
    """A header of a redirection. One to the engine's own address leads to the same path at kvpin; None for
    one to another address, which is no client's business."""
    name, value = header
    if name != b"location":
        return header
    path = value.removeprefix(base_url(spec).encode())
    return (name, path) if path.startswith(b"/") and not path.startswith(b"//") else None
