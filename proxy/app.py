"""The composition root: the only place that builds collaborators and wires them together.

    settings → fleet, tables, tenants → ingest → monitor → flow → data plane, admin, ops → one ASGI app

`serve` runs it: binds the port first, so that a taken one is told before anything is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import structlog
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from engine_adapter import (
    ENGINE_KINDS,
    AiohttpTransport,
    EngineError,
    EngineSpecError,
    Transport,
    make_adapter,
    prepare_managed,
)
from proxy import errors
from proxy.api.admin import Control, admin_routes
from proxy.api.auth import AdminGuard
from proxy.api.errors import handle, handle_http
from proxy.api.http1 import Http1Protocol
from proxy.api.openai import DataPlane
from proxy.api.ops import Ops
from proxy.core.pins import PinBook
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.monitor import Monitor
from proxy.fleet.restore_ahead import RestoreAhead
from proxy.flow import Flow
from proxy.observe.banner import Banner
from proxy.observe.logs import configure_logs
from proxy.observe.metrics import Metrics
from proxy.observe.recorder import Recorder
from proxy.process.managed import ManagedEngine
from proxy.prompt import MediaUuids, PromptTables
from proxy.request.forward import Forwarder
from proxy.request.records import RequestLog, RequestRecord
from proxy.request.tenants import ApiKey, Tenants
from proxy.settings import EngineSettings, ManagedSettings, Settings, SettingsError
from proxy.tasks import Supervisor

log = structlog.get_logger(__name__)


class Proxy:
    """All collaborators of one running proxy."""

    def __init__(self, settings: Settings, transport: Transport) -> None:
        self.settings = settings
        self.transport = transport
        self.tasks = Supervisor()
        self.fleet = Fleet()
        self.tables = PromptTables(max_bytes=settings.limits.prompt_table_bytes)
        self.tenants = Tenants(
            ApiKey.of(entry.key.get_secret_value(), entry.tenant_id) for entry in settings.api_keys
        )
        self.ingest = Ingest(self.fleet, self.tasks) if settings.reuse else None
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
            forwarder=Forwarder(transport),
            ingest=self.ingest,
            tenants=self.tenants,
            media=MediaUuids(trusted=settings.trust_media_uuids),
            requests=RequestLog(settings.limits.request_records),
            retries=settings.retries,
            observe=self.observe,
        )
        self.managed: list[ManagedEngine] = []

    def observe(self, record: RequestRecord) -> None:
        """A request is over."""
        self.metrics.observe(record)
        if self.recorder is not None:
            self.recorder.observe(record)
        if self.ahead is not None:
            self.ahead.observe(record)

    def start(self) -> None:
        """Starts managed engines and looks after all of them."""
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
        """Ends adapters, then background work, then the engines, then connections."""
        for engine in self.fleet.engines.values():
            self.monitor.forget(engine)
        # While managed engines still run: an adapter may have KV to save.
        await self._close_adapters()
        await self.tasks.stop()
        if self.recorder is not None:
            await self.recorder.aclose()
        for process in self.managed:
            await process.stop()
        await self.transport.aclose()

    async def _close_adapters(self) -> None:
        """Closes all adapters. One that fails is logged, and the others are closed all the same."""
        engines = list(self.fleet.engines.values())
        closing = (engine.adapter.aclose() for engine in engines)
        results = await asyncio.gather(*closing, return_exceptions=True)
        for engine, error in zip(engines, results, strict=True):
            if error is not None:
                log.error("the engine's adapter failed to close", engine=engine.id, exc_info=error)


def managed_engines(settings: Settings) -> tuple[ManagedSettings, ...]:
    """The engines kvpin starts itself. Without any engine named, two embedded ones that share the cores."""
    if settings.engines or settings.managed:
        return settings.managed
    threads = max((os.cpu_count() or 2) // 2, 1)
    command = ("--threads", str(threads), "--host-cache-bytes", "256MiB")
    return tuple(ManagedSettings(kind="embedded", id=f"embedded-{n}", command=command) for n in range(2))


def check_engines(settings: Settings) -> None:
    """Raises EngineSpecError for an engine that could never run, before anything is started."""
    managed = managed_engines(settings)
    engines: tuple[EngineSettings | ManagedSettings, ...] = (*settings.engines, *managed)
    for engine in engines:
        if engine.kind not in ENGINE_KINDS:
            raise EngineSpecError(
                f"engine {engine.id!r} has unknown kind {engine.kind!r}: use one of {', '.join(ENGINE_KINDS)}"
            )
    for engine in managed:
        try:
            prepare_managed(engine.spec(0), engine.command)
        except EngineSpecError as error:
            raise EngineSpecError(f"engine {engine.id!r}: {error}") from error


def build_app(proxy: Proxy, on_start: Callable[[], None] = lambda: None) -> Starlette:
    """The ASGI application over a proxy's collaborators."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            proxy.start()
            on_start()
            yield
        finally:
            await proxy.stop()

    control = Control(
        fleet=proxy.fleet,
        flow=proxy.flow,
        monitor=proxy.monitor,
        tables=proxy.tables,
        tenants=proxy.tenants,
        requests=proxy.flow.requests,
        pins=PinBook(),
        tasks=proxy.tasks,
        make_adapter=make_adapter,
        clock=time.monotonic,
    )
    admin_key = proxy.settings.admin_key
    guard = AdminGuard(admin_key.get_secret_value() if admin_key else None)
    data_plane = DataPlane(proxy.flow, proxy.tenants, int(proxy.settings.limits.body_bytes))
    return Starlette(
        routes=[
            Mount("/v1", app=data_plane),
            *admin_routes(control, guard),
            *Ops(proxy.fleet, proxy.metrics).routes(),
        ],
        exception_handlers={
            **dict.fromkeys((errors.ProxyError, EngineError, msgspec.DecodeError), handle),
            HTTPException: handle_http,
        },
        lifespan=lifespan,
    )


def serve(settings: Settings) -> int:
    """Runs the proxy until SIGTERM or SIGINT; returns the exit status."""
    configure_logs(settings.logs)
    try:
        check_engines(settings)
    except EngineSpecError as error:
        sys.stderr.write(f"kvpin: {error}\n")
        return 2
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        # What Python adds in brackets says the address once more.
        reason = (error.strerror or str(error)).partition(" (")[0]
        sys.stderr.write(f"kvpin: cannot listen on {settings.host}:{settings.port}: {reason}\n")
        return 1
    if not settings.reuse:
        log.warning(
            "KV cache reuse is off: plain least-loaded balancing. Turn it on: ENABLE_KV_CACHE_REUSE=1"
        )
    # uvicorn drains on these and then raises them again, for handlers that stood before its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


async def _run(settings: Settings, listener: socket.socket) -> int:
    transport = AiohttpTransport()
    try:
        proxy = Proxy(settings, transport)
    except SettingsError as error:
        await transport.aclose()
        sys.stderr.write(f"kvpin: {error}\n")
        return 2
    host, port = listener.getsockname()[:2]
    banner = Banner(proxy.fleet, host, port, reuse=settings.reuse)
    banner.print_addresses()
    app = build_app(proxy, on_start=lambda: proxy.tasks.start("banner", banner.print_when_ready()))
    config = uvicorn.Config(
        app,
        http=Http1Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # an address a client claims must not open the admin API
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(settings.graceful_shutdown_s),
    )
    server = uvicorn.Server(config)
    await server.serve(sockets=[listener])
    return 0 if server.started else 1
