"""Sends fuzzed requests to kvpin and looks for faults of kvpin's own. Run by scripts/test-fuzz.

    bodies   JSON, nearly right, on the routes of the data plane
    bytes    heads, bodies and chunks that fit together or not, on bare sockets
    admin    what schemathesis makes of the admin API's own OpenAPI document

A fault is a 500, a traceback in the log, a request without an end, or a kvpin that no longer answers. Ends
with 1 if there is one.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import given, seed
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.extend(map(str, Path(".venv/lib").glob("python*/site-packages")))  # what kvpin's modules import
from scripts.schema_cases import free_port, limited
from tests.fuzz import MORE_PATHS, STREAMS, bodies

START_S, HANG_S, QUIET_S = 180.0, 90.0, 0.02
BATCH = 100
TRACES = re.compile(r"Traceback|request crashed|task failed")


class World:
    """A kvpin with an embedded engine, and what was seen of it."""

    def __init__(self, python: str, log: Path) -> None:
        self.port, self.log = free_port(), log
        self.counts, self.faults = Counter[str](), list[str]()
        engine = "embedded: --kv-blocks 256 --threads 1"
        serve = [python, "-m", "proxy.cli", "serve", "--reuse", "--port", str(self.port)]
        command = [*serve, "--managed", engine, "--model-alias", "m=kvpin-tiny"]
        self.process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Returns when it is ready."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:  # noqa: PLR2004 - HTTP
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.2)
        sys.exit(f"kvpin did not start:\n{self.log.read_text()}")

    def count(self, part: str, status: int, sent: object) -> None:
        """Notes an answer."""
        self.counts[f"{part} {status // 100}xx" if status else f"{part} closed"] += 1
        if status == 500:  # noqa: PLR2004 - HTTP
            self.faults.append(f"{part}: 500: {sent!r}"[:2000])

    def memory(self) -> int:
        """Resident MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024

    def check(self) -> None:
        """Notes what is wrong with it after all."""
        try:
            if requests.get(f"{self.url}/health/live", timeout=HANG_S).status_code != 200:  # noqa: PLR2004 - HTTP
                self.faults.append("/health/live is no 200")
        except requests.RequestException as error:
            self.faults.append(f"it no longer answers: {error}")
        text = self.log.read_text(errors="replace")
        if found := TRACES.search(text):
            self.faults.append(f"its log: {text[found.start() - 500 : found.start() + 4000]}")


def main() -> int:
    """Runs all parts and prints their counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="in all (100000)")
    parser.add_argument("--minutes", type=float, default=60, help="the longest that it may take (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=".venv/bin/python", help="kvpin's interpreter")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        world = World(options.python, Path(directory) / "log")
        try:
            world.wait()
            _fuzz(world, options.requests, options.seed, time.monotonic() + options.minutes * 60)
            world.check()
        finally:
            world.process.terminate()
            world.process.wait(60)
    for name, number in sorted(world.counts.items()):
        print(f"{name:20} {number}")
    print(f"{'all':20} {world.counts.total()}, {len(world.faults)} faults")
    print("\n".join(world.faults[:20]))
    return 1 if world.faults else 0


def _fuzz(world: World, number: int, first: int, until: float) -> None:
    """Sends `number` requests: half of them bare bytes, and as many bodies as cases of the admin API."""
    send_body = lambda made: _body(world, *made)  # noqa: E731 - short
    send_bytes = lambda made: _bytes(world, made)  # noqa: E731 - short
    batches: list[tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = []
    for _ in range(max(number // (4 * BATCH), 1)):
        batches += [
            (STREAMS, send_bytes),
            (STREAMS, send_bytes),
            (st.tuples(MORE_PATHS, bodies()), send_body),
        ]
    begun = world.memory()
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(_batch, strategy, send, first + at, until)
            for at, (strategy, send) in enumerate(batches)
        ]
    world.faults += [f"a batch ended early: {error}" for each in running if (error := each.exception())]
    print(f"memory: {begun} MiB before, {world.memory()} after", flush=True)
    _admin(world, number // 4, first, until)


def _batch(strategy: st.SearchStrategy[Any], send: Callable[[Any], None], first: int, until: float) -> None:
    def one(made: Any) -> None:  # noqa: ANN401 - as the strategy has it
        if time.monotonic() < until:
            send(made)

    if time.monotonic() < until:
        seed(first)(limited(BATCH)(given(strategy)(one)))()


def _body(world: World, path: str, body: bytes) -> None:
    target = path if path.startswith("/") else "/v1/chat/completions"
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    sent = head.encode() + body
    with socket.create_connection(("127.0.0.1", world.port), timeout=HANG_S) as connection:
        connection.sendall(sent)
        _note(world, "bodies", _read(connection), sent)


def _bytes(world: World, sent: bytes) -> None:
    """Sends bytes, and ends the connection when nothing comes any more: the last request may have become part
    of a body that is not complete."""
    with socket.create_connection(("127.0.0.1", world.port), timeout=QUIET_S) as connection:
        answers = b""
        try:
            connection.sendall(sent)
            answers = _read(connection)
            connection.settimeout(HANG_S)
            connection.shutdown(socket.SHUT_WR)
            answers += _read(connection)
        except TimeoutError:
            world.faults.append(f"bytes: no end: {sent!r}")
        except OSError:  # kvpin closed it
            pass
        _note(world, "bytes", answers, sent)


def _read(connection: socket.socket) -> bytes:
    """Reads until the end of the connection, or until nothing comes."""
    answers = b""
    try:
        while part := connection.recv(65_536):
            answers += part
    except ConnectionError:
        pass
    except TimeoutError:
        if connection.gettimeout() == HANG_S:
            raise
    return answers


def _note(world: World, part: str, answers: bytes, sent: bytes) -> None:
    for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", answers, re.MULTILINE) or [b"0"]:
        world.count(part, int(status), sent)


def _admin(world: World, number: int, first: int, until: float) -> None:
    """Sends what schemathesis makes of each operation."""
    document = requests.get(f"{world.url}/admin/v1/openapi.json", timeout=HANG_S).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found for each in schema.get_all_operations() if (found := each.ok()) is not None]

    def send(case: Case) -> None:
        if time.monotonic() > until:
            return
        try:
            status = case.call(base_url=world.url, timeout=HANG_S).status_code
        except requests.Timeout:
            world.faults.append(f"admin: no end: {case.as_curl_command()[:2000]}")
            return
        except requests.RequestException:  # what requests itself cannot send
            status = 0
        world.count("admin", status, case.as_curl_command())

    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            each = number // (2 * len(operations))
            if time.monotonic() > until:
                return
            try:
                seed(first)(limited(each)(given(operation.as_strategy(generation_mode=mode))(send)))()
            except Unsatisfiable:  # an operation without parameters cannot be broken
                continue


if __name__ == "__main__":
    sys.exit(main())
