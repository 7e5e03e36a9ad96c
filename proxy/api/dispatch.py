"""All that kvpin's port serves: the data plane, and an ASGI application for everything else: health and
metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from engine_adapter import NATIVE_ROUTES
from proxy.api.auth import FROM_PEER, MetricsGuard
from proxy.api.own_answers import error_response
from proxy.api.together import Together
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.http.exchange import ClientLeft, Exchange
from proxy.observe.metrics import Metrics
from proxy.peers.peers import Peers
from proxy.request.tenants import Tenants

log = structlog.get_logger(__name__)


async def serve_asgi(app: ASGIApp, exchange: Exchange) -> None:
    """Gives one exchange to the application. If the application crashes, the client gets a 500."""
    chunks = exchange.chunks()
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        try:
            if not is_read:
                chunk = await anext(chunks, b"")
                is_read = exchange.is_read
                return {"type": "http.request", "body": chunk, "more_body": not is_read}
            await exchange.until_left()
        except ClientLeft:
            pass
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.start(message["status"], list(message.get("headers", ())))
            return
        body = message.get("body", b"")
        if message.get("more_body"):
            exchange.write(body)
        else:
            exchange.finish(body)
        if exchange.is_full:
            await exchange.drain()

    try:
        await app(_scope(exchange), receive, send)
    except Exception as error:
        log.exception("request crashed")
        if not exchange.started:
            response = error_response(error)
            exchange.start(response.status_code, response.raw_headers)
            exchange.finish(bytes(response.body))


def path_of(target: bytes) -> str:
    """The decoded path of a target."""
    return unquote(target.partition(b"?")[0].decode("latin-1"))


def _scope(exchange: Exchange) -> dict[str, Any]:
    """The HTTP connection scope of the ASGI specification."""
    raw_path, _, query = exchange.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": exchange.method,
        "scheme": exchange.scheme,
        "path": path_of(exchange.target),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": exchange.headers.raw,
        "client": exchange.address("peername"),
        "server": exchange.address("sockname"),
        FROM_PEER: exchange.is_from_peer,
    }


class Serving(Protocol):
    """What serves requests."""

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """The work of one exchange."""


@dataclass(slots=True)
class Dispatcher:
    """The handler of every exchange.

    Attributes:
        data_plane: serves `/v1` and what is below it, and the engines' own routes.
        rest: the admin API, health, metrics, and the answer to an unknown route.
        draining: set when kvpin is about to stop: each answer then says that its connection closes.
    """

    data_plane: Serving
    rest: ASGIApp
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def become(self, other: Dispatcher) -> None:
        """Takes over the handlers of another dispatcher, for new requests."""
        self.data_plane, self.rest = other.data_plane, other.rest

    def __call__(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """The work of one exchange."""
        if self.draining.is_set():
            exchange.keep_alive = False
        if exchange.target.startswith(b"/v1/"):
            return self.data_plane.serve(exchange)
        path = path_of(exchange.target)
        if path in NATIVE_ROUTES or f"{path}/".startswith("/v1/"):
            return self.data_plane.serve(exchange)
        return serve_asgi(self.rest, exchange)


# --- health and metrics, for orchestrators and Prometheus -----------------------------------------------

_OPENMETRICS = "application/openmetrics-text"
_ROOT = """\
kvpin: an OpenAI-compatible proxy that routes requests by KV cache

