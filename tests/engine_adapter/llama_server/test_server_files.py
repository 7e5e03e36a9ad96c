"""Who may use a server. That a second kvpin keeps off: test_adapter.py, and tests/live/test_owners.py."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import msgspec
import pytest

from engine_adapter.errors import EngineTaken
from engine_adapter.llama_server import server_files
from engine_adapter.llama_server.server_files import ServerLock, ServerRecord

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


class TestServersThatAreGone:
    @pytest.fixture
    def gone(self, lock, tmp_path):
        """The files that a kvpin left about a server that is gone."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        left = lock(f"http://localhost:{port}")
        left.take()
        (path,) = tmp_path.glob("*.lock")
        for suffix in ("pins", "probe"):
            path.with_suffix(f".{suffix}").write_bytes(b"x")
        left.free()
        return path

    def files(self, path):
        return sorted(each.name for each in path.parent.glob(f"{path.stem}.*"))

    def test_their_files_are_removed_by_whoever_comes_next(self, gone, lock):
        assert len(self.files(gone)) == 3
        lock(URL).take()
        assert self.files(gone) == []

    def test_a_server_that_still_runs_keeps_its_files(self, lock, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as server:
            held = lock(f"http://127.0.0.1:{server.getsockname()[1]}")
            held.take()
            (path,) = tmp_path.glob("*.lock")
            held.free()
            lock(URL).take()
            assert self.files(path) == [path.name]

    def test_so_does_one_that_another_kvpin_uses_or_of_another_machine(self, gone, lock):
        held = lock(msgspec.json.decode(gone.read_bytes())["url"])
        held.take()
        lock(URL).take()
        assert len(self.files(gone)) == 3
        held.free()
        content = msgspec.json.decode(gone.read_bytes())
        for number, changed in enumerate(({"host": "elsewhere"}, {"url": "http://10.0.0.1:1"}, {"url": ""})):
            gone.write_bytes(msgspec.json.encode(content | changed))
            lock(f"{URL}/{number}").take()
            assert len(self.files(gone)) == 3

    def test_a_lock_that_is_removed_while_it_is_taken_is_taken_anew(self, lock, tmp_path, monkeypatch):
        found, answers = server_files._is_there, [False]
        monkeypatch.setattr(
            server_files, "_is_there", lambda *where: answers.pop() if answers else found(*where)
        )
        lock().take()
        with pytest.raises(EngineTaken):
            lock().take()


SERVER = "http://127.0.0.1:1"


def record(directory, instance="one", url=SERVER, kind=list[int]):
    return ServerRecord(directory, url, instance, "numbers", kind)


@pytest.mark.parametrize("other", [{"instance": "two"}, {"instance": None}, {"url": "http://127.0.0.1:2"}])
def test_the_record_of_another_process_or_server_counts_for_nothing(tmp_path, other):
    record(tmp_path).write([1])
    assert record(tmp_path, **other).read() is None


@pytest.mark.parametrize("damage", [b"", b"?", msgspec.msgpack.encode(("one", ["a"]))])
def test_a_damaged_record_counts_for_nothing(tmp_path, damage):
    record(tmp_path).write([1])
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert record(tmp_path).read() is None


def test_a_record_that_cannot_be_written_is_removed_and_told_once(tmp_path, caplog):
    kept = record(tmp_path)
    kept.write([1])
    (path,) = tmp_path.iterdir()
    part = path.with_name(f"{path.name}.part")
    part.mkdir()
    kept.write([2])
    kept.write([3])
    assert not path.exists()
    assert [message.partition(": ")[2] for message in caplog.messages] == ["numbers will not outlive kvpin"]
    part.rmdir()
    kept.write([4])
    assert record(tmp_path).read() == [4]


def test_without_a_directory_nothing_is_recorded(caplog):
    record(None).write([1])
    assert record(None).read() is None
    assert caplog.messages == []
