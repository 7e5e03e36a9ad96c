"""TLS of kvpin's own port: its certificate, and the clients it lets in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from typing_extensions import override

from proxy.http.exchange import STOPPING_S
from proxy.http.listeners import ConnectionLimits, Permission
from proxy.settings import SettingsError, TlsSettings


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """The context of the port. Reading the files again and replacing it lets certificates be renewed. Raises
    SettingsError if a file cannot be read, or does not hold what it should."""
    for name, path in (("cert", tls.cert), ("key", tls.key), ("client_ca", tls.client_ca)):
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise SettingsError(f"tls.{name}: {str(path)!r} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, tls)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(tls.client_ca)
        except ssl.SSLError as error:
            text = f"tls.client_ca: {str(tls.client_ca)!r} holds no certificates in PEM form"
            raise SettingsError(text) from error
    return context


def load_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    """Reads the certificate, which new connections then get. Raises SettingsError if certificate and key do
    not go together."""
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"tls.cert {str(tls.cert)!r} and tls.key {str(tls.key or tls.cert)!r} do not go together as a "
            "PEM certificate and its unencrypted private key"
        ) from error


def _no_password() -> str:
    """Fails where OpenSSL would ask for a password on the terminal."""
    raise ValueError("the private key is encrypted")


# --- the TLS handshake of a connection of the HTTPS port ------------------------------------------------

HANDSHAKE_S = 10.0  # that a handshake may take


async def shake_hands(
    context: ssl.SSLContext,
    limits: ConnectionLimits,
    connect: Callable[[], asyncio.Protocol],
    accepted: socket.socket,
) -> None:
    """Starts the handshake of a connection, if there is a place for it. The protocol that `connect` makes
    gets the connection afterwards."""
    handshake = Handshake(limits, connect, accepted)
    if limits.admit(handshake) is Permission.NONE:
        accepted.close()
    else:
        handshake.start(context)


class Handshake(asyncio.Protocol):
    """A handshake. Until it is over, the limit on connections sees it as one that waits for a request:
    clients that connect and send nothing must not use up the process's files."""

    __slots__ = ("_accepted", "_connect", "_limits", "_loop", "_task", "idle_since")

    def __init__(
        self, limits: ConnectionLimits, connect: Callable[[], asyncio.Protocol], accepted: socket.socket
    ) -> None:
        self._limits, self._connect, self._accepted = limits, connect, accepted
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None]
        self.idle_since = self._loop.time()  # when it began, by the loop's clock

    def start(self, context: ssl.SSLContext) -> None:
        """Starts it."""
        self._task = self._loop.create_task(self._run(context))

    async def _run(self, context: ssl.SSLContext) -> None:
        try:
            with contextlib.suppress(OSError):  # the client left, was too slow, or speaks no TLS
                await self._loop.connect_accepted_socket(
                    lambda: self,
                    self._accepted,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=STOPPING_S,
                )
        finally:
            self._limits.connections.discard(self)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake has succeeded."""
        self._limits.connections.discard(self)
        protocol = self._connect()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def evict(self) -> bool:
        """Ends the handshake, for another connection."""
        self.abort()
        return True

    def abort(self) -> None:
        """Ends the handshake."""
        if self in self._limits.connections:  # else it is over
            self._task.cancel()
            self._accepted.close()  # the task may not have begun

    def hurry(self) -> None:
        """Kvpin stops: a client that is connecting gets a few seconds."""
        self._loop.call_later(STOPPING_S, self.abort)

    def close_if_idle(self, for_s: float) -> None:
        """A handshake is not idle when kvpin stops: a request follows it."""
