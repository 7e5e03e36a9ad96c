"""The mock engine and the load generator of `router_cost.py` and `streams.py`.

They are C programs (`native/`), built with gcc on first use: Python at both ends would be what is measured.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from harness import CACHE, free_port, wait_ready

SOURCES = Path(__file__).with_name("native")
READY_S = 10
# Core of the router, and core of everything else.
ROUTER_CORE, OTHER_CORE = 0, 1


class NativeError(Exception):
    """The programs cannot be built or run here; the message is one sentence."""


class Played(msgspec.Struct, frozen=True):
    """The figures of the load generator.

    Attributes:
        took_us: time of each answered request, from the first byte sent to the last byte received.
        wall_s, cpu_s: of the load generator.
        failed, errors: how many requests failed, and what was wrong with the first.
        retried: requests sent again because an idle connection was closed under them.
        chunks: streamed chunks that were timed.
        window_s: time for which they were timed, if streams opened slowly: all streams were open then.
        delays_us: pairs of a delay from engine to client, within 1/64, and the number of chunks that had it.
        worst_delay_us: the longest delay.
    """

    took_us: list[int]
    wall_s: float
    cpu_s: float
    failed: int
    errors: list[str]
    retried: int
    chunks: int
    window_s: float
    delays_us: list[tuple[int, int]]
    worst_delay_us: int


def check_machine() -> None:
    """Raises NativeError where the router cannot have a core of its own."""
    missing = {ROUTER_CORE, OTHER_CORE} - os.sched_getaffinity(0)
    if missing:
        raise NativeError(
            f"two cores are needed, {ROUTER_CORE} and {OTHER_CORE}: {sorted(missing)} may not be used."
        )


def build(name: str) -> Path:
    """A program of `native/`, built if its sources changed.

    Raises:
        NativeError: there is no gcc, or it refuses the source.
    """
    source = SOURCES / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes() + (SOURCES / "http.h").read_bytes()).hexdigest()[:16]
    program = CACHE / "native" / f"{name}-{digest}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        part = program.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", part, source]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise NativeError("gcc is missing: apt-get install gcc libc6-dev.") from error
        except subprocess.CalledProcessError as error:
            raise NativeError(f"gcc refuses {source.name}: {error.stderr.strip()}") from error
        part.rename(program)
    return program


def pinned(core: int, *command: str | Path) -> list[str | Path]:
    """The command, on one core alone."""
    return ["taskset", "--cpu-list", str(core), *command]


class MockEngine:
    """A running mock engine.

    Attributes:
        url: its address.
        process: as started.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process

    def pace(self, interval_us: int) -> None:
        """From now on streams send a chunk every `interval_us`, whole milliseconds; 0: all at once."""
        httpx.get(f"{self.url}/mock/interval_us/{interval_us}", timeout=READY_S).raise_for_status()

    def finish(self) -> None:
        """Ends paced streams with their next chunk, until `pace` is called again."""
        httpx.get(f"{self.url}/mock/finish", timeout=READY_S).raise_for_status()


@contextmanager
def mock_engine(*, tokenizes: bool = False) -> Iterator[MockEngine]:
    """Runs a mock engine; `tokenizes`: it has vLLM's `/tokenize`."""
    port = free_port()
    words = [str(port), *(["tokenizes"] if tokenizes else [])]
    process = subprocess.Popen(pinned(OTHER_CORE, build("engine"), *words), process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(f"{url}/health", process, READY_S)
        yield MockEngine(url, process)
    finally:
        process.kill()
        process.wait()


def write_bodies(path: Path, bodies: Iterable[bytes]) -> None:
    """Writes request bodies as the load generator reads them."""
    with path.open("wb") as file:
        for body in bodies:
            file.write(struct.pack("<I", len(body)) + body)


def client_command(
    port: int, connections: int, requests: int, bodies: Path, open_per_s: float = 0
) -> list[str | Path]:
    """The load generator's command line; see `native/client.c`."""
    words = [str(port), str(connections), str(requests), str(bodies), str(open_per_s)]
    return pinned(OTHER_CORE, build("client"), *words)


def play(port: int, connections: int, requests: int, bodies: Path) -> Played:
    """Sends the bodies in turn, from `connections` clients that each wait for their answer.

    Raises:
        NativeError: the load generator failed.
    """
    ran = subprocess.run(
        client_command(port, connections, requests, bodies), check=False, capture_output=True
    )
    if ran.returncode:
        raise NativeError(f"the load generator failed: {ran.stderr.decode().strip()}.")
    return msgspec.json.decode(ran.stdout, type=Played)
