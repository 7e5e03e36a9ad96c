"""kvpin in front of each engine, and the clients' processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.make_gguf import gguf_path
from tests.clients import fake
from tests.clients.environments import program_of
from tests.clients.matrix import CLIENTS, FEATURES, Client
from tests.live.conftest import Kvpin, running_kvpin
from tests.llama import running_llama_server

KEY = "sk-clients"
EMBEDDED = "embedded: --threads 1 --kv-blocks 4096"
PROGRAMS = Path(__file__).parent / "programs"


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
        running_llama_server(home / "chats", None, "--jinja", ctx=32768, save_dir=home)
    )
    vectors = stack.enter_context(
        running_llama_server(home / "vectors", gguf_path("tiny"), "--embeddings", "-a", "vectors", slots=1)
    )
    servers = [f"llama_server={server.url}" for server in (chats, vectors)]
    return World(serve("--engine", servers[0], "--engine", servers[1]), "tiny", "vectors")


@pytest.fixture(scope="session")
def run_of(
    world_of: Callable[[str], World], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Run]]:
    """The process of a client on an engine; started once."""
    runs: dict[tuple[str, str], Run] = {}

    def run(name: str, engine: str) -> Run:
        if (name, engine) not in runs:
            client, world = CLIENTS[name], world_of(engine)
            runs[name, engine] = _run(client, engine, world, tmp_path_factory.mktemp("client"))
        return runs[name, engine]

    yield run
    for each in runs.values():
        each.process.kill()
        each.process.communicate()


def _run(client: Client, engine: str, world: World, home: Path) -> Run:
    asked = {
        "url": world.kvpin.url,
        "key": KEY,
        "engine": engine,
        "model": world.model,
        "embedding_model": world.embedding_model,
        "features": [name for name in client.features if engine in FEATURES[name].engines],
        "asynchronous": client.asynchronous,
    }
    # A client's own settings on this machine would change what it does.
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    errors = home / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*program_of(client), json.dumps(asked)],
            cwd=home,
            env={**kept, "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    return Run(process, errors)
