"""Runs kvpin: binds the port, serves the app, and stops in order when a signal says so.

    SIGTERM, SIGINT   stop: no new connections; running answers may end, then the engines kvpin started
    SIGINT again      stop without waiting for running answers
    a third SIGINT    end at once, whatever is still running
    SIGHUP            logged and ignored: settings are read at start only

The port is bound before anything is started, so that a port in use costs no engine start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import structlog
import uvicorn
import uvloop

from engine_adapter import EngineSpecError, HttpTransport
from proxy.api.auth import is_loopback
from proxy.api.crowd import Crowd, connection_limit
from proxy.api.http1 import Http1Protocol
from proxy.app import Proxy, build_app, check_engines
from proxy.observe.banner import Banner
from proxy.observe.logs import configure_logs
from proxy.runtime import settle, steady
from proxy.settings import Settings, SettingsError

log = structlog.get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What cancelled answers get to close their connections.
_CUT_S = 1.0
_INTERRUPTED = 130


def serve(settings: Settings) -> int:
    """Runs the proxy until SIGTERM or SIGINT; returns the exit status."""
    configure_logs(settings.logs)
    try:
        check_engines(settings)
    except EngineSpecError as error:
        return _refuse(error)
    try:
        listeners = listen_on(settings.hosts, settings.port)
    except OSError as error:
        # The text that Python adds in brackets repeats the address.
        reason = (error.strerror or str(error)).partition(" (")[0]
        _refuse(f"cannot listen on {settings.host}:{settings.port}: {reason}")
        return 1
    _warn(settings, listeners)
    try:
        with steady(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(settings, listeners))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a late Ctrl-C ends Python without a traceback


def listen_on(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A socket for each address, all with the same port; raises OSError."""
    listeners = list[socket.socket]()
    with contextlib.ExitStack() as opened:
        for host in hosts:
            listeners.append(opened.enter_context(listen(host, port)))
            port = listeners[0].getsockname()[1]  # the one that 0 became
        opened.pop_all()
    return listeners


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


async def _run(settings: Settings, listeners: list[socket.socket]) -> int:
    transport = HttpTransport()
    try:
        proxy = Proxy(settings, transport)
    except SettingsError as error:
        await transport.aclose()
        return _refuse(error)
    server = _Server(_config(proxy, settings))
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, server.on_signal, number)
    banner = _banner(proxy, settings, listeners)
    try:
        proxy.start()
        settle()
        banner.print_addresses()
        proxy.tasks.start("banner", banner.print_when_ready())
        await server.serve(sockets=listeners)
        await server.cut_short()
    except EngineSpecError as error:
        return _refuse(error)
    finally:
        await proxy.stop()
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """uvicorn under kvpin's own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which skip the stop of the engines on a second SIGINT."""
        yield

    def on_signal(self, number: int) -> None:
        """Does what the module says of each signal."""
        if number == signal.SIGHUP:
            log.warning("SIGHUP ignored: settings are read at start only; restart kvpin to change them")
        elif number == signal.SIGINT and self.force_exit:
            log.warning("ended at once by the third SIGINT; the engines that kvpin started get a SIGTERM")
            os._exit(_INTERRUPTED)
        elif number == signal.SIGINT and self.should_exit:
            log.warning("second SIGINT: running answers are cut short")
            self.force_exit = True
            self._cancel_answers()
        else:
            self.should_exit = True

    async def cut_short(self) -> None:
        """Cancels the answers that still run, and lets them close their connections."""
        running = self._cancel_answers()
        if running:
            await asyncio.wait(running, timeout=_CUT_S)

    def _cancel_answers(self) -> set[asyncio.Task[None]]:
        running = set(self.server_state.tasks)
        for task in running:
            task.cancel()
        return running


def _config(proxy: Proxy, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(proxy),
        interface="asgi3",  # uvicorn need not look: it hands the site to Http1Protocol
        http=_protocol(proxy),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # an address a client claims must not open the admin API
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(settings.graceful_shutdown_s),
    )


def _protocol(proxy: Proxy) -> type[Http1Protocol]:
    """The protocol of the port's connections."""

    class Protocol(Http1Protocol):
        __slots__ = ()
        crowd = Crowd(connection_limit(), time.monotonic)

        @staticmethod
        def refused(status: int) -> None:
            proxy.metrics.refuse(status)

    return Protocol


def _banner(proxy: Proxy, settings: Settings, listeners: list[socket.socket]) -> Banner:
    host, port = listeners[0].getsockname()[:2]
    return Banner(
        proxy.fleet,
        host,
        port,
        reuse=settings.reuse,
        keys=bool(settings.api_keys),
        is_open=_is_open(settings, listeners),
    )


def _warn(settings: Settings, listeners: list[socket.socket]) -> None:
    if not settings.reuse:
        log.warning(
            "KV cache reuse is off: requests go to the least loaded engine; "
            "set ENABLE_KV_CACHE_REUSE=1 to route by KV cache"
        )
    if _is_open(settings, listeners):
        log.warning(
            "no API key is set and other machines can connect: anyone may use these engines; "
            "set --api-key, or leave --host at 127.0.0.1",
            host=settings.host,
        )


def _is_open(settings: Settings, listeners: list[socket.socket]) -> bool:
    """Whether other machines can use the engines without a key."""
    are_local = all(is_loopback(listener.getsockname()[0]) for listener in listeners)
    return not settings.api_keys and not are_local


def _refuse(reason: object) -> int:
    """Says in one line why kvpin does not start; returns the exit status."""
    sys.stderr.write(f"kvpin: {reason}\n")
    return 2
