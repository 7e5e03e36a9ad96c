"""The process of one engine: it answers at once, loads the model meanwhile, and ends both together."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.applications import Starlette

from engine_adapter.errors import EngineUnavailable
from engine_adapter.torch_engine.serve import KEY_VARIABLE, EmbeddedOptions
from engine_adapter.torch_engine.server import EngineHost, create_app
from engine_adapter.torch_engine.service import EngineService

_GRACE_S = 20
_BACKLOG = 2048
_log = logging.getLogger("kvpin.engine")


def serve_engine(options: EmbeddedOptions) -> None:
    """Serves until SIGTERM or SIGINT; running requests then have 20 s to finish.

    The address answers at once. `/health` is 503 until the model is loaded.

    Raises:
        EngineSpecError: model and options cannot be served.
        EngineUnavailable: the address cannot be bound, or the engine died, see `EngineCore.wait`.
    """
    listener = _listen(options.host, options.port)
    process = _EngineProcess(options)
    # What the engine starts does not inherit the key.
    key = os.environ.pop(KEY_VARIABLE, None) or None
    web = create_app(process.host, max_body_bytes=options.max_body_bytes, key=key)
    web.router.lifespan_context = process.lifespan
    config = uvicorn.Config(
        web, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=_GRACE_S
    )
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    process.end = end
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%s, loading the model", f"[{host}]" if ":" in host else host, port)
    with _signals_end_quietly():
        server.run(sockets=[listener])
    if process.failure is not None:
        raise process.failure


class _EngineProcess:
    """Loads the service while the server runs already; ends both together."""

    def __init__(self, options: EmbeddedOptions) -> None:
        self.host = EngineHost()
        self.failure: Exception | None = None
        self.end: Callable[[], None] = lambda: None  # until the server exists
        self._options = options

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Starts loading; stops the engine at the end."""
        # A daemon thread: a load may take minutes and must not delay the end.
        threading.Thread(target=self._load, name="load-model", daemon=True).start()
        if self._options.exit_with_parent:
            threading.Thread(target=self._follow_parent, name="follow-parent", daemon=True).start()
        yield
        if self.host.service is not None:
            await asyncio.to_thread(self.host.service.close)

    def _load(self) -> None:
        """Loads the service, then watches its engine."""
        try:
            service = EngineService.build(self._options)
        except Exception as error:  # noqa: BLE001 - raised again by serve_engine, in the main thread
            self.failure = error
            self.end()
            return
        self.host.service = service
        if service.model.is_default:
            _log.warning(
                "no --model given: serving %s, a small model with random weights; its answers mean nothing",
                service.model.name,
            )
        _log.info("serving %s", service.model.name)
        reason = service.engine.wait()
        if reason is not None:
            self.failure = EngineUnavailable(f"the engine died and must be started again: {reason}")
            self._end_surely()

    def _follow_parent(self) -> None:
        """Ends the process when its standard input closes: the parent is gone."""
        while os.read(0, 4096):
            pass
        self._end_surely()

    def _end_surely(self) -> None:
        """Ends the process; kills it if a clean end hangs, as nobody else may notice that."""
        self.end()
        threading.Event().wait(_GRACE_S + 5)
        os._exit(1)


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Ignores the signal that uvicorn raises again at its end: a wanted end is no crash."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Its connections send small chunks without delay."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by connections
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise EngineUnavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
