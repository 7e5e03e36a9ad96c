"""The composition root: the only file that builds the collaborators and connects them.

    settings → fleet, tables, tenants → ingest → monitor → flow → data plane, admin, ops → one site

`server.py` runs it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from engine_adapter import (
    EngineSpecError,
    Transport,
    check_kind,
    make_adapter,
    prepare_managed,
)
from proxy.api.admin import EngineRoutes, KvRoutes, RequestRoutes, TableRoutes, admin_mount
from proxy.api.auth import AdminGuard
from proxy.api.cors import Cors
from proxy.api.errors import handle, handle_http
from proxy.api.openai import DataPlane
from proxy.api.ops import Ops
from proxy.api.responses import KeptResponses
from proxy.api.site import Site
from proxy.control.engines import Engines
from proxy.control.kv import KvVerbs
from proxy.control.operations import Operations
from proxy.control.pinning import Pinning
from proxy.control.tables import SharedTables
from proxy.control.targets import Targets
from proxy.control.warm import Warming
from proxy.core.pins import PinBook
from proxy.fleet.destinations import Destinations
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.monitor import Monitor
from proxy.fleet.restore_ahead import RestoreAhead
from proxy.flow import Flow
from proxy.observe.loop_lag import LoopLag
from proxy.observe.metrics import Metrics
from proxy.observe.recorder import Recorder
from proxy.process.managed import ManagedEngine
from proxy.prompt import MediaUuids, PromptTables
from proxy.request.error_table import ANSWERED
from proxy.request.forward import Forwarder
from proxy.request.records import RequestLog, RequestRecord
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import EngineSettings, ManagedSettings, Settings
from proxy.tasks import Supervisor
from proxy.translate import ResponseStore, translations

log = structlog.get_logger(__name__)


class Proxy:
    """All collaborators of one proxy."""

    def __init__(self, settings: Settings, transport: Transport) -> None:
        self.settings = settings
        self.transport = transport
        self.tasks = Supervisor()
        self.fleet = Fleet(settings.model_aliases, settings.default_model)
        self.tables = PromptTables(max_bytes=settings.limits.prompt_table_bytes)
        self.tenants = Tenants(
            ApiKey.of(entry.key.get_secret_value(), entry.tenant_id) for entry in settings.api_keys
        )
        self.responses = ResponseStore(len(self.tenants.names))
        self.ingest = Ingest(self.fleet, self.tasks, self.tenants.owner) if settings.reuse else None
        self.monitor = Monitor(
            self.fleet,
            self.tasks,
            self.ingest,
            self.tables,
            interval_s=settings.health.interval_s,
            timeout_s=settings.health.timeout_s,
            isolated=self.tenants.isolated,
        )
        self.ahead = (
            RestoreAhead(self.fleet, self.tasks) if settings.reuse and settings.restore_ahead else None
        )
        self.metrics = Metrics(self.fleet)
        self.recorder = (
            Recorder(settings.record_traffic, int(settings.record_traffic_bytes))
            if settings.record_traffic is not None
            else None
        )
        self.flow = Flow(
            fleet=self.fleet,
            destinations=Destinations(self.fleet, isolated=self.tenants.isolated),
            forwarder=Forwarder(transport),
            ingest=self.ingest,
            tenants=self.tenants,
            media=MediaUuids(trusted=settings.trust_media_uuids),
            requests=RequestLog(settings.limits.request_records),
            retries=settings.retries,
            observe=self.observe,
            translations=translations(self.responses),
        )
        self.managed: list[ManagedEngine] = []

    def observe(self, record: RequestRecord) -> None:
        """Counts and records a finished request."""
        self.metrics.observe(record)
        if self.recorder is not None:
            self.recorder.observe(record)
        if self.ahead is not None:
            self.ahead.observe(record)

    def start(self) -> None:
        """Starts the managed engines and the watch of every engine."""
        lag = LoopLag(self.metrics.loop_lag.observe, explain=self.settings.logs.level == "debug")
        self.tasks.keep("loop lag", lag.run)
        if self.recorder is not None:
            self.tasks.start("recorder", self.recorder.run())
        if self.ahead is not None:
            self.tasks.keep("restore ahead", self.ahead.run)
        for external in self.settings.engines:
            self.monitor.watch(self.fleet.add(make_adapter(external.spec())))
        for managed in managed_engines(self.settings):
            process = ManagedEngine(managed)
            engine = self.fleet.add(make_adapter(process.spec))
            engine.process = process
            self.managed.append(process)
            self.tasks.start(f"process {managed.id}", process.run())
            self.monitor.watch(engine)

    async def stop(self) -> None:
        """Closes adapters, then background work, then the engines kvpin started, then connections.

        A failure of one is logged and does not keep the others from being closed.
        """
        for engine in self.fleet.engines.values():
            self.monitor.forget(engine)
        # Managed engines still run here: an adapter may have KV to save.
        await _close_all({engine.id: engine.adapter.aclose() for engine in self.fleet.engines.values()})
        await self.tasks.stop()
        if self.recorder is not None:
            await self.recorder.aclose()
        await _close_all({process.id: process.stop() for process in self.managed})
        await self.transport.aclose()


async def _close_all(closing: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Runs all of them side by side, by engine id."""
    results = await asyncio.gather(*closing.values(), return_exceptions=True)
    for engine_id, result in zip(closing, results, strict=True):
        if isinstance(result, Exception):
            log.error("engine not closed cleanly while kvpin stops", engine=engine_id, exc_info=result)


