"""Real llama-server processes for tests: one shared server, and more on demand."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.make_gguf import gguf_path
from tests.processes import address_in, answers, wait_until

ROOT = Path(__file__).parents[1]
START_S = 120.0
STOP_S = 30.0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds llama-server before the tests that need it: the build takes longer than a test may."""
    if session.config.option.collectonly or not any(map(_needs_llama, session.items)):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the build says that it takes ten minutes
        # Where it fails, so does each test that needs it, with the reason.
        subprocess.run([ROOT / "scripts" / "llama-server"], stdout=subprocess.DEVNULL, check=False)


def _needs_llama(item: pytest.Item) -> bool:
    """Whether a test may start a server: it uses a fixture of this file, or a file that starts some."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = [made for all_made in item._fixtureinfo.name2fixturedefs.values() for made in all_made]
    files = [vars(item.module)]
    for made in fixtures:
        if made.func.__module__ != __name__:
            files.append(made.func.__globals__)
        elif made.argname in ("llama", "start_llama"):
            return True
    starts = {"llama_server", "running_llama_server", "running_llama_router", "llama_world"}
    return any(not starts.isdisjoint(file) for file in files)


@functools.cache
def llama_server() -> str:
    """Path of the binary. A failing build fails the test."""
    build = subprocess.run([ROOT / "scripts" / "llama-server"], capture_output=True, text=True, check=False)
    if build.returncode:
        pytest.fail(f"scripts/llama-server ended with {build.returncode}:\n{build.stderr}", pytrace=False)
    return build.stdout.strip()


@dataclass(slots=True)
class RunningLlama:
    """A llama-server that answers at `url`.

    Attributes:
        save_dir: its `--slot-save-path`, None without one.
    """

    url: str
    process: subprocess.Popen[bytes] = field(repr=False)
    model: Path
    save_dir: Path | None
    log: Path = field(repr=False)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Kills it, like a crash."""
        self.process.kill()
        self.process.wait(STOP_S)

    def stop(self) -> None:
        """Ends it like an operator."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def running_llama_server(
    log: Path,
    model: Path | None = None,
    *flags: str,
    slots: int = 4,
    ctx: int = 4096,
    save_dir: Path | None = None,
    port: int = 0,
    env: Mapping[str, str] | None = None,
) -> Iterator[RunningLlama]:
    """Starts a server on the tiny model, or `model`; yields it once it serves; ends it.

    `flags` come last and so win over those this gives; `ctx` is the context of one slot in tokens.
    """
    model = model or gguf_path("tiny")
    shape = ("--metrics", "-np", str(slots), "-c", str(slots * ctx))
    with _running(log, model, ("--model", str(model), *shape, *flags), save_dir, port, env) as server:
        yield server


@contextmanager
def running_llama_router(
    log: Path, models: Path, *flags: str, save_dir: Path | None = None, port: int = 0
) -> Iterator[RunningLlama]:
    """Starts a router of the models in a directory; each has two slots of 2,048 tokens. Yields it once it
    serves; ends it."""
    shape = ("--models-dir", str(models), "-np", "2", "-c", "4096")
    with _running(log, models, (*shape, *flags), save_dir, port) as server:
        yield server


@contextmanager
def _running(
    log: Path,
    model: Path,
    flags: tuple[str, ...],
    save_dir: Path | None,
    port: int,
    env: Mapping[str, str] | None = None,
) -> Iterator[RunningLlama]:
    command = [
        *("setpriv", "--pdeathsig", "KILL", llama_server()),  # it never outlives the tests
        *("--port", str(port), "--threads", "1", "--threads-http", "8"),
        *("--slots", "--cache-ram", "0", "--no-ui"),
        *(("--slot-save-path", str(save_dir)) if save_dir else ()),
        *flags,
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **(env or {})},
        )
    server = RunningLlama("", process, model, save_dir, log)
    try:
        server.url = wait_until(lambda: address_in(log, r"listening on (http://\S+)"), process, log, START_S)
        wait_until(lambda: answers(f"{server.url}/health"), process, log, START_S)
        yield server
    finally:
        server.stop()


@contextmanager
def memory_dir() -> Iterator[Path]:
    """An empty directory, in memory if possible: a host tier."""
    shared = Path("/dev/shm")  # noqa: S108 - a directory of its own is made in it
    path = Path(tempfile.mkdtemp(prefix="kvpin-test-", dir=shared if shared.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def save_dir() -> Iterator[Path]:
    """The test's own host tier."""
    with memory_dir() as path:
        yield path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLlama]:
    """One server with 4 slots for the whole session. Tests share its slots: leave none busy."""
    with (
        memory_dir() as path,
        running_llama_server(tmp_path_factory.mktemp("llama") / "log", save_dir=path) as server,
    ):
        yield server


@pytest.fixture
def start_llama(tmp_path: Path) -> Iterator[Callable[..., RunningLlama]]:
    """Starts the test's own servers: `start_llama("-kvu", slots=2, save_dir=save_dir)`."""
    with ExitStack() as servers:
        count = 0

        def start(*flags: str, model: Path | None = None, **options) -> RunningLlama:
            nonlocal count
            count += 1
            log = tmp_path / f"llama-{count}.log"
            return servers.enter_context(running_llama_server(log, model, *flags, **options))

        yield start
