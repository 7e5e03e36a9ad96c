"""A NIM around another fake: management routes, and the routes of the engine inside.

It follows NVIDIA's documents for NIM LLM 2.0; no real NIM was available.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tests.engines import served

RELEASE = "2.0.0"


@dataclass(slots=True)
class FakeNim:
    """One NIM.

    Attributes:
        ready: its model is loaded.
        inside: the engine's routes.
        shut: engine routes that it does not pass on.
        shows_metrics: `/v1/metrics` is the engine's `/metrics`.
    """

    inside: tuple[BaseRoute, ...] = ()
    ready: bool = True
    shut: tuple[str, ...] = ()
    shows_metrics: bool = True

    @property
    def app(self) -> Starlette:
        passed_on = [route for route in self.inside if route.path not in self.shut]
        return Starlette(routes=[*self._own(), *passed_on])

    def _own(self) -> Iterator[Route]:
        health = {"object": "health-response", "message": "Service is ready."}
        metadata = {
            "version": RELEASE,
            "modelInfo": [{"shortName": "tiny:1", "modelUrl": "ngc://nim/tiny:1"}],
            "assetInfo": [],
        }

        async def is_ready(_request) -> Response:
            return JSONResponse(health, 200) if self.ready else JSONResponse({"message": "not ready"}, 503)

        yield Route("/v1/health/ready", is_ready)
        yield Route("/v1/metadata", lambda _: JSONResponse(metadata))
        yield Route("/v1/version", lambda _: JSONResponse({"release": RELEASE, "api": "1.0.0"}))
        engines = (route for route in self.inside if isinstance(route, Route) and route.path == "/metrics")
        if self.shows_metrics and (metrics := next(engines, None)) is not None:
            yield Route("/v1/metrics", metrics.endpoint)


def running_nim(fake: FakeNim) -> AbstractContextManager[str]:
    """Its address."""
    return served(fake.app)