def managed_engines(settings: Settings) -> tuple[ManagedSettings, ...]:
    """The engines that kvpin starts. If no engine is named: two embedded ones that share the cores."""
    if settings.engines or settings.managed:
        return settings.managed
    threads = max((os.cpu_count() or 2) // 2, 1)
    command = ("--threads", str(threads), "--host-cache-bytes", "256MiB")
    return tuple(ManagedSettings(kind="embedded", id=f"embedded-{n}", command=command) for n in range(2))


def check_engines(settings: Settings) -> None:
    """Raises EngineSpecError for an engine that cannot run on this machine."""
    managed = managed_engines(settings)
    engines: tuple[EngineSettings | ManagedSettings, ...] = (*settings.engines, *managed)
    for engine in engines:
        with _named(engine.id):
            check_kind(engine.kind)
    for started in managed:
        with _named(started.id):
            prepare_managed(started.spec(0), started.command)


@contextmanager
def _named(engine_id: str) -> Iterator[None]:
    """Names the engine in the EngineSpecError of the block."""
    try:
        yield
    except EngineSpecError as error:
        raise EngineSpecError(f"engine {engine_id!r}: {error}") from error


def build_app(proxy: Proxy) -> Site:
    """All that is served, over a proxy's collaborators; the caller starts and stops those."""
    settings = proxy.settings
    cors = Cors(settings.cors_origins) if settings.cors_origins else None
    limit = int(settings.limits.body_bytes)
    data_plane = DataPlane(
        proxy.flow, proxy.tenants, limit, KeptResponses(proxy.responses), cors, proxy.metrics.refuse
    )
    rest = Starlette(
        routes=[admin_api(proxy), *Ops(proxy.fleet, proxy.metrics).routes()],
        exception_handlers={
            **dict.fromkeys(ANSWERED, handle),
            HTTPException: handle_http,
        },
    )
    rest.router.redirect_slashes = False  # such an answer leads to the host that the client named
    return Site(data_plane, rest)


def admin_api(proxy: Proxy) -> Mount:
    """The admin API over a proxy's collaborators."""
    fleet, flow, reuse = proxy.fleet, proxy.flow, proxy.ingest is not None
    operations, pins = Operations(proxy.tasks), PinBook()
    targets = Targets(fleet, proxy.tenants, flow.requests, has_views=reuse)
    warming = Warming(flow, targets, operations)
    pinning = Pinning(fleet, targets, pins, operations)
    kv = KvVerbs(targets, warming, pins, proxy.ingest, operations)
    engines = Engines(fleet, proxy.monitor, pins, operations, make_adapter)
    endpoints = (
        *EngineRoutes(fleet, engines, pinning, reuse=reuse).endpoints(),
        *KvRoutes(kv, warming, pinning, operations).endpoints(),
        *RequestRoutes(flow).endpoints(),
        *TableRoutes(SharedTables(fleet, proxy.tables)).endpoints(),
    )
    key = proxy.settings.admin_key
    return admin_mount(endpoints, AdminGuard(key.get_secret_value() if key else None))
