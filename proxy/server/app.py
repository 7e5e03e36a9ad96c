"""The composition root: the only file that builds the collaborators and connects them.

    settings → fleet, tables, tenants → ingest → monitor → flow → data plane, admin, ops → one dispatcher

`run.py` runs it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import structlog
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route

from engine_adapter import HttpTransport, make_adapter
from engine_adapter.memory import available_bytes
from engine_adapter.off_loop import JsonSize
from proxy.api import admin
from proxy.api.auth import AdminGuard, Cors, MetricsGuard
from proxy.api.dispatch import Dispatcher, Ops
from proxy.api.hand_over import HAND_OVER_PATH, HandOver
from proxy.api.openai import DataPlane
from proxy.api.own_answers import KeptResponses, handle, handle_http
from proxy.api.page import WebPage
from proxy.api.relay import PassedToKeeper, PassedToOwner
from proxy.api.siblings import USES_PATH, Siblings, ask
from proxy.api.together import ORDERS_PATH, Together, peer_routes
from proxy.control.keys import KEYS_PATH, IssuedKeys, SharedTables
from proxy.control.kv import KvOrders
from proxy.control.live import Live
from proxy.control.operations import Operations
from proxy.control.prefixes import PROMPTS_PATH, Prefixes
from proxy.control.reconciler import Reconciler
from proxy.control.replays import Replays
from proxy.control.target_engines import Targets
from proxy.core.books import KeyBook, decode_marks, encode_marks
from proxy.core.life import Rules
from proxy.core.quotas import ByteBudget, UseBook
from proxy.errors import ANSWERED
from proxy.fleet.destinations import Destinations
from proxy.fleet.discovery import finders_of
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.lower_tiers import RestoreAhead
from proxy.fleet.monitor import Monitor
from proxy.fleet.saved_state import StateSaver
from proxy.fleet.state_files import KeyBookFile
from proxy.flow import Flow
from proxy.observe.metrics import Metrics
from proxy.observe.recorder import EngineWatch, Recorder
from proxy.peers.peers import Peers
from proxy.prompt import MediaUuids, RegisteredTables
from proxy.request.gate import Gate
from proxy.request.normalising import ChosenRules, Normalising
from proxy.request.records import RequestRecord, RequestRecords
from proxy.request.tenants import ApiKey, Tenants
from proxy.request.translate import ResponseStore, translations
from proxy.runtime import Supervisor, measure_lag, within
from proxy.server.checks import (
    all_engines,
    check,
    check_reload,
    make_bus,
    telemetry_module,
)
from proxy.server.group_secret import group_secret
from proxy.settings import EngineChanges, Settings
from proxy.steps.attempt import Attempts
from proxy.steps.preparation import Preparation

log = structlog.get_logger(__name__)

_LAST_S = 1.0  # how long a worker that stops waits for the one that speaks for all
_USUAL_MEMORY = 4 << 30  # where the system does not tell how much memory is available


class Proxy:
    """All collaborators of one proxy."""

    def __init__(
        self, settings: Settings, transport: HttpTransport, siblings: Siblings | None = None
    ) -> None:
        """`siblings`: the other workers of this kvpin."""
        self.settings = settings
        self.siblings = siblings
        self.transport = transport
        self.tasks = Supervisor()
        secret = group_secret(self._shared_state_dir(), settings.exchange)
        self.fleet = Fleet(
            settings.model_aliases,
            settings.default_model,
            settings.limits,
            settings.shown_name,
            secret.for_roots,
        )
        self.tables = RegisteredTables(max_bytes=settings.limits.prompt_table_bytes)
        directory = self._shared_state_dir()
        key_file = KeyBookFile(directory) if directory is not None else None
        issued = KeyBook()
        issued.merge(key_file.read() if key_file is not None else ())
        self.tenants = Tenants(_keys(settings), settings.tenant_limits, issued, secret.for_salts)
        named = lambda: {each.tenant for each in self.settings.api_keys if each.tenant is not None}  # noqa: E731 - short
        self.keys = IssuedKeys(issued, key_file, named, partial(self._ask_workers, KEYS_PATH))
        self.gate = Gate(self.tenants, ByteBudget(_bodies_bytes(settings)), int(settings.limits.body_bytes))
        self.peers = self._peers(secret.encoded)
        self.responses = ResponseStore(self.tenants.names)
        self.use = UseBook()
        self.state: StateSaver | None = None
        if (own := settings.state_dir) is not None:
            self.state = StateSaver(own, self.tenants, self.use, self._left_by_workers(own))
        memories = self.state.memories if self.state is not None else {}
        self.ingest = Ingest(self.fleet, self.tasks, self.tenants.owner, memories) if settings.reuse else None
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
        self.operations, self.pins = Operations(self.tasks), self.fleet.pins
        if self.state is not None:
            self.state.restore(self.pins, self.tables, self.fleet.book)
        self.engines = Reconciler(self.fleet, self.monitor, self.operations, self.tasks, make_adapter)
        self.monitor.split = self.engines.split
        self.metrics = Metrics(
            self.fleet,
            self.engines.sources,
            self.peers,
            tenants=settings.tenant_metrics,
            bodies=self.gate.bodies,
            use=self.use,
        )
        self.telemetry = telemetry_module()(self.page) if settings.otel else None
        self.traces = self.telemetry.traces if self.telemetry is not None else None
        self.draining = asyncio.Event()
        self.live = Live(self.fleet, self.metrics, self.tasks, self.draining, reuse=settings.reuse)
        self.hand_over: HandOver | None = None
        if siblings is not None:
            shared = self.peers is not None
            self.hand_over = HandOver(
                siblings, transport, self.fleet, self.metrics, self.live, is_shared=shared
            )
        self.watch = EngineWatch(self.fleet)
        self.recorder = self._recorder()
        self.destinations = Destinations(self.fleet, self.tenants.names)
        self.tenants.listeners.append(self._divide)
        self.flow = self._flow()
        self.prefixes = Prefixes(
            self.fleet, self.flow.requests, self.pins, partial(self._ask_workers, PROMPTS_PATH)
        )

    def _recorder(self) -> Recorder | None:
        """Writes the traffic to a file; None unless the settings name one."""
        settings = self.settings
        if settings.record_traffic is None:
            return None
        return Recorder(
            settings.record_traffic,
            int(settings.record_traffic_bytes),
            self.watch.engines,
            _text(settings.record_traffic_key),
            self._is_system_first,
            tells_tenants=settings.record_traffic_tenants,
        )

    def _is_system_first(self, model: str | None) -> bool:
        """True if a model's chat template is known here, and writes the system prompt before the tools."""
        pool = self.fleet.pools.get(model) if model is not None else None
        prompts = pool.prompts if pool is not None else None
        return prompts is not None and prompts.local is not None and prompts.local.is_system_first

    def _peers(self, secret: bytes) -> Peers | None:
        """The link to other kvpins, None without an exchange. Raises SettingsError if it cannot be used."""
        if self.settings.exchange is None:
            return None
        owner = secrets.randbits(63)
        bus = make_bus(self.settings.exchange, owner, self.siblings, secret)
        key = lambda: _text(self.settings.admin_key)  # noqa: E731 - short
        return Peers(bus, owner, self.fleet, self.tenants, self.transport.hang_up, key, self._speaks)

    def _speaks(self) -> bool:
        """True for a single kvpin, and for the one worker that speaks for all."""
        return self.siblings is None or self.siblings.speaks()

    def page(self) -> bytes:
        """The metrics for a collector. Those of a worker are sent by the one that speaks for all."""
        return self.metrics.render() if self._speaks() else b""

    def _flow(self) -> Flow:
        """The read path."""
        settings = self.settings
        make_attempts = Attempts if self.traces is None else self.traces.attempts
        media = MediaUuids(trusted=settings.trust_media_uuids)
        chosen = [
            ChosenRules(frozenset(each.rules), each.tenant, each.model, each.repairs)
            for each in settings.normalise
        ]
        routes = translations(self.responses)
        rules = Normalising(chosen)
        return Flow(
            fleet=self.fleet,
            preparation=Preparation(
                self.destinations, self.tenants, media, routes, reuse=settings.reuse, normalising=rules
            ),
            attempts=make_attempts(self.transport, self.ingest, self.tenants),
            tenants=self.tenants,
            requests=RequestRecords(settings.limits.request_records, keeps_bodies=settings.reuse),
            rules=_rules(settings),
            observe=self.observe,
            placed=self.live.placed,
        )

    def _left_by_workers(self, own: Path) -> list[Path]:
        """The directories in `state_dir` that no process of this kvpin has, because there were more or fewer
        workers before. The first worker takes care of them."""
        if self.siblings is None:
            return sorted(own.glob("worker-*"))
        if own.name != "worker-1":
            return []
        run = {f"worker-{number}" for number in range(1, len(self.siblings.sockets) + 2)}
        return [own.parent, *sorted(each for each in own.parent.glob("worker-*") if each.name not in run)]

    def _shared_state_dir(self) -> Path | None:
        """What the workers of a kvpin share lies above their own directories."""
        directory = self.settings.state_dir
        return directory.parent if directory is not None and self.siblings is not None else directory

    async def _ask_workers(self, path: str) -> list[bytes]:
        """The answers of the other workers at a path that only workers may ask."""
        sockets = self.siblings.sockets if self.siblings is not None else ()
        return [each.body for each in await ask(self.transport, sockets, "GET", path) if each.is_good]

    async def follow_orders(self, told: bytes) -> bytes:
        """Another worker tells what operators have ordered."""
        self.fleet.book.merge(decode_marks(told), now=time.time())
        return b""

    async def told_keys(self, _body: bytes) -> bytes:
        """Another worker has changed the key book's file."""
        await self.keys.look()
        return b""

    def observe(self, record: RequestRecord) -> None:
        """Counts and records a finished request."""
        trace_id = self.traces.observed(record) if self.traces is not None else None
        self.metrics.observe(record, trace_id)
        self.live.finished(record)
        if self.recorder is not None:
            self.watch.observe(record)
            self.recorder.observe(record, self.flow.requests.source(record))
        if self.ahead is not None:
            self.ahead.observe(record)

    def start(self) -> None:
        """Starts the managed engines, the watch of every engine, and the search for others. Raises
        SettingsError or EngineSpecError if the settings cannot be used."""
        explains = self.settings.logs.level == "debug"
        self.tasks.keep("loop lag", partial(measure_lag, self.metrics.loop_lag.observe, explain=explains))
        if self.recorder is not None:
            self.tasks.start("recorder", self.recorder.run())
        if self.telemetry is not None:
            self.tasks.keep("telemetry", self.telemetry.run)
        if self.ahead is not None:
            self.tasks.keep("restore ahead", self.ahead.run)
        if self.state is not None:
            self.tasks.keep("state", partial(self.state.run, self.fleet, self.pins))
            self.tasks.keep("issued keys", self.keys.run)
        self._follow(self.settings)
        if self.peers is not None:
            self.peers.start(self.tasks)
        if self.hand_over is not None:
            self.tasks.keep("hand over", self.hand_over.run)

    def reload(self, settings: Settings) -> EngineChanges:
        """Takes over the settings that `RELOADED` names. Requests in flight go on with the old ones. Raises
        SettingsError or EngineSpecError if they cannot be used; then nothing changed."""
        check_reload(self.settings, settings, has_issued=self.tenants.issued.has_issued)
        check(settings)
        changes = self._follow(settings)
        self.settings = settings
        self.tenants.replace(_keys(settings), settings.tenant_limits)
        self.fleet.aliases, self.fleet.default_model = settings.model_aliases, settings.default_model
        self.fleet.bound_queues(settings.limits)
        self.tables.max_bytes = int(settings.limits.prompt_table_bytes)
        self.flow.requests.capacity = settings.limits.request_records
        self.gate.bodies.limit = _bodies_bytes(settings)
        self.gate.longest = int(settings.limits.body_bytes)
        self.flow = replace(self.flow, rules=_rules(settings))
        self.live.end()  # viewers show their key again, which may be an old one
        return changes

    def _divide(self) -> None:
        """Keys have changed, and perhaps tenants: what is divided among these follows."""
        self.destinations.divide(self.tenants.names)
        self.monitor.isolate(isolated=self.tenants.isolated)
        self.responses.divide(self.tenants.names)

    def _follow(self, settings: Settings) -> EngineChanges:
        return self.engines.follow(
            all_engines(settings), finders_of(settings), grace_s=settings.graceful_shutdown_s
        )

    async def stop(self) -> None:
        """Saves the state, then closes adapters, background work, the engines kvpin started, and connections.

        A failure of one is logged and does not keep the others from being closed."""
        if self.state is not None:
            await self.state.save(self.fleet, self.pins)
        for engine in self.fleet.engines.values():
            self.monitor.forget(engine)
        # Managed engines still run here: an adapter may have KV to save.
        leaving = self.engines.stop(within_s=self.settings.graceful_shutdown_s)
        closing = {engine.id: engine.adapter.aclose() for engine in self.fleet.engines.values()}
        await asyncio.gather(leaving, _close_all(closing))
        if self.peers is not None:
            await self.peers.aclose()
        await self.tasks.stop()
        if self.hand_over is not None:
            await within(_LAST_S, self.hand_over.once())  # what the last requests counted
        if self.recorder is not None:
            await self.recorder.aclose()
        if self.telemetry is not None:
            await self.telemetry.aclose()
        await _close_all({process.id: process.stop() for process in self.engines.processes})
        await self.transport.aclose()


