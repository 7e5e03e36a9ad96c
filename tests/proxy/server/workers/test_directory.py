"""Where the workers' sockets are."""

import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from proxy.peers.bus import UnixBus
from proxy.server.workers import supervisor as directory_module
from proxy.server.workers.supervisor import OwnDirectory
from proxy.settings import SettingsError


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
    monkeypatch.setattr(directory_module, "_places", lambda: iter([str(long)]))
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
        monkeypatch.setattr(directory_module, "_places", lambda: iter([place]))
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
