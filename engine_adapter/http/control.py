"""kvpin's own calls of an engine's routes, apart from the data plane, and values of its metrics page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine_adapter.body import UNREADABLE
from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy
from engine_adapter.http.answer_fields import read_error
from engine_adapter.http.client import HttpTransport
from engine_adapter.http.connection import IncomingResponse
from engine_adapter.http.prepare import Headers, OutgoingRequest, parts_of
from engine_adapter.types import EngineSpec

# --- kvpin's own calls of an engine's routes, apart from the data plane ---------------------------------

ANSWER_S = 60.0
NO_SUCH_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
"""Statuses by which servers answer on a route that they lack."""
WANTS_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""Statuses by which servers ask for a key, or for another one."""
# The longest answer: the token ids of the longest prompt fit in it several times.
MAX_ANSWER_BYTES = 64 << 20
# Characters that are kept of an error.
MAX_REASON = 2_000
_CONNECT_S = 5.0
# Characters that a path may contain besides letters and digits. The path is percent-encoded already, or a
# plain name.
_UNQUOTED = "/?&=%:@!$'()*+,;-._~"
_ANY_JSON: Any = Any
_Answer = TypeVar("_Answer")


class ControlClient:
    """Calls an engine's own routes, apart from the data plane.

    Every call raises EngineUnavailable if there is no answer, and EngineRejected if the answer is an error.
    `on_closed`: called when the engine closes an idle connection."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        self._engine = parts_of(spec)
        self._has_key = bool(spec.api_key)
        self._transport = HttpTransport(connect_timeout_s=_CONNECT_S, closed=self._was_closed)
        self._closed = False
        self.on_closed: Callable[[], None] | None = None

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
    ) -> Any:  # noqa: ANN401 - JSON
        """Sends JSON or raw bytes; returns the JSON of the answer. See `fetch`."""
        return await self.read(_ANY_JSON, method, path, json=json, content=content, headers=headers)

    async def read(
        self,
        kind: type[_Answer],
        method: str,
        path: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_S,
    ) -> _Answer:
        """Sends JSON or raw bytes, see `fetch`; returns the JSON of the answer as `kind`. Raises
        EngineUnavailable for an answer of another form, too."""
        if content is None and json is not None:
            content = msgspec.json.encode(json)
        return _decoded(
            kind, f"{method} {path}", await self.fetch(method, path, content, headers, answer_s=answer_s)
        )

    async def read_optional(self, kind: type[_Answer], path: str) -> _Answer | None:
        """The JSON at `path` as `kind`; None if the engine has no such route."""
        raw = await self.fetch_optional(path)
        return None if raw is None else _decoded(kind, f"GET {path}", raw)

    async def fetch_optional(self, path: str) -> bytes | None:
        """The bytes at `path`; None if the engine has no such route."""
        try:
            return await self.fetch("GET", path)
        except EngineRejected as error:
            if error.status in NO_SUCH_ROUTE:
                return None
            raise

    async def status(self, method: str, path: str, *, json: object = None) -> int:
        """The HTTP status of the answer, 200 for every success: shows whether a route exists."""
        try:
            await self.fetch(method, path, None if json is None else msgspec.json.encode(json))
        except EngineRejected as error:
            return error.status
        return HTTPStatus.OK

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
            raise type(error)(f"{method} {path}: {error}") from error
        except TimeoutError as error:
            raise EngineUnhealthy(f"{method} {path}: no answer within {answer_s:g} s") from error
        if not 200 <= status < 300:  # noqa: PLR2004 - HTTP
            raise self._rejection(status, raw, has_content=content is not None)
        return raw

    @asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[IncomingResponse]:
        """The answer at `path`, to be read as it comes."""
        url = self._engine.url + quote(path, _UNQUOTED)
        request = OutgoingRequest("GET", url, self._engine.headers, None, self._engine.tls)
        async with await self._transport.send(request) as response:
            if response.status != HTTPStatus.OK:
                raise self._rejection(response.status, await response.read(), has_content=False)
            yield response

    async def aclose(self) -> None:
        """Closes its connections."""
        self._closed = True
        await self._transport.aclose()

    def _was_closed(self) -> None:
        if self.on_closed is not None and not self._closed:
            self.on_closed()

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

    def _rejection(
        self, status: int, content: bytes, *, has_content: bool
    ) -> EngineRejected | EngineUnavailable:
        """The exception for an error answer. The answer to content may repeat it: a log line must not."""
        error = read_error(content)
        reason = error.message[:MAX_REASON]
        if status in (502, 503, 504):
            own_words = f"the engine answered {status}"
            return EngineUnhealthy(f"{own_words}: {reason}", own_words=own_words if has_content else None)
        if status in WANTS_KEY:
            wish = "refuses the key of kvpin: give another one" if self._has_key else "wants a key: give it"
            reason = f"it {wish} as api_key=KEY (it says: {reason})"
        return EngineRejected(reason, status=status, param=error.param)


def _decoded(kind: type[_Answer], call: str, raw: bytes) -> _Answer:
    """The JSON of an answer as `kind`; see `ControlClient.read`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"{call}: the answer is not as expected: {error}") from error
    except UNREADABLE as error:
        raise EngineUnhealthy(f"{call}: the answer is not JSON") from error