async def _close_all(closing: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Runs all of them side by side, by engine id."""
    results = await asyncio.gather(*closing.values(), return_exceptions=True)
    for engine_id, result in zip(closing, results, strict=True):
        if isinstance(result, Exception):
            log.error("engine not closed cleanly while kvpin stops", engine=engine_id, exc_info=result)


@cache
def _memory() -> int:
    """Bytes of memory that were available when this was first asked."""
    return available_bytes() or _USUAL_MEMORY


def _bodies_bytes(settings: Settings) -> int:
    """Memory of this process for requests' bodies: by default a quarter of what was available at start, which
    the workers share, but enough for the longest body."""
    limits = settings.limits
    return int(limits.bodies_bytes or max(_memory() // 4 // settings.workers, limits.body_bytes))


def _keys(settings: Settings) -> list[ApiKey]:
    return [
        ApiKey(
            entry.tenant_id,
            entry.digest,
            frozenset(entry.models) if entry.models is not None else None,
            entry.expires.timestamp() if entry.expires is not None else None,
        )
        for entry in settings.api_keys
    ]


def _rules(settings: Settings) -> Rules:
    times = settings.timeouts
    return Rules(times.first_byte_s, times.idle_s, times.total_s, settings.retries, settings.limits.queue_s)


def build_app(proxy: Proxy) -> Dispatcher:
    """All that is served, over a proxy's collaborators and by its settings as they are now; the caller starts
    and stops the collaborators."""
    settings, sockets = proxy.settings, _sockets(proxy)
    cors = Cors(settings.cors_origins) if settings.cors_origins else None
    limits = settings.limits
    data_plane = DataPlane(
        proxy.flow,
        proxy.tenants,
        proxy.gate,
        int(limits.body_bytes),
        JsonSize(limits.json_values, limits.json_fields, int(limits.json_bytes)),
        KeptResponses(proxy.responses),
        cors,
        proxy.metrics.refuse,
        PassedToOwner(proxy.fleet, proxy.peers, proxy.transport) if proxy.peers is not None else None,
        PassedToKeeper(sockets, proxy.transport) if sockets is not None else None,
    )
    guard = MetricsGuard(_text(settings.admin_key), _text(settings.metrics_key), proxy.tenants)
    told_orders = lambda: encode_marks(proxy.fleet.book.marks())  # noqa: E731 - short
    together = Together(proxy.transport, proxy.siblings, sockets or tuple, told_orders)
    ops = Ops(
        proxy.fleet,
        proxy.metrics,
        proxy.draining,
        proxy.peers,
        has_page=settings.ui,
        guard=guard,
        together=together,
    )
    page = WebPage().routes() if settings.ui else []
    rest = Starlette(
        routes=[admin_api(proxy, together), *ops.routes(), *_peer_routes(proxy), *page],
        exception_handlers={**dict.fromkeys(ANSWERED, handle), HTTPException: handle_http},
    )
    rest.router.redirect_slashes = False  # such an answer leads to the host that the client named
    traces = proxy.traces
    return Dispatcher(data_plane if traces is None else traces.data_plane(data_plane), rest, proxy.draining)


def _peer_routes(proxy: Proxy) -> list[Route]:
    """What the other workers ask this one."""
    if proxy.hand_over is None:
        return []
    return peer_routes(
        {
            HAND_OVER_PATH: proxy.hand_over.receive,
            PROMPTS_PATH: lambda _body: proxy.prefixes.told(),
            KEYS_PATH: proxy.told_keys,
            USES_PATH: proxy.engines.told_uses,
            ORDERS_PATH: proxy.follow_orders,
        }
    )


def _sockets(proxy: Proxy) -> Callable[[], Sequence[str]] | None:
    """What the other kvpins of this machine listen on; None if there can be none."""
    peers, siblings = proxy.peers, proxy.siblings
    if peers is not None and peers.bus.http_socket is not None:
        return peers.sockets
    return (lambda: siblings.sockets) if siblings is not None else None


def admin_api(proxy: Proxy, together: Together) -> Mount:
    """The admin API over a proxy's collaborators."""
    fleet, flow, reuse = proxy.fleet, proxy.flow, proxy.ingest is not None
    operations = proxy.operations
    files = proxy.state.tables if proxy.state is not None else None
    targets = Targets(fleet, proxy.tenants, flow.requests, has_views=reuse)
    kv = KvOrders(fleet, flow, targets, operations)
    endpoints = (
        *admin.engine_routes(fleet, proxy.engines, kv, proxy.peers, reuse=reuse),
        *admin.key_routes(proxy.keys, proxy.tenants, fleet),
        *admin.kv_routes(kv, operations),
        *admin.request_routes(flow),
        *admin.use_routes(proxy.use),
        *admin.prefix_routes(proxy.prefixes),
        *admin.event_routes(proxy.live),
        *admin.replay_routes(Replays()),
        *admin.table_routes(SharedTables(fleet, proxy.tables, files)),
    )
    return admin.admin_mount(endpoints, AdminGuard(_text(proxy.settings.admin_key)), together.serve)


def _text(key: SecretStr | None) -> str | None:
    return key.get_secret_value() if key is not None else None