{page}{base}v1             OpenAI's API: set base_url to this
{base}admin/v1       the admin API; `kvpin stats` and other commands use it
{base}health         200 while engines take requests
{base}health/live    200 while kvpin runs
{base}metrics        Prometheus metrics
"""
_PAGE = "{base}ui/            this kvpin in a browser\n"


@dataclass(frozen=True, slots=True)
class Ops:
    """`/`, `/health`, `/health/live`, `/health/ready`, `/metrics`, which has a guard."""

    fleet: Fleet
    metrics: Metrics
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    peers: Peers | None = None
    has_page: bool = False
    guard: MetricsGuard = field(default_factory=lambda: MetricsGuard(None, None, Tenants(())))
    together: Together = field(default_factory=Together)

    @property
    def _takes_requests(self) -> bool:
        has_joined = self.peers is None or self.peers.is_ready
        return self.fleet.is_ready() and has_joined and not self.draining.is_set()

    def routes(self) -> list[Route]:
        """The routes to mount at the root."""
        return [
            Route("/", self.root),
            Route("/health", self.health),
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.page),
        ]

    async def root(self, request: Request) -> Response:
        """Redirects browsers to the page, if there is one. Lists the routes for other clients."""
        if self.has_page and "text/html" in request.headers.get("accept", ""):
            return Response(status_code=307, headers={"location": "ui/", "vary": "accept"})
        base = request.base_url
        page = _PAGE.format(base=base) if self.has_page else ""
        return PlainTextResponse(_ROOT.format(base=base, page=page), headers={"vary": "accept"})

    async def health(self, _request: Request) -> Response:
        """200 while engines take requests, as clients of an engine expect it; else 503. Names no engine."""
        return _health(ok=self._takes_requests)

    async def live(self, _request: Request) -> Response:
        """200 while the process serves."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """200 while requests can be taken, once every configured engine was tried; else 503.

        It is also 503 when kvpin is about to stop: a load balancer then sends requests elsewhere. `models`
        tells whether the model of an engine that loads and unloads it is in memory. `why` tells why no
        request can be taken although an engine is ready, or why there is no engine."""
        engines = self.fleet.engines.values()
        states = {engine.id: engine.state for engine in engines}
        elsewhere = {each.id: _where(each) for each in engines if each.state is EngineState.ELSEWHERE}
        more: dict[str, object] = {"elsewhere": elsewhere} if elsewhere else {}
        if models := {each.id: word for each in engines if (word := each.adapter.model_state) is not None}:
            more["models"] = models
        idle = [] if self.fleet.serves else [each for each in self.fleet.pools.values() if each.ready()]
        if idle:
            more["why"] = str(self.fleet.none_ready(idle[0], None))
        elif not states:
            more["why"] = self.fleet.why_none()
        if self.peers is not None:
            more["exchange"] = _exchange(self.peers, stands_by=self.fleet.stands_by)
        return _health(ok=self._takes_requests, engines=states, **more)

    async def page(self, request: Request) -> Response:
        """Prometheus' text format, or OpenMetrics if the client asks for it, as Prometheus itself does.

        Raises:
            Unauthorized, Forbidden: the client may not see it.
        """
        await self.guard.admit(request)
        return await self.together.by_speaker(request, self._page)

    async def _page(self, request: Request) -> Response:
        openmetrics = _OPENMETRICS in request.headers.get("accept", "")
        kind = f"{_OPENMETRICS}; version=1.0.0" if openmetrics else "text/plain; version=0.0.4"
        page = await self.metrics.page(openmetrics=openmetrics)
        return Response(page, headers={"content-type": f"{kind}; charset=utf-8", "vary": "accept"})


def _where(engine: Engine) -> str | None:
    """The kvpin that uses an engine in place of this one."""
    if engine.is_served_there:
        return f"used through the kvpin {engine.owner}, which answers its requests"
    return engine.last_error


def _exchange(peers: Peers, *, stands_by: bool) -> str:
    """The state of the exchange, in words. A kvpin that is alone still serves."""
    if not peers.bus.is_connected:
        return "gone: this kvpin goes on alone"
    return "ok" if peers.is_ready or stands_by else "joining"


def _health(*, ok: bool, **more: object) -> Response:
    """200 or 503, with the status in words."""
    body = {"status": "ok" if ok else "unavailable", **more}
    return JSONResponse(body, 200 if ok else 503, {} if ok else {"retry-after": "1"})
