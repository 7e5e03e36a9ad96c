"""All that kvpin's port serves: the data plane, and an ASGI application for everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message

from engine_adapter import NATIVE_ROUTES
from proxy.api.auth import FROM_PEER
from proxy.api.error_answers import error_response
from proxy.api.openai import DataPlane
from proxy.http.exchange import ClientLeft, Exchange

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
