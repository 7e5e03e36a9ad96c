"""What a supervisor gives its workers: where their sockets are, and what they do; and signs of life."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from engine_adapter import EngineSpec
from proxy.peers.bus import UnixBus
from proxy.server.workers import supervisor
from proxy.server.workers.fairness import ConnectionTally
from proxy.server.workers.supervisor import (
    Orders,
    OwnDirectory,
    Watchdog,
    starting_file,
    until_silent,
    write_engines,
    write_refusal,
)
from proxy.settings import WORKER_VARIABLE, ManagedSettings, Settings, SettingsError, StartedSettings
from tests.live.conftest import starting_kvpin


@pytest.fixture
def long(tmp_path, monkeypatch):
    """TMPDIR is too long for a socket."""
    path = tmp_path / ("x" * 100)
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_it_is_its_owners_alone_locked_and_removed_with_all_in_it():
    own = OwnDirectory()
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    cleaner = os.open(own.path, os.O_RDONLY)  # as of what cleans temporary directories
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(cleaner)
    (own.path / "engines.json").write_text("{}")
    own.remove()
    assert not own.path.exists()


@pytest.mark.parametrize("runtime", [None, "short", "missing"])
def test_where_one_place_is_too_long_or_missing_the_next_one_is_taken(long, runtime, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = {"short": short, "missing": f"{short}/missing"}.get(runtime)
        if place is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        own = OwnDirectory()
        assert (str(own.path.parent) == short) is (runtime == "short")
        UnixBus(own.path, 2**63)
        own.remove()


def test_without_any_place_it_says_what_to_set(long, monkeypatch):
    monkeypatch.setattr(supervisor, "_places", lambda: iter([str(long)]))
    with pytest.raises(SettingsError, match="at most 69 bytes"):
        OwnDirectory()
    assert not list(long.iterdir())


def test_the_longest_place_is_long_enough(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = f"{short}/{'x' * (69 - len(short) - 1)}"
        Path(place).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", place)
        own = OwnDirectory()
        assert str(own.path.parent) == place
        UnixBus(own.path, 2**63)
        own.remove()


@pytest.fixture
def place(monkeypatch):
    """A temporary directory that is short enough."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(supervisor, "_places", lambda: iter([place]))
        yield Path(place)


KILLED = """
import os, signal, subprocess, sys
from proxy.server.workers import supervisor as directory
directory._places = lambda: iter([sys.argv[1]])
own = directory.OwnDirectory()
(own.path / "connections").touch()
worker = subprocess.Popen(["sleep", "60"], pass_fds=[own.lock], stdout=subprocess.DEVNULL)
print(worker.pid, own.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_that_of_a_killed_supervisor_goes_once_its_workers_have_ended(place):
    command = [sys.executable, "-c", KILLED, str(place)]
    killed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    worker, path = killed.stdout.split()
    try:
        OwnDirectory().remove()
        assert Path(path).is_dir()  # its worker stops in order
    finally:
        os.kill(int(worker), signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):  # until it has ended
        while Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
    OwnDirectory().remove()
    assert not list(place.iterdir())


def test_what_another_supervisor_or_program_uses_stays(place):
    first = OwnDirectory()
    (first.path / "connections").touch()
    for name, file in (("kvpin-replay-a1b2c3d4", "connections"), ("kvpin-a1b2c3d4", "mine")):
        (place / name).mkdir()
        (place / name / file).touch()
    OwnDirectory().remove()
    assert len(list(place.iterdir())) == 3
    first.remove()


# --- orders


@pytest.fixture
def orders(tmp_path):
    with socket.socket() as listener:
        yield Orders(number=2, of=3, listeners=(listener.fileno(),), directory=str(tmp_path), follows=False)


def test_orders_travel_by_the_environment_and_are_taken_once(orders, monkeypatch):
    for name, value in orders.variable().items():
        monkeypatch.setenv(name, value)
    assert Orders.take() == orders
    assert Orders.take() is None
    assert not any(name.startswith("KVPIN_W") for name in os.environ)


WRONG = [
    "",
    "1",
    "{",
    '{"number": 1}',
    "\udcff",
    ('"number":2', '"number":"x"'),
    ('"listeners":[', '"listeners":[99999,'),
    ('"directory":"', '"directory":"/nowhere'),
    ('"directory":"', '"directory":"\\u0000'),
]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_variable_that_no_supervisor_set_is_one_sentence(orders, wrong, monkeypatch):
    value = wrong if isinstance(wrong, str) else orders.variable()[WORKER_VARIABLE].replace(*wrong)
    monkeypatch.setenv(WORKER_VARIABLE, value)
    with pytest.raises(SettingsError, match="KVPIN_WORKER is set, but this process is no worker"):
        Orders.take()


@pytest.mark.parametrize("kind", ["llama_server", "embedded"])
def test_engines_that_the_supervisor_started_run_already(orders, tmp_path, kind):
    words = ("-m", "x.gguf", "--slot-save-path", "/kv", "--api-key", "k") if kind == "llama_server" else ()
    given = {"host_cache_bytes": "3GiB"} if kind == "llama_server" else {}
    started = ManagedSettings(kind=kind, id="mine", command=words, headers="a: b", **given)
    spec = started.spec(1234)
    write_engines(tmp_path, [spec])
    settings = orders.settings(lambda: Settings(managed=(started,), reuse=True, state_dir=tmp_path / "state"))
    assert settings.managed == ()
    (engine,) = settings.engines
    assert isinstance(spec, EngineSpec)
    assert isinstance(engine, StartedSettings)
    assert engine.starting_file == starting_file(tmp_path, "http://127.0.0.1:1234")
    assert engine.spec() == spec
    assert engine.spec().url == "http://127.0.0.1:1234"
    assert settings.exchange.url.get_secret_value() == f"unix:{tmp_path}"
    assert settings.state_dir == tmp_path / "state" / "worker-2"


def test_the_exchange_that_the_user_set_stays_and_without_reuse_there_is_none(orders, tmp_path):
    write_engines(tmp_path, [])
    set_by_user = {"url": "redis://host"}
    settings = orders.settings(lambda: Settings(reuse=True, exchange=set_by_user))
    assert settings.exchange.url.get_secret_value() == "redis://host"
    assert orders.settings(Settings).exchange is None


@pytest.mark.parametrize("given", [None, "of the settings"])
def test_workers_record_with_one_key(orders, given):
    orders = msgspec.structs.replace(orders, recording_key="of all workers")
    write_engines(Path(orders.directory), [])
    settings = orders.settings(lambda: Settings(record_traffic_key=given))
    assert settings.record_traffic_key.get_secret_value() == (given or "of all workers")


def test_what_the_supervisor_refuses_no_worker_takes_over_until_it_is_mended(orders, tmp_path):
    write_engines(tmp_path, [])
    write_refusal(tmp_path, "no engine is named any more")
    with pytest.raises(SettingsError, match="no engine is named any more"):
        orders.settings(Settings)
    for _ in range(2):
        write_refusal(tmp_path, None)
        orders.settings(Settings)


# --- signs of life: of a worker to its supervisor, and to systemd over real sockets


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