# --- reads a few metrics from an engine's `/metrics` page -----------------------------------------------
# A page may have 100 kB, and every engine's page is read every second. So only the lines of the requested
# metrics are looked at, and the labels of a series, which stay the same from page to page, are parsed once.

# Series whose labels are kept parsed, of all engines together. Engines of one model share theirs.
_SERIES = 4096


class Samples:
    """The requested values of a page."""

    def __init__(self, samples: Collection[Sample]) -> None:
        self._samples = tuple(samples)

    def all(self, name: str, **labels: str) -> list[Sample]:
        """The samples of a name whose labels include `labels`."""
        wanted = labels.items()
        return [s for s in self._samples if s.name == name and wanted <= s.labels.items()]

    def sum(self, name: str, **labels: str) -> float | None:
        """The sum of such samples; None if there are none."""
        values = [sample.value for sample in self.all(name, **labels)]
        return sum(values) if values else None

    def labels(self, name: str, **labels: str) -> Mapping[str, str]:
        """All labels of the first such sample; {} if there are none."""
        return next((sample.labels for sample in self.all(name, **labels)), {})


def read_samples(page: bytes, names: Collection[str]) -> Samples:
    """The samples of `page` with one of these names and a finite value: NaN and infinity tell nothing. Raises
    EngineUnhealthy: the page is not in Prometheus text format."""
    try:
        text = f"\n{page.decode()}"
        samples = [_sample(name, line) for name in names for line in _group(text, name)]
    except ValueError as error:
        raise EngineUnhealthy(f"/metrics cannot be read: {error}") from error
    return Samples([sample for sample in samples if math.isfinite(sample.value)])


def _group(page: str, name: str) -> Iterator[str]:
    """The samples of a metric. The format keeps them in one group, so the search ends after the first one."""
    start = f"\n{name}"
    at = page.find(start)
    while at >= 0 and not page.startswith(("{", " "), at + len(start)):  # a longer name
        at = page.find(start, at + 1)
    while at >= 0 and page.startswith((f"{start}{{", f"{start} "), at):
        stop = page.find("\n", at + 1)
        yield page[at + 1 : stop] if stop >= 0 else page[at + 1 :]
        at = stop


def _sample(name: str, line: str) -> Sample:
    """A line is `name{labels} value`, perhaps with a time stamp. Raises ValueError for any other."""
    series, brace, rest = line.rpartition("}") if "{" in line else line.partition(" ")
    values = rest.split(None, 1)
    if not brace or not values:
        raise ValueError(f"{line!r} is not a sample")
    return Sample(name, _labels(series + brace), float(values[0]))


@lru_cache(_SERIES)
def _labels(series: str) -> dict[str, str]:
    """The labels of `name{labels}`. Raises ValueError."""
    (family,) = text_string_to_metric_families(f"{series} 0")
    (sample,) = family.samples
    return sample.labels
