"""kvpin in front of each engine, and the clients' processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.make_gguf import gguf_path
from tests.clients import fake
from tests.clients.environments import NotInstalled, install, program_of
from tests.clients.matrix import CLIENTS, Client, cells, features_on, table
from tests.live.conftest import Kvpin, running_kvpin
from tests.llama import running_llama_server

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of the matrix -->"
"""What stands around the matrix on the page."""

KEY = "sk-clients"
EMBEDDED = "embedded: --threads 1 --kv-blocks 4096"
VECTORS = ("--embeddings", "--pooling", "mean", "-a", "vectors")


@dataclass(frozen=True, slots=True)
class World:
    """kvpin in front of an engine, with the models to ask for."""

    kvpin: Kvpin
    model: str
    embedding_model: str


@dataclass(slots=True)
class Run:
    """A client's process on one engine, which tests the features one after the other."""

    process: subprocess.Popen[str]
    errors: Path
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def result(self, feature: str) -> dict[str, Any]:
        """What the client made of a feature, once it has run."""
        assert self.process.stdout is not None
        while feature not in self.results:
            line = self.process.stdout.readline()
            if not line:
                pytest.fail(f"the client ended before {feature}:\n{self.errors.read_text()}")
            if line.startswith("{"):
                result = json.loads(line)
                self.results[result["feature"]] = result
        return self.results[feature]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Installs the clients before their tests: the first time takes longer than a test may."""
    if session.config.option.collectonly:
        return
    wanted = [item.callspec.params["client"] for item in session.items if _is_cell(item)]
    capture = session.config.pluginmanager.getplugin("capturemanager")
    # Where it fails, so does each test of the client, with the reason.
    with capture.global_and_fixture_disabled(), suppress(NotInstalled):
        install(wanted)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the matrix into the page about clients when all of its cells were run."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    ran = [item for item in session.items if _is_cell(item)]
    if len(ran) < len(list(cells(small=False))) or session.config.option.collectonly:
        return
    broken = {report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, ())}
    params = [item.callspec.params for item in ran if item.nodeid in broken]
    made = table({(each["client"], each["feature"]) for each in params})
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{made}{END}{after}", encoding="utf-8")


def _is_cell(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_cell"


@pytest.fixture(scope="session")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """kvpin in front of the engine of that name; started once."""
    worlds: dict[str, World] = {}
    with ExitStack() as stack:

        def world(engine: str) -> World:
            if engine not in worlds:
                worlds[engine] = _start(engine, tmp_path_factory.mktemp(engine), stack)
            return worlds[engine]

        yield world


def _start(engine: str, home: Path, stack: ExitStack) -> World:
    def serve(*flags: str) -> Kvpin:
        return stack.enter_context(running_kvpin(home / "log", "--api-key", KEY, *flags))

    if engine == "embedded":
        return World(serve("--managed", EMBEDDED), "kvpin-tiny", "kvpin-tiny")
    if engine == "fake":
        url = stack.enter_context(fake.running_fake())
        return World(serve("--engine", f"openai_compatible={url}"), fake.MODEL, fake.MODEL)
    chats = stack.enter_context(
        running_llama_server(home / "chats", None, "-n", "64", "-a", "tiny", ctx=32768, save_dir=home)
    )
    vectors = stack.enter_context(
        running_llama_server(home / "vectors", gguf_path("tiny"), *VECTORS, slots=1)
    )
    engines = (f"llama_server={chats.url}", f"openai_compatible={vectors.url}")
    return World(serve("--engine", engines[0], "--engine", engines[1]), "tiny", "vectors")


@pytest.fixture(scope="session")
def run_of(
    world_of: Callable[[str], World], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Run]]:
    """The process of a client on an engine; started once."""
    runs: dict[tuple[str, str], Run] = {}

    def run(name: str, engine: str) -> Run:
        if (name, engine) not in runs:
            home = tmp_path_factory.mktemp("client")
            try:
                command = program_of(CLIENTS[name])
            except NotInstalled as error:
                pytest.fail(str(error), pytrace=False)
            runs[name, engine] = _run(command, CLIENTS[name], engine, world_of(engine), home)
        return runs[name, engine]

    yield run
    for each in runs.values():
        each.process.kill()
        each.process.communicate()


def _run(command: list[str], client: Client, engine: str, world: World, home: Path) -> Run:
    asked = {
        "url": world.kvpin.url,
        "key": KEY,
        "engine": engine,
        "model": world.model,
        "embedding_model": world.embedding_model,
        "features": features_on(client, engine),
        "asynchronous": client.asynchronous,
    }
    # A client's own settings on this machine would change what it does.
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    errors = home / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, json.dumps(asked)],
            cwd=home,
            env={**kept, "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    return Run(process, errors)
