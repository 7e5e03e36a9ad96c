"""TLS of kvpin's own port: its certificate, and the clients it lets in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from typing_extensions import override
from uvicorn.server import ServerState

from proxy.http.exchange import STOPPING_S
from proxy.http.http1 import Http1Protocol
from proxy.http.listeners import Permission
from proxy.http.uvicorn_inner import Port
from proxy.settings import SettingsError, TlsSettings


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """The context of the port. Reading the files again and replacing it lets certificates be renewed.

    Raises:
        SettingsError: a file cannot be read, or does not hold what it should.
    """
    for name, path in (("cert", tls.cert), ("key", tls.key), ("client_ca", tls.client_ca)):
        if path is not None:
            _check_file(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, tls)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(tls.client_ca)
        except ssl.SSLError as error:
            raise SettingsError(
                f"tls.client_ca: {str(tls.client_ca)!r} holds no certificates in PEM form"
            ) from error
    return context


def load_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    """Reads the certificate, which new connections then get.

    Raises:
        SettingsError: certificate and key do not go together.
    """
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"tls.cert {str(tls.cert)!r} and tls.key {str(tls.key or tls.cert)!r} do not go together as a "
            "PEM certificate and its unencrypted private key"
        ) from error


def _check_file(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise SettingsError(f"tls.{name}: {str(path)!r} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    """Fails where OpenSSL would ask for a password on the terminal."""
    raise ValueError("the private key is encrypted")


# --- the TLS handshake of a connection of the HTTPS port ------------------------------------------------
#     accepted → Accepted → Handshake → Http1Protocol
#
# A connection counts for the limit as soon as it is accepted: clients that connect and send nothing must not
# use up the process's files. asyncio's own TLS server shows a connection only after its handshake.

# Seconds that a handshake may take.
HANDSHAKE_S = 10.0


def over_tls(http: type[Http1Protocol], context: ssl.SSLContext) -> type[Accepted]:
    """The protocol of a port's connections that speak `http` after a handshake with `context`."""
    return type("Accepted", (Accepted,), {"http": http, "context": context})


class Accepted(asyncio.Protocol):
    """A connection without a byte read. uvloop's transport has begun to read before it can be told to speak
    TLS, so the socket moves to another one.

    Attributes:
        context: the port's certificate, and the clients that it accepts.
        http: the protocol of connections after the handshake.
    """

    context: ClassVar[ssl.SSLContext]
    http: ClassVar[type[Http1Protocol]]

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Called by uvicorn, like that of Http1Protocol."""
        loop = _loop or asyncio.get_running_loop()
        http = self.http(config, server_state, app_state, loop)
        self._handshake = Handshake(http, Port(config, server_state), loop)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            moved = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # no file is left
            moved = None
        transport.abort()  # type: ignore[attr-defined]  # asyncio names its base class
        if moved is not None:
            self._handshake.begin(moved, self.context)


class Handshake(asyncio.Protocol):
    """A handshake. Until it is over, the limit on connections sees it as one that waits for a request.

    Attributes:
        idle_since: when it began, by the loop's clock.
    """

    __slots__ = ("_http", "_loop", "_port", "_task", "idle_since")

    def __init__(self, http: Http1Protocol, port: Port, loop: asyncio.AbstractEventLoop) -> None:
        """`http` gets the connection afterwards."""
        self._http, self._port, self._loop = http, port, loop
        self._task: asyncio.Task[None] | None = None
        self.idle_since = loop.time()

    def begin(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        """Starts the handshake, if there is a place for the connection."""
        connections = self._port.connections
        connections.add(self)
        if self._http.limits.admit(self, connections) is Permission.NONE:
            connections.discard(self)
            accepted.close()
        else:
            self._task = self._loop.create_task(self._run(accepted, context))

    async def _run(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        try:
            with contextlib.suppress(OSError):  # it left, was too slow, or speaks no TLS
                await self._loop.connect_accepted_socket(
                    lambda: self, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
                )
        finally:
            self._leave()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake has succeeded."""
        self._leave()
        self._task = None
        transport.set_protocol(self._http)
        self._http.connection_made(transport)

    def _leave(self) -> None:
        self._port.connections.discard(self)

    def evict(self) -> bool:
        """Ends the handshake, for another connection."""
        self.abort()
        return True

    def abort(self) -> None:
        """Ends the handshake."""
        if self._task is not None:
            self._task.cancel()

    def hurry(self) -> None:
        """Kvpin stops: a client that is connecting gets a few seconds."""
        self._loop.call_later(STOPPING_S, self.abort)

    def close_if_idle(self, for_s: float) -> None:
        """A handshake is not idle when kvpin stops: a request follows it."""
