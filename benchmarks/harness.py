"""Starts kvpin for a benchmark and stops it again; makes the larger model that benchmarks use. A benchmark
that lacks a package says what to install."""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("KVPIN_CACHE", Path.home() / ".cache" / "kvpin"))
INSTALL = "pip install -e '.[dev,engine]'"
OWN_PORTS = range(20_000, 32_768)
"""Ports that a server keeps over its restarts."""


def say_what_to_install(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for a package that is missing; any other error ends a benchmark as it always does."""
    if isinstance(error, ModuleNotFoundError):
        print(f"{Path(sys.argv[0]).name} needs {error.name!r}: {INSTALL}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:  # a benchmark runs, not a test
    sys.excepthook = say_what_to_install


def made_model(name: str, *sizes: str) -> Path:
    """A Llama of random weights with the default tokenizer, made once; `sizes` are `make_model`'s options."""
    directory = CACHE / name
    if not (directory / "config.json").exists():
        _need_torch()
        module = "scripts.make_model"
        subprocess.run([sys.executable, "-m", module, *sizes, str(directory)], cwd=ROOT, check=True)
    return directory


def _need_torch() -> None:
    """Raises here what a process that computes would die of."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def free_port() -> int:
    """A port nobody listens on now, and that no connection takes as its own end while its server is down.

    The ports that the system gives away (Linux: from 32768 on) are not such: a relay that got the port of its
    engine, which was yet to begin, would connect to itself until no file is left.
    """
    for port in random.sample(OWN_PORTS, len(OWN_PORTS)):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise RuntimeError(f"no free port from {OWN_PORTS[0]} to {OWN_PORTS[-1]}")


@contextmanager
def kvpin(
    *options: str, reuse: bool = True, ready_s: float = 120, log: Path | None = None, **environment: str
) -> Iterator[str]:
    """Runs `kvpin serve` with these options; yields its address once it is ready."""
    command = [sys.executable, "-m", "proxy.cli", "serve", *options]
    environment = {**os.environ, "ENABLE_KV_CACHE_REUSE": str(int(reuse)), **environment}
    with running(command, environment, "/health/ready", ready_s, log) as url:
        yield url


@contextmanager
def engine(*options: str, ready_s: float = 120) -> Iterator[str]:
    """Runs `kvpin engine` with these options; yields its address once it serves."""
    _need_torch()
    command = [sys.executable, "-m", "engine_adapter.torch_engine", *options]
    with running(command, dict(os.environ), "/health", ready_s, None) as url:
        yield url


@contextmanager
def llama_server(
    model: Path, *flags: str, slots: int, ctx: int, save_dir: Path | None = None, port: int | None = None
) -> Iterator[str]:
    """Runs a llama-server with one thread, `slots` slots of `ctx` tokens; yields its address."""
    command = llama_command(model, *flags, slots=slots, ctx=ctx, save_dir=save_dir)
    with running(command, dict(os.environ), "/health", 120, Path(os.devnull), port) as url:
        yield url


@contextmanager
def llama_router(models: Path, *flags: str, save_dir: Path) -> Iterator[str]:
    """Runs a llama-server with one thread as a router of the models in a directory; yields its address."""
    command = [_llama_binary(), "--models-dir", str(models), "-t", "1", "--slots", "--no-ui", *flags]
    command += ["--slot-save-path", str(save_dir)]
    with running(command, dict(os.environ), "/health", 120, Path(os.devnull)) as url:
        yield url


def _llama_binary() -> str:
    script = [ROOT / "scripts" / "llama-server"]
    return subprocess.run(script, check=True, capture_output=True, text=True).stdout.strip()


def llama_command(model: Path, *flags: str, slots: int, ctx: int, save_dir: Path | None = None) -> list[str]:
    """The command line of a llama-server, without its port."""
    command = [
        _llama_binary(),
        "-m",
        str(model),
        "-t",
        "1",
        "-np",
        str(slots),
        "-c",
        str(slots * ctx),
        *flags,
    ]
    command += ["--slots", "--metrics", "--no-ui"]
    return command if save_dir is None else [*command, "--slot-save-path", str(save_dir)]


@contextmanager
def host_cache() -> Iterator[Path]:
    """An empty directory in memory."""
    memory = Path("/dev/shm")  # noqa: S108 - a directory of its own is made in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


@contextmanager
def running(
    command: list[str],
    environment: dict[str, str],
    health: str,
    ready_s: float,
    log: Path | None,
    port: int | None = None,
    *,
    kills: bool = False,
) -> Iterator[str]:
    """Runs a server; yields its address once `health` answers 200 there, within `ready_s` seconds. `kills`:
    it is not asked to end."""
    port = port or free_port()
    with log.open("wb") if log is not None else nullcontext() as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(f"{url}{health}", process, ready_s)
        yield url
    finally:
        process.send_signal(signal.SIGKILL if kills else signal.SIGTERM)
        process.wait(30)


def wait_ready(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Returns when `url` answers 200; raises when it does not, or the process ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with status {process.returncode} before it was ready")
        try:
            if httpx.get(url).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {seconds} s")


def engine_pids(url: str) -> dict[str, int]:
    """Process ids of the engines kvpin manages, by engine id."""
    engines = httpx.get(f"{url}/admin/v1/engines").raise_for_status().json()["engines"]
    return {engine["id"]: engine["process"]["pid"] for engine in engines}


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A reader of a comma-separated argument, for argparse. It refuses names that are not `known`."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read
