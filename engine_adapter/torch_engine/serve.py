"""`kvpin engine`: a process that serves one engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import typer
import uvicorn
from pydantic import ByteSize, TypeAdapter, ValidationError
from starlette.applications import Starlette

from engine_adapter.errors import EngineSpecError, EngineUnavailable
from engine_adapter.torch_engine.options import EngineOptions
from engine_adapter.torch_engine.server import DEFAULT_MAX_BODY_BYTES, EngineHost, create_app
from engine_adapter.torch_engine.service import EngineService, ServiceOptions

DEFAULT_PORT = 8100
_SIZES = EngineOptions()  # the defaults
_GRACE_S = 20
_BACKLOG = 2048
_log = logging.getLogger("kvpin.engine")

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Serve the embedded engine.")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of the server: what it serves, and where.

    Attributes:
        service: model and engine.
        host: address to bind; loopback by default, as the routes have no key.
        port: 0 takes a free one.
        max_body_bytes: larger request bodies are refused.
        exit_with_parent: end when standard input closes.
    """

    service: ServiceOptions = field(default_factory=ServiceOptions)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    exit_with_parent: bool = False


def serve_engine(options: ServeOptions) -> None:
    """Serves until SIGTERM or SIGINT; running requests then have 20 s to finish.

    The address answers at once. `/health` is 503 until the model is loaded.

    Raises:
        EngineSpecError: the address cannot be bound, or model and options cannot be served.
        EngineUnavailable: the engine died, see `Engine.wait`.
    """
    listener = _listen(options.host, options.port)
    process = _EngineProcess(options)
    web = create_app(process.host, max_body_bytes=options.max_body_bytes)
    web.router.lifespan_context = process.lifespan
    config = uvicorn.Config(
        web, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=_GRACE_S
    )
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    process.end = end
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%s, loading", f"[{host}]" if ":" in host else host, port)
    with _signals_end_quietly():
        server.run(sockets=[listener])
    if process.failure is not None:
        raise process.failure


class _EngineProcess:
    """Loads the service while the server runs already; ends both together."""

    def __init__(self, options: ServeOptions) -> None:
        self.host = EngineHost()
        self.failure: Exception | None = None
        self.end: Callable[[], None] = _nothing
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
            service = EngineService.build(self._options.service)
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


def _nothing() -> None:
    """Stands for `end` until the server exists."""


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
        raise EngineSpecError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _size(text: str) -> int:
    """Parses a size in bytes, with or without a unit."""
    try:
        return int(_read_size(text))
    except ValidationError:
        raise typer.BadParameter("give bytes, or a number with a unit such as 512MiB") from None


_read_size = TypeAdapter(ByteSize).validate_python


@app.command(epilog="\b\nExample:\n  kvpin engine --port 8001 --kv-blocks 2048")
def engine(
    *,
    model: Annotated[
        str | None, typer.Option(help="Directory or hub id. Default: a tiny model with random weights.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Model name that clients send.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = DEFAULT_PORT,
    kv_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the GPU tier. Default: by the free memory.")
    ] = None,
    kv_bytes: Annotated[
        int | None, typer.Option(help="Size of the GPU tier, e.g. 2GiB.", parser=_size)
    ] = None,
    tokens_per_block: Annotated[int, typer.Option(help="A power of two.")] = _SIZES.tokens_per_block,
    host_cache_bytes: Annotated[
        int | None,
        typer.Option(help="Size of the host tier, e.g. 1GiB. Default: no host tier.", parser=_size),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests running at once.")] = _SIZES.max_num_seqs,
    prefill_chunk: Annotated[
        int, typer.Option(help="Most prompt tokens per step; half of it while other requests decode.")
    ] = _SIZES.prefill_chunk,
    pin_share: Annotated[
        float, typer.Option(help="Most of the GPU tier that pins may hold, 0 to 1.")
    ] = _SIZES.pin_share,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the model's own.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling, to repeat a run.")] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest request body in bytes.", min=1)
    ] = DEFAULT_MAX_BODY_BYTES,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="Exit when standard input closes.")
    ] = False,
) -> None:
    """Serve the embedded engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "transformers", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        sizes = EngineOptions(
            kv_blocks=kv_blocks,
            kv_bytes=kv_bytes,
            tokens_per_block=tokens_per_block,
            host_cache_bytes=host_cache_bytes or 0,
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            pin_share=pin_share,
            seed=seed,
        )
        service = ServiceOptions(
            model=model,
            served_name=served_model_name,
            device=device,
            dtype=dtype,
            threads=threads,
            host=host,
            engine=sizes,
        )
        serve_engine(ServeOptions(service, host, port, max_body_bytes, exit_with_parent))
    except EngineSpecError as error:
        typer.echo(f"kvpin engine: {error}", err=True)
        raise typer.Exit(2) from error
    except EngineUnavailable as error:
        typer.echo(f"kvpin engine: {error}", err=True)
        raise typer.Exit(1) from error
    _end_now()


def _end_now() -> None:
    """Ends the process. All is closed by now, and Python's own end takes torch 1 to 3 s."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    app()
