"""Health and metrics, for orchestrators and Prometheus."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from proxy.api.auth import MetricsGuard
from proxy.api.workers.together import Together
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.peers.peers import Peers
from proxy.request.tenants import Tenants

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
        request can be taken although an engine is ready, or why there is no engine.
        """
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
