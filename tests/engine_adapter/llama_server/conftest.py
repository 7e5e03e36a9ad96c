"""Servers, their control clients, schedulers and adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from engine_adapter.http.control import ControlClient
from engine_adapter.types import EngineSpec
from tests.engine_adapter.llama_server.scheduler_world import SMALL_STEPS, SchedulerWorld, scheduler_world
from tests.engine_adapter.llama_server.slot_world import slot_world
from tests.llama import RunningLlama, memory_dir, running_llama_server
from tests.state_files import LittleRoom


@pytest.fixture
async def control_of() -> AsyncIterator[Callable[[str], ControlClient]]:
    """Opens clients: `control_of(server.url)`."""
    clients = []

    def make(url: str) -> ControlClient:
        clients.append(ControlClient(EngineSpec(kind="llama_server", url=url, id="e")))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def control(llama, control_of) -> ControlClient:
    return control_of(llama.url)


@pytest.fixture(scope="session")
def two_slots(tmp_path_factory) -> Iterator[RunningLlama]:
    """A server with two slots for the schedulers of many tests, one at a time; none ends it."""
    log = tmp_path_factory.mktemp("llama") / "log"
    with (
        memory_dir() as save_dir,
        running_llama_server(log, None, *SMALL_STEPS, slots=2, ctx=2048, save_dir=save_dir) as server,
    ):
        yield server


@pytest.fixture
async def scheduler(two_slots) -> AsyncIterator[SchedulerWorld]:
    """A scheduler of its slots, which are empty."""
    async with scheduler_world(two_slots) as world:
        yield world


@pytest.fixture
def little(tmp_path) -> Iterator[LittleRoom]:
    room = LittleRoom(tmp_path / "little", 1 << 20)
    yield room
    room.close()


@pytest.fixture
async def world(start_llama, save_dir):
    server = start_llama(slots=2, ctx=1024, save_dir=save_dir)
    async with slot_world(server.url, host_cache_dir=str(save_dir)) as world:
        world.server = server
        yield world
