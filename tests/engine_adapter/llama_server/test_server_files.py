"""Who may use a server. That a second kvpin keeps off: test_adapter.py, and tests/live/test_owners.py."""

import os
import re
import subprocess
import sys

import pytest

from engine_adapter.errors import EngineTaken
from engine_adapter.llama_server.server_files import ServerLock

URL = "http://127.0.0.1:8081"
HOLD = """
import sys
from pathlib import Path
from engine_adapter.llama_server.server_files import ServerLock
lock = ServerLock(Path(sys.argv[1]), sys.argv[2])
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path):
    """Makes locks that are free when the test ends."""
    made = []

    def make(url=URL, directory=tmp_path):
        made.append(ServerLock(directory, url))
        return made[-1]

    yield make
    for each in made:
        each.free()


def test_the_second_is_told_who_has_it_and_since_when(lock):
    first, second = lock(), lock()
    first.take()
    first.take()
    with pytest.raises(EngineTaken, match=rf"process {os.getpid()} on \S+, since \d{{4}}-.* UTC\)") as taken:
        second.take()
    assert re.fullmatch(r"process \d+ on \S+, since .* UTC", taken.value.holder)
    first.free()
    first.free()
    second.take()
    with pytest.raises(EngineTaken):
        first.take()


@pytest.mark.parametrize("url", ["http://localhost:8081", "http://[::1]:8081"])
def test_one_server_has_one_lock_whatever_this_machine_is_called(lock, url):
    lock(url).take()
    with pytest.raises(EngineTaken):
        lock().take()


def test_each_server_has_its_own(lock):
    for name in ("127.0.0.1", "localhost.example"):
        lock(f"http://{name}:8081").take()


def test_it_ends_with_its_process_however_that_ends(lock, tmp_path):
    command = [sys.executable, "-c", HOLD, tmp_path, URL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(EngineTaken, match=f"process {other.pid} on"):
            lock().take()
        other.kill()
        other.wait()
        lock().take()


def test_a_holder_that_left_no_name_still_holds_it(lock, tmp_path):
    lock().take()
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"?")
    with pytest.raises(EngineTaken, match="did not say which"):
        lock().take()


def test_nothing_is_locked_without_a_directory(lock, tmp_path, caplog):
    lock(directory=None).take()
    elsewhere = lock(directory=tmp_path / "nothere")
    elsewhere.take()
    elsewhere.take()
    assert len(caplog.records) == 1
    assert "a second kvpin on the same server would not be noticed" in caplog.text


def test_nor_where_the_file_system_has_no_locks(lock, caplog, monkeypatch):
    def flock(_file, _how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    lock().take()
    assert "No locks available" in caplog.text
