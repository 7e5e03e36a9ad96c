import os
from pathlib import Path

import pytest

from engine_adapter import EngineSpecError
from engine_adapter.llama_server import command
from engine_adapter.llama_server.command import default_save_bytes, default_save_dir, make_save_dir

GIB = 2**30


@pytest.fixture(autouse=True)
def forget():
    """The answers last as long as the process; each test asks anew."""
    default_save_dir.cache_clear()
    default_save_bytes.cache_clear()
    yield
    default_save_dir.cache_clear()
    default_save_bytes.cache_clear()


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A directory in the place of /dev/shm, with 4 GiB free; whether it is memory is what `mounts` says."""
    monkeypatch.setattr(command, "_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(command, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(command, "_room", lambda _directory: 4 * GIB)
    monkeypatch.delenv("KVPIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "shm").mkdir()
    (tmp_path / "mounts").write_text(
        f"proc /proc proc rw 0 0\nshm {tmp_path / 'shm'} tmpfs rw,size=64k 0 0\n"
    )
    return tmp_path / "shm"


def test_memory_where_there_is_some(memory):
    assert default_save_dir() == memory / f"kvpin-{os.getuid()}"


def test_the_cache_directory_where_there_is_none(memory, monkeypatch):
    command._MOUNTS.write_text(f"/dev/sda1 {memory} ext4 rw 0 0\n")
    assert default_save_dir() == memory.parent / "cache" / "kvpin" / "kv"
    default_save_dir.cache_clear()
    command._MOUNTS.unlink()
    monkeypatch.setenv("KVPIN_CACHE", "/elsewhere")
    assert default_save_dir() == Path("/elsewhere/kv")


def test_the_cache_directory_where_memory_is_scarce(memory, monkeypatch):
    monkeypatch.setattr(command, "_room", lambda _directory: 64 * 2**20)
    assert default_save_dir() == memory.parent / "cache" / "kvpin" / "kv"


@pytest.mark.parametrize(("room", "cap"), [(4 * GIB, 2 * GIB), (64 * GIB, 8 * GIB), (0, 1)])
def test_half_of_the_room_and_at_most_8_gib(monkeypatch, room, cap):
    monkeypatch.setattr(command, "_room", lambda _directory: room)
    assert default_save_bytes(Path("/kv")) == cap
    monkeypatch.setattr(command, "_room", lambda _directory: 1)
    assert default_save_bytes(Path("/kv")) == cap  # servers that share it agree


def test_the_room_counts_what_lies_there(tmp_path, monkeypatch):
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert command._room(tmp_path / "not" / "yet") == 1000
    (tmp_path / "kvpin-1.bin").write_bytes(bytes(100))
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert command._room(tmp_path) == 1100


def test_the_default_is_made_for_this_user_alone(memory):
    directory = default_save_dir()
    make_save_dir(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    make_save_dir(directory)  # again is fine
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_default_that_is_somebody_elses_is_refused(memory, tmp_path, monkeypatch):
    directory = default_save_dir()
    (tmp_path / "theirs").mkdir()
    directory.symlink_to(tmp_path / "theirs")
    with pytest.raises(EngineSpecError, match="is not this user's directory"):
        make_save_dir(directory)
    directory.unlink()
    make_save_dir(directory)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(EngineSpecError, match="is not this user's directory"):
        make_save_dir(directory)


def test_what_the_operator_chose_keeps_its_rights(memory, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    make_save_dir(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755
    make_save_dir(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(EngineSpecError, match=rf"directory '{directory}' for saved KV cannot be made: "):
            make_save_dir(directory)
