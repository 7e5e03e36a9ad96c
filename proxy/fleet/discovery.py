"""Finds engines: in a file, in Kubernetes, in DNS (`discovery_dns.py`, which needs the extra `dns`).

A finder gives the whole set of engines to use now, whenever it changes. It raises SourceError if its source
fails. It is asked again; until it answers, the last set counts. `proxy.control.reconciler` lets the engines
join and leave.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from proxy.settings import (
    DiscoverySettings,
    EngineSettings,
    KubernetesSource,
    Settings,
    SettingsError,
    read_engines,
)

# --- engines as finders find them -----------------------------------------------------------------------


class SourceError(Exception):
    """A source of engines cannot be asked, or its answer cannot be used. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine of a source. `is_ready`: False if its source says that it should get no new requests."""

    entry: EngineSettings
    is_ready: bool = True


FoundEngines = tuple[FoundEngine, ...]


class Finder(Protocol):
    """Asks one source."""

    def found(self) -> AsyncIterator[FoundEngines]:
        """The whole set of its engines, now and whenever it may have changed. Never ends. Raises SourceError:
        the source fails. Call again later."""


@dataclass(slots=True)
class Source:
    """A source as it is now."""

    name: str
    finder: Finder
    found: FoundEngines = ()  # its engines by its last usable answer
    error: str | None = "not asked yet"  # why `found` may be old; None if its last answer could be used


# --- the engines behind Kubernetes services, from their EndpointSlices: list once, then watch -----------
# A pod that is not ready gets no new requests, and one that is gone leaves. Its engine is named after it:
# `<pod>.<namespace>`. Each watch ends after a minute and goes on from the version that it has seen, so that a
# lost connection is noticed. If the server no longer has that version (410), all slices are listed again.
#
# https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server, as a pod reaches it. `account`: directory of the service account: `token`, `ca.crt` and
    `namespace`."""

    url: str
    account: Path = _ACCOUNT

    @classmethod
    def of_pod(cls) -> ApiServer:
        """The cluster that this process runs in. Raises SourceError if it runs in none."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port:
            raise SourceError("kvpin does not run in a Kubernetes pod: KUBERNETES_SERVICE_HOST is not set")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def client(self, read_s: float) -> httpx.AsyncClient:
        """A client that waits `read_s` for the next piece of an answer. Raises SourceError."""
        try:
            verify = ssl.create_default_context(cafile=self.account / "ca.crt")
        except OSError as error:
            raise SourceError(f"the service account's ca.crt cannot be used: {error}") from error
        return httpx.AsyncClient(
            base_url=self.url,
            verify=verify,
            auth=self._authorised,
            timeout=httpx.Timeout(10.0, read=read_s),
            trust_env=False,
        )

    def _authorised(self, request: httpx.Request) -> httpx.Request:
        # Read for each request: Kubernetes writes a new token before the old one ends.
        request.headers["authorization"] = f"Bearer {self.read('token')}"
        return request

    def read(self, name: str) -> str:
        """A file of the service account. Raises SourceError."""
        try:
            return (self.account / name).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SourceError(f"the service account's {name} cannot be read: {error.strerror}") from error


# How long a watch lasts. The server may add some seconds.
WATCH_S = 60
_READ_S = WATCH_S + 15.0
# Between two watches: a server that ends each at once must not be asked all the time.
WATCH_PAUSE_S = 0.5


class _Object(msgspec.Struct, rename="camel"):
    pass


class _ObjectMeta(_Object):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class _Port(_Object):
    name: str | None = None
    port: int | None = None


class _Conditions(_Object):
    ready: bool | None = None


class _Target(_Object):
    kind: str = ""
    name: str = ""


class _Endpoint(_Object):
    addresses: list[str]
    conditions: _Conditions | None = None
    target_ref: _Target | None = None

    @property
    def is_ready(self) -> bool:
        """Nothing said means ready."""
        return self.conditions is None or self.conditions.ready is not False


class _EndpointSlice(_Object):
    """An EndpointSlice; or the Status that an error event has in its place."""

    metadata: _ObjectMeta = msgspec.field(default_factory=_ObjectMeta)
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None
    code: int = 0
    message: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """IPv4 sorts before IPv6: a pod may have both, and one is enough."""
        return self.address_type, self.metadata.namespace, self.metadata.name


class _List(_Object):
    metadata: _ObjectMeta
    items: list[_EndpointSlice]


class _WatchEvent(_Object):
    type: str
    object: _EndpointSlice


_Slices = dict[tuple[str, str, str], _EndpointSlice]


class _Gone(Exception):
    """The server no longer has the version to watch from."""


@dataclass(frozen=True, slots=True)
class KubernetesFinder:
    """Follows the slices that a selector matches. `cluster`: None for the one that this process runs in."""

    settings: DiscoverySettings
    source: KubernetesSource
    cluster: ApiServer | None = None

    async def found(self) -> AsyncIterator[FoundEngines]:
        """The engines of the slices, now and after each change."""
        cluster = self.cluster or ApiServer.of_pod()
        namespace = self.source.namespace or cluster.read("namespace")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        try:
            async with cluster.client(_READ_S) as client:
                while True:
                    try:
                        async for slices in self._follow(client, path):
                            yield self._engines(slices)
                    except _Gone:
                        await asyncio.sleep(WATCH_PAUSE_S)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise SourceError(f"Kubernetes: {str(error) or type(error).__name__}") from error

    async def _follow(self, client: httpx.AsyncClient, path: str) -> AsyncIterator[_Slices]:
        """All slices, now and after each change. Ends only by an error."""
        answer = await client.get(path, params={"labelSelector": self.source.selector})
        _check(answer)
        listed = msgspec.json.decode(answer.content, type=_List)
        slices = {each.key: each for each in listed.items}
        version = listed.metadata.resource_version
        yield slices
        while True:
            async for event in self._watch(client, path, version):
                version = event.object.metadata.resource_version
                if event.type == "DELETED":
                    slices.pop(event.object.key, None)
                elif event.type != "BOOKMARK":
                    slices[event.object.key] = event.object
                yield slices
            await asyncio.sleep(WATCH_PAUSE_S)

    async def _watch(self, client: httpx.AsyncClient, path: str, version: str) -> AsyncIterator[_WatchEvent]:
        """The changes after a version, for WATCH_S."""
        params = {
            "labelSelector": self.source.selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with client.stream("GET", path, params=params) as answer:
            if answer.is_error:
                await answer.aread()
            _check(answer)
            async for line in answer.aiter_lines():
                event = msgspec.json.decode(line, type=_WatchEvent)
                if event.type == "ERROR":
                    if event.object.code == HTTPStatus.GONE:
                        raise _Gone
                    raise SourceError(f"Kubernetes ended a watch: {event.object.message}")
                yield event

    def _engines(self, slices: _Slices) -> FoundEngines:
        found = dict[str, FoundEngine]()
        for key in sorted(slices):
            each = slices[key]
            if (port := self._port(each.ports or ())) is None:
                continue
            for endpoint in each.endpoints or ():
                host, target = endpoint.addresses[0], endpoint.target_ref
                name = f"{target.name}.{each.metadata.namespace}" if target else f"{host}-{port}"
                entry = self.settings.engine(name, host, port)
                known = found.get(entry.id)
                # While an endpoint moves, it is in two slices.
                if known is None or (endpoint.is_ready and not known.is_ready):
                    found[entry.id] = FoundEngine(entry, endpoint.is_ready)
        return tuple(found.values())

    def _port(self, ports: Iterable[_Port]) -> int | None:
        """The engines' port in a slice; None if it has none of that name."""
        if self.source.port.isdecimal():
            return int(self.source.port)
        named = [each.port for each in ports if self.source.port in ("", each.name)]
        if len(named) > 1:
            text = "Kubernetes: the service has several ports: name one, as in kubernetes://llm/vllm:http"
            raise SourceError(text)
        return named[0] if named else None


