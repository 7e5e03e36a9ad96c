"""All that kvpin's port serves: the data plane, and an ASGI application for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from engine_adapter import NATIVE_ROUTES
from proxy.api.asgi import path_of, serve_asgi
from proxy.api.openai import DataPlane
from proxy.http.exchange import Exchange


@dataclass(slots=True)
class Dispatcher:
    """The handler of every exchange.

    Attributes:
        data_plane: serves `/v1` and what is below it, and the engines' own routes.
        rest: the admin API, health, metrics, and the answer to an unknown route.
        draining: set when kvpin is about to stop: each answer then says that its connection closes.
    """

    data_plane: DataPlane
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
