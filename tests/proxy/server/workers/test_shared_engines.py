"""Engines that several workers share: real processes that listen."""

import asyncio
import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from structlog.testing import capture_logs

from engine_adapter import EngineSpecError
from proxy import runtime
from proxy.fleet.managed_engine import ProcessState
from proxy.runtime import Supervisor
from proxy.server.workers import supervisor
from proxy.server.workers.supervisor import SharedEngines, starting_file
from proxy.settings import EngineSettings, ManagedSettings, Settings, SettingsError
from tests.kv_world import until

SERVER = f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}"


def engine(name, **more):
    return ManagedSettings(kind="openai_compatible", id=name, command=SERVER, **more)


def settings(*engines):
    return Settings(managed=engines, graceful_shutdown_s=0)


@pytest.fixture
async def shared(tmp_path, monkeypatch):
    for module, name in ((runtime, "_POLL_S"), (supervisor, "_CONNECT_S"), (supervisor, "_ASK_AGAIN_S")):
        monkeypatch.setattr(module, name, 0.02)
    (tmp_path / "health").touch()  # what the engines serve
    monkeypatch.chdir(tmp_path)
    tasks = Supervisor()
    shared = SharedEngines(tmp_path, tasks, lambda: None, workers=1)
    yield shared
    await shared.aclose()
    await tasks.stop()


def told(tmp_path):
    return {each["id"]: each for each in json.loads((tmp_path / "engines.json").read_text())["engines"]}


async def listens(url):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    except OSError:
        return False
    writer.close()
    return True


async def until_listens(url, *, is_there=True):
    async with asyncio.timeout(30):
        while await listens(url) != is_there:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.02)


async def test_engines_follow_the_settings_and_changed_ones_do_one_after_the_other(shared, tmp_path):
    shared.follow(settings(engine("a"), engine("b"), engine("c")))
    first = told(tmp_path)
    for name in "abc":
        await until_listens(first[name]["url"])
    shared.follow(settings(engine("a", model="new"), engine("b", model="new"), engine("d")))
    assert sorted(told(tmp_path)) == ["a", "b", "d"]
    async with asyncio.timeout(30):
        while (now := told(tmp_path))["b"] == first["b"]:
            assert await listens(first["b"]["url"])
            await asyncio.sleep(0.02)
    assert now["a"]["model"] == now["b"]["model"] == "new"
    assert await listens(now["a"]["url"])
    await until_listens(now["b"]["url"])
    await until_listens(first["c"]["url"], is_there=False)
    assert not await listens(first["a"]["url"])
    await shared.aclose()
    for name in "abd":
        assert not await listens(now[name]["url"])


async def test_a_full_directory_leaves_the_settings_as_they_were_and_is_logged(monkeypatch):
    def is_full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    named = EngineSettings(kind="vllm", url="http://127.0.0.1:1", id="v")
    load = Mock(side_effect=[Settings(engines=(named,)), SettingsError("bad")])
    workers = supervisor.Workers(Settings(workers=2), load, [])
    before = workers._settings
    monkeypatch.setattr(Path, "write_text", is_full)
    with capture_logs() as logs:
        workers._reload()
        workers._reload()
    workers._directory.remove()
    assert [each["error"] for each in logs] == ["[Errno 28] No space left on device", "bad"]
    assert workers._settings is before


async def test_an_engine_that_cannot_be_used_changes_nothing(shared, tmp_path):
    shared.follow(settings(engine("a")))
    before = told(tmp_path)
    bad = ManagedSettings(
        kind="llama_server", id="x", command=("-m", "x", "--slot-save-path", "/one"), host_cache_dir="/two"
    )
    with pytest.raises(EngineSpecError, match="differ"):
        shared.follow(settings(bad))
    assert told(tmp_path) == before


@pytest.mark.parametrize(("state", "seconds"), [(ProcessState.READY, 0.2), (ProcessState.STARTING, 0.4)])
async def test_an_engine_that_leaves_waits_for_those_that_join(shared, virtual_time, state, seconds):
    old = SimpleNamespace(stop=AsyncMock(), spec=SimpleNamespace(url="http://old"))
    shared._is_used = AsyncMock(return_value=True)
    began = virtual_time.now
    await shared._end(old, 0.2, [SimpleNamespace(state=state)])
    assert virtual_time.now - began == pytest.approx(seconds, abs=0.03)
    old.stop.assert_awaited_once()


async def test_an_engine_that_leaves_ends_once_no_worker_uses_it(shared):
    old = SimpleNamespace(stop=AsyncMock(), spec=SimpleNamespace(url="http://old"))
    shared._is_used = AsyncMock(side_effect=[True, False])
    async with asyncio.timeout(30):
        await shared._end(old, 60.0)
    shared._is_used.assert_awaited_with("http://old")
    old.stop.assert_awaited_once()


async def test_an_engine_that_is_named_again_waits_for_the_process_that_had_its_id(shared, tmp_path):
    uses, graceful = {"answer": True}, {"graceful_shutdown_s": 60}
    shared._is_used = AsyncMock(side_effect=lambda _url: uses["answer"])
    shared.follow(settings(engine("a"), engine("b")))
    old = told(tmp_path)["a"]["url"]
    await until_listens(old)
    for named in ((), (engine("a"),), (), (engine("a"),)):  # of two that were named again, one may start
        shared.follow(settings(engine("b"), *named).model_copy(update=graceful))
        await asyncio.sleep(0.05)
    new = shared._engines["a"]
    await asyncio.sleep(0.5)
    assert await listens(old)
    assert (new.pid, new.starting) == (None, True)
    uses["answer"] = False
    await until_listens(new.spec.url)
    assert not await listens(old)
    assert new.restarts == 0
    assert not shared._ending


@pytest.mark.parametrize("command", [SERVER, "false {port}"], ids=["healthy", "ends"])
async def test_a_file_is_there_until_the_first_start_of_an_engine_has_ended(shared, tmp_path, command):
    shared.follow(settings(engine("a").model_copy(update={"command": tuple(command.split())})))
    file = starting_file(tmp_path, told(tmp_path)["a"]["url"])
    assert file.exists()
    await until(lambda: not file.exists(), 30)
    assert await listens(told(tmp_path)["a"]["url"]) == (command == SERVER)


async def test_the_file_of_a_first_start_goes_also_where_the_engine_is_replaced_meanwhile(shared, tmp_path):
    """Else an engine that gets the same port later would seem to start for ever."""

    def slow(seconds):
        words = ("sh", "-c", f"sleep {seconds}; echo {{port}}")
        return settings(engine("a").model_copy(update={"command": words}))

    shared._is_used = AsyncMock(return_value=False)
    shared.follow(slow(60))
    file = starting_file(tmp_path, told(tmp_path)["a"]["url"])
    await asyncio.sleep(0.1)
    assert file.exists()
    shared.follow(slow(61))
    await until(lambda: not file.exists(), 30)
    assert starting_file(tmp_path, told(tmp_path)["a"]["url"]) != file
