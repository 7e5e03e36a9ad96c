"""Signs of life: of a worker to its supervisor, and to systemd over real sockets."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from proxy.server.workers.fairness import ConnectionTally
from proxy.server.workers.supervisor import Watchdog, until_silent
from tests.live.conftest import starting_kvpin


@pytest.fixture
def directory():
    """A short one: a socket's path is."""
    with tempfile.TemporaryDirectory(prefix="kvpin-test-") as name:
        yield Path(name)


@contextlib.contextmanager
def listening(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(60)
        yield listener


@pytest.fixture
def environment(monkeypatch):
    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    put(NOTIFY_SOCKET="", WATCHDOG_USEC="", WATCHDOG_PID="")
    return put


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"NOTIFY_SOCKET": "/run/x"},
        {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "vsock:2:1234", "WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_who_is_not_asked_says_nothing(environment, said):
    environment(**said)
    assert Watchdog.take() is None
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(os.environ)


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_who_is_asked_says_that_it_lives_and_its_children_do_not(environment, directory, kind):
    path = str(directory / "notify")
    with listening(path if kind == "path" else f"\0{path}") as listener:
        named = path if kind == "path" else f"@{path}"
        environment(NOTIFY_SOCKET=named, WATCHDOG_USEC="200000", WATCHDOG_PID=str(os.getpid()))
        watchdog = Watchdog.take()
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(os.environ)
        assert watchdog.silent_s == 0.2
        task = asyncio.create_task(watchdog.run())
        assert {await asyncio.to_thread(listener.recv, 99) for _ in range(3)} == {b"WATCHDOG=1"}
        task.cancel()


async def test_one_that_was_heard_and_is_no_more_hangs(virtual_time, tmp_path):
    here, there = (ConnectionTally(tmp_path, 2) for _ in range(2))  # as two processes have them
    watch = asyncio.create_task(until_silent(lambda: here.beats(2), 5.0))
    await asyncio.sleep(60)
    assert not watch.done()  # it starts
    pulse = asyncio.create_task(there.pulse(2))
    await asyncio.sleep(60)
    assert not watch.done()
    pulse.cancel()
    await asyncio.wait_for(watch, 10)


@pytest.mark.live
def test_a_single_kvpin_tells_systemd(directory, tmp_path, environment):
    with listening(str(directory / "notify")) as systemd:
        environment(NOTIFY_SOCKET=str(directory / "notify"), WATCHDOG_USEC="400000")
        with starting_kvpin(tmp_path / "log", "--engine=vllm=http://127.0.0.1:1") as kvpin:
            assert systemd.recv(99) == b"WATCHDOG=1"
            kvpin.process.send_signal(signal.SIGSTOP)
            systemd.settimeout(5)
            with contextlib.suppress(TimeoutError):
                while systemd.recv(99):  # what it said before
                    pass
            kvpin.process.send_signal(signal.SIGCONT)
            systemd.settimeout(60)
            assert systemd.recv(99) == b"WATCHDOG=1"
