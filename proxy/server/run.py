"""Runs kvpin: opens the port, serves the app, and does what signals say.

    SIGTERM         stop. First not ready, and requests are accepted for `drain_s`; then running answers may
                    end; then the engines that kvpin started stop
    SIGINT          the same without `drain_s`, and idle clients get less time: a person waits
    either, again   stop without waiting for running answers
    a third SIGINT  end at once, whatever is still running
    SIGHUP          read the settings again

The port is opened before anything is started, so that a port in use costs no engine start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvloop

from engine_adapter import EngineSpecError, HttpTransport
from proxy.api.siblings import PeerPort, Siblings
from proxy.core.life import Cause
from proxy.http.http1 import Http1Protocol, Port
from proxy.http.listeners import (
    Begin,
    ConnectionLimits,
    Door,
    connection_limit,
    inherited,
    listen_on,
    plainly,
)
from proxy.http.tls import load_certificate, server_context, shake_hands
from proxy.observe.logs import Banner, configure_logs
from proxy.runtime import settle, steady, until, within
from proxy.server.app import Proxy, build_app
from proxy.server.checks import OPEN_TO_ALL, check, is_local, is_open_to_all, warnings_of
from proxy.server.workers.fairness import ConnectionTally, FairAcceptor, tallied
from proxy.server.workers.supervisor import Orders, Watchdog, Workers
from proxy.settings import Settings, SettingsError, needs_restart

log = structlog.get_logger(__name__)

Load = Callable[[], Settings]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A load balancer needs about that long to notice that kvpin is not ready, where one may be in front.
_DRAIN_S = 5.0
# A connection without a request for that long is closed when kvpin stops. Its client got an answer that does
# not say so, and may just be sending its next request. Measured on a busy machine, 200 clients that pause for
# 0 to 0.6 s: up to 17 were cut off after 0.25 s, and none after 2 s.
_IDLE_S = 2.0
_HURRIED_IDLE_S = 0.25
_POLL_S = 0.02
_LOOK_S = 0.1  # between two looks whether a worker has engines by now
# Seconds that engines get to become ready before requests are taken from a socket that was handed on.
_FIRST_S = 10.0
# Seconds that cancelled answers get to close their connections.
_CUT_S = 1.0
_INTERRUPTED = 130


def serve(load: Load) -> int:
    """Runs the proxy until SIGTERM or SIGINT; returns the exit status.

    `load` reads the settings; SIGHUP calls it again. Raises SettingsError or EngineSpecError."""
    orders, watchdog = Orders.take(), Watchdog.take()
    if orders is not None:
        load = partial(orders.settings, load)
        settings = load()
        configure_logs(settings.logs, worker=orders.number)
        return _until_done(_run(settings, orders.sockets(), load, orders=orders, watchdog=watchdog))
    settings = load()
    configure_logs(settings.logs)
    check(settings)
    try:
        handed_on = inherited()
        listeners = handed_on or listen_on(settings.hosts, settings.port)
    except OSError as error:
        # The text that Python adds in brackets repeats the address.
        reason = (error.strerror or str(error)).partition(" (")[0]
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        mend = "use another --port" if is_of_port else "--host must name an address of this machine"
        sys.stderr.write(f"kvpin: cannot listen on {settings.host}:{settings.port}: {reason}; {mend}\n")
        return 1
    hosts = _hosts(listeners)
    settings, again = _with_long_keys(settings, hosts), lambda: _with_long_keys(load(), hosts)
    _warn(settings, listeners)
    if settings.workers > 1:
        return _until_done(Workers(settings, again, listeners, watchdog=watchdog).run())
    return _until_done(_run(settings, listeners, again, are_shared=bool(handed_on), watchdog=watchdog))


def _until_done(work: Coroutine[Any, Any, int]) -> int:
    try:
        with steady(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a late Ctrl-C ends Python without a traceback


async def _run(
    settings: Settings,
    listeners: list[socket.socket],
    load: Load,
    *,
    are_shared: bool = False,
    orders: Orders | None = None,
    watchdog: Watchdog | None = None,
) -> int:
    """`are_shared`: another kvpin may serve the sockets, now or later. `orders`: those of a worker.
    `watchdog`: that of this process. Raises SettingsError or EngineSpecError."""
    transport = HttpTransport(connect_timeout_s=settings.timeouts.connect_s, setting="timeouts.connect_s")
    try:
        siblings = Siblings(Path(orders.directory), orders.number, orders.of) if orders is not None else None
        proxy = Proxy(settings, transport, siblings)
        server = _Server(proxy, load, listeners, orders)
    except SettingsError:
        await transport.aclose()
        raise
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, server.on_signal, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    host, port = listeners[0].getsockname()[:2]
    has_joined = lambda: proxy.peers is None or proxy.peers.is_ready  # noqa: E731 - short
    banner = Banner(proxy.fleet, host, port, settings, has_joined, proxy.tenants)
    if watchdog is not None:
        proxy.tasks.keep("watchdog", watchdog.run)
    try:
        server.listen_to_peers()  # before they are told of it
        proxy.start()
        if proxy.hand_over is not None and orders is not None and orders.follows:
            await proxy.hand_over.once()  # it learns what operators have ordered
        settle()
        if orders is None or (orders.number == 1 and not orders.follows):
            banner.print_addresses()
            proxy.tasks.start("banner", banner.print_when_ready())
        if are_shared or orders is not None:
            await server.until_tried()
        await server.serve()
    finally:
        await proxy.stop()
        server.close_peer_ports()
    return 0


class _Server:
    """A running kvpin: its port, those for its peers, what signals do to it, and how it stops."""

    def __init__(
        self, proxy: Proxy, load: Load, listeners: list[socket.socket], orders: Orders | None = None
    ) -> None:
        """Raises SettingsError if the port's TLS cannot be used."""
        self._proxy, self._load, self._listeners, self._orders = proxy, load, listeners, orders
        self._site = build_app(proxy)
        self._hurry = asyncio.Event()  # no waiting for requests that may still come
        self._is_cut = False  # no waiting for running answers
        self._limits = ConnectionLimits(connection_limit())
        self._port = Port(self._site, self._limits, proxy.metrics.refuse)
        self._peer_ports = list[PeerPort]()
        self._door: Door | None = None
        tls = proxy.settings.tls
        self._context = server_context(tls) if tls is not None else None
        self._tally = ConnectionTally(Path(orders.directory), orders.of) if orders is not None else None
        if orders is not None and self._tally is not None:
            proxy.tasks.keep("pulse", partial(self._tally.pulse, orders.number))

    def listen_to_peers(self) -> None:
        """Serves other kvpins of this machine: other workers, and those of its exchange. Raises OSError."""
        peers = self._proxy.peers
        siblings = self._proxy.siblings
        paths = {peers.bus.http_socket if peers is not None else None}
        paths |= {siblings.own if siblings is not None else None}
        begin = plainly(partial(Http1Protocol, self._port, is_of_peer=True))
        self._peer_ports += [PeerPort(path, begin) for path in paths if path is not None]

    def close_peer_ports(self) -> None:
        """Accepts no more connections of other kvpins, and speaks for no other worker."""
        if (siblings := self._proxy.siblings) is not None:
            siblings.retire()
        for port in self._peer_ports:
            port.close()

    async def serve(self) -> None:
        """Accepts connections until kvpin has stopped; of several workers, each accepts its share."""
        if self._orders is None or self._tally is None:
            self._door = Door(self._listeners, self._begins(Http1Protocol))
        else:
            tally, number = self._tally, self._orders.number
            begin = self._begins(tallied(Http1Protocol, tally, number))
            self._door = FairAcceptor(self._listeners, tally, number, begin)
            self._proxy.tasks.start("join", self._join(tally, number))
        log.info("connections are accepted", pid=os.getpid())
        await self._proxy.draining.wait()
        await self._stop()
        running = self._cancel_answers()
        if running:
            await asyncio.wait(running, timeout=_CUT_S)

    def _begins(self, protocol: Callable[[Port], asyncio.Protocol]) -> Begin:
        """Gives clients' connections a protocol, over TLS if the settings say so."""
        connect, context = partial(protocol, self._port), self._context
        return plainly(connect) if context is None else partial(shake_hands, context, self._limits, connect)

    def on_signal(self, number: int) -> None:
        """Handles a signal as the module's docstring says."""
        if number == signal.SIGHUP:
            self.reload()
        elif number == signal.SIGINT and self._is_cut:
            log.warning("ended at once by the third SIGINT; the engines that kvpin started get a SIGTERM")
            os._exit(_INTERRUPTED)
        elif self._proxy.draining.is_set():
            log.warning(
                "told to stop again: running answers are cut short", signal=signal.Signals(number).name
            )
            self._is_cut = True
            self._hurry.set()
            self._cancel_answers()
        else:
            self._proxy.draining.set()
            if number == signal.SIGINT:
                self._hurry.set()

    def reload(self) -> None:
        """Reads the settings again and takes them over. If that fails, the old ones stay."""
        proxy, old = self._proxy, self._proxy.settings
        try:
            settings = self._load()
            if settings.tls is not None:
                server_context(settings.tls)  # files that cannot be used must change nothing
            changes = proxy.reload(settings)
        except (SettingsError, EngineSpecError) as error:
            log.error("settings not reloaded: the old ones stay", error=str(error))  # noqa: TRY400
            proxy.metrics.reload_ok = False
            return
        proxy.metrics.reload_ok = True
        if settings.tls is not None and self._context is not None:
            load_certificate(self._context, settings.tls)
        self._site.become(build_app(proxy))
        log.info(
            "settings reloaded",
            added=[entry.id for entry in changes.added],
            removed=list(changes.removed),
            changed=[entry.id for entry in changes.changed],
            api_keys=len(settings.api_keys),
        )
        if names := needs_restart(old, settings):
            log.warning("these settings count when kvpin starts again", settings=names)

    async def until_tried(self) -> None:
        """Waits until an engine is ready, and this kvpin knows what the others know, but not long. Meanwhile
        connections wait in the queue of the socket, or another kvpin takes them."""
        fleet, peers, draining = self._proxy.fleet, self._proxy.peers, self._proxy.draining
        await until(
            lambda: draining.is_set() or (fleet.is_ready() and (peers is None or peers.is_ready)), _FIRST_S
        )

    async def _join(self, tally: ConnectionTally, worker: int) -> None:
        """Tells the other workers when this one has engines."""
        fleet = self._proxy.fleet
        while not fleet.serves:
            await within(_LOOK_S, fleet.until_ready())  # nothing tells of engines at another kvpin
        tally.be_ready(worker)

    async def _stop(self) -> None:
        """Waits for `drain_s`, closes the port, and waits for running answers."""
        settings = self._proxy.settings
        drain_s = settings.drain_s
        if drain_s is None:
            drain_s = 0.0 if is_local(_hosts(self._listeners)) else _DRAIN_S
        if drain_s and not self._hurry.is_set():
            log.info("stopping: not ready, still accepting requests", drain_s=drain_s)
            await within(drain_s, self._hurry.wait())
        self.close_peer_ports()
        if self._door is not None:
            self._door.close()
        self._port.stop()
        log.info("stopping: waiting for running answers", answers=len(self._port.answers))
        await within(settings.graceful_shutdown_s, self._until_answered())

    async def _until_answered(self) -> None:
        """Waits for the last answer, and closes each connection once its client has none to wait for."""
        while self._limits.connections and not self._is_cut:
            for connection in [*self._limits.connections]:
                connection.close_if_idle(_HURRIED_IDLE_S if self._hurry.is_set() else _IDLE_S)
            await asyncio.sleep(_POLL_S)

    def _cancel_answers(self) -> set[asyncio.Task[None]]:
        running = {*self._port.answers}
        for task in running:
            task.cancel(Cause.STOPPING)
        return running


def _warn(settings: Settings, listeners: list[socket.socket]) -> None:
    """Warns of keys and rules that do nothing, and if other machines can use the engines without a key."""
    for warning in warnings_of(settings):
        log.warning(warning)
    if is_open_to_all(settings, _hosts(listeners)):
        log.warning(OPEN_TO_ALL, host=settings.host)


def _with_long_keys(settings: Settings, hosts: list[str]) -> Settings:
    """The settings; raises SettingsError if others may guess a key at `hosts`, which systemd may open."""
    if faults := "\n".join(settings.faults_of_short_keys(hosts)):
        raise SettingsError(faults)
    return settings


def _hosts(listeners: list[socket.socket]) -> list[str]:
    return [listener.getsockname()[0] for listener in listeners]