def _check(answer: httpx.Response) -> None:
    """Raises SourceError or _Gone for an error."""
    if answer.status_code == HTTPStatus.GONE:
        raise _Gone
    if answer.is_error:
        said = f"Kubernetes answers {answer.status_code} {answer.reason_phrase}"
        with suppress(msgspec.DecodeError):
            if reason := msgspec.json.decode(answer.content, type=_EndpointSlice).message:
                said += f": {reason}"
        raise SourceError(said)


# --- the finder of each source that the settings name ---------------------------------------------------

PAUSE_S = 1.0

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FileFinder:
    """Looks at a file every second. It notices a Kubernetes ConfigMap, too, which changes as a link."""

    path: Path

    async def found(self) -> AsyncIterator[FoundEngines]:
        """The engines of the file, now and whenever it has changed."""
        seen: _Stamp | None = None
        while True:
            # In a thread: the file may be on a network's disk.
            seen, engines = await asyncio.to_thread(self._read, seen)
            if engines is not None:
                yield tuple(map(FoundEngine, engines))
            await asyncio.sleep(PAUSE_S)

    def _read(self, seen: _Stamp | None) -> tuple[_Stamp, tuple[EngineSettings, ...] | None]:
        """A stamp that changes with the file, and the file's engines if it has changed."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            return stamp, read_engines(self.path) if stamp != seen else None
        except OSError as error:
            raise SourceError(f"file {str(self.path)!r} cannot be read: {error.strerror}") from error
        except SettingsError as error:
            raise SourceError(str(error)) from error


def finders_of(settings: Settings) -> Iterator[tuple[str, Finder]]:
    """Source names and their finders. Raises SettingsError if a package is missing for one."""
    if settings.engines_file is not None:
        yield str(settings.engines_file), FileFinder(settings.engines_file)
    for entry in settings.discovery:
        source = entry.place
        if isinstance(source, KubernetesSource):
            yield entry.source, KubernetesFinder(entry, source)
            continue
        try:
            from proxy.fleet.discovery_dns import DnsFinder  # noqa: PLC0415 - it needs a package of an extra
        except ImportError as error:
            text = f"discovery {entry.source!r} needs dnspython: pip install 'kvpin[dns]'"
            raise SettingsError(text) from error
        yield entry.source, DnsFinder(entry, source)
