import fcntl
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from structlog.testing import capture_logs

from proxy.core.books import IssuedKey
from proxy.core.quotas import DAY_S, MOST_DAYS, UseBook, Used
from proxy.fleet import state_files
from proxy.fleet.state_files import (
    MAX_BYTES,
    KeyBookFile,
    TableFiles,
    UseFile,
    make_directory,
    read,
    sealed,
    write,
)
from proxy.prompt import RegisteredTables
from proxy.settings import SettingsError
from tests.kv_world import safetensors_of


def test_a_file_is_replaced_whole_and_for_this_user_alone(tmp_path):
    path = tmp_path / "file"
    path.touch(0o644)
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_what_must_outlive_a_crash_is_on_disk_before_it_is_named_and_so_is_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        at = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((at.suffix, at.is_dir(), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "file", b"new", synced=True)
    assert synced == [(".part", False, False), ("", True, True)]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_one_that_others_may_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(SettingsError, match=rf"others may change what is in it \(mode {mode:o}\): chmod 700"):
        make_directory(tmp_path)


def test_a_directory_of_another_user_or_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"state_dir: '.*/file/x' cannot be written: Not a directory"):
        make_directory(tmp_path / "file" / "x")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(state_files, "_ROOT", -1)
    with pytest.raises(SettingsError, match="belongs to another user"):
        make_directory(tmp_path)


def test_what_a_killed_process_left_goes_and_what_another_one_writes_stays(tmp_path):
    old, young = tmp_path / "tmp1.part", tmp_path / "tmp2.part"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, time.time() - 3600))
    make_directory(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


def test_only_a_file_that_no_other_user_can_have_written_is_read(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write(path, b"ours")
    assert read(path) == b"ours"
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe, 0o600)
    for other in (link, pipe, tmp_path):
        with pytest.raises(OSError, match=r"symbolic|not a file|directory"):
            read(other)
    path.chmod(0o620)
    with pytest.raises(PermissionError, match="another user"):
        read(path)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user"):
        read(path)


def test_a_file_without_end_is_not_read(tmp_path):
    path = tmp_path / "file"
    write(path, b"")
    os.truncate(path, MAX_BYTES + 1)  # it takes no room
    with pytest.raises(OSError, match="longer than 2 GiB"):
        read(path)


# --- prompt tables


def loaded(directory):
    tables = RegisteredTables()
    TableFiles(directory).load(tables)
    return tables


def test_tables_come_back_with_their_names_and_extra_ids(tmp_path):
    files, tables = TableFiles(tmp_path), RegisteredTables()
    for table_id in ("b.c:d", "a"):
        files.put(tables.put(safetensors_of(), table_id=table_id, extra_id=7))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert loaded(tmp_path).list() == tables.list()
    files.delete(tables.get("a"))
    files.delete(tables.get("a"))
    assert [table.table_id for table in loaded(tmp_path).list()] == ["b.c:d"]


def test_a_file_that_is_no_table_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "t.0000000000000007.safetensors").write_bytes(b"no table")
    (tmp_path / "noid.safetensors").write_bytes(safetensors_of())
    (tmp_path / "u.0000000000000008.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "v.0000000000000009.safetensors")
    with capture_logs() as logs:
        assert loaded(tmp_path).list() == []
    assert [log["event"] for log in logs] == ["a saved prompt table is not used"] * 4


def test_a_full_disk_is_told_and_the_table_works(tmp_path):
    files, tables = TableFiles(tmp_path / "tables"), RegisteredTables()
    table = tables.put(safetensors_of(), table_id="t", extra_id=7)
    (tmp_path / "tables").rmdir()
    (tmp_path / "tables").touch()
    with capture_logs() as logs:
        files.put(table)
        files.delete(table)
    assert ["not saved" in logs[0]["event"], "not removed" in logs[1]["event"]] == [True, True]


# --- the use of tenants


TODAY = int(time.time() // DAY_S)
KEY = (TODAY, "acme", "m")


async def test_what_workers_left_is_counted_once(tmp_path):
    """There were three workers, and now there is one process."""
    for number in (1, 2, 3):
        (tmp_path / f"worker-{number}").mkdir()
        await UseFile(tmp_path / f"worker-{number}", UseBook({KEY: Used(number)}.items())).save()
    left = sorted(tmp_path.glob("worker-*"))
    (left[2] / "use").write_bytes(b"?")
    for _ in range(2):  # it may be killed before it saves
        file = UseFile(tmp_path, book := UseBook(), left)
        assert book == {KEY: Used(3)}
    await file.save()
    assert [*tmp_path.glob("worker-*/use")] == []
    UseFile(tmp_path, later := UseBook(), left)
    assert later == {KEY: Used(3)}


async def test_only_a_change_is_written_and_old_days_go(tmp_path):
    book = UseBook(((TODAY - ago, "acme", "m"), Used(1)) for ago in range(MOST_DAYS + 1))
    file = UseFile(tmp_path, book)
    await file.save()
    assert len(book) == MOST_DAYS
    book[KEY].requests += 1
    await file.save()
    (tmp_path / "use").unlink()
    await file.save()
    assert not (tmp_path / "use").exists()
    book[KEY].failed += 1
    await file.save()
    assert (tmp_path / "use").exists()


@pytest.mark.parametrize("raw", [b"?", b"kvpin-use 2\nx", b""])
async def test_a_file_that_cannot_be_read_is_one_warning(tmp_path, raw):
    (tmp_path / "use").write_bytes(raw)
    book = UseBook()
    with capture_logs() as logs:
        file = UseFile(tmp_path, book)
    assert [each["log_level"] for each in logs] == ["warning"]
    book[KEY].requests += 1
    await file.save()
    UseFile(tmp_path, later := UseBook())
    assert later == book
    assert (tmp_path / "use.unread").read_bytes() == raw  # a newer kvpin may read it


async def test_a_disk_that_is_full_is_told_and_tried_again(tmp_path, monkeypatch):
    file = UseFile(tmp_path, book := UseBook())
    book[KEY].requests += 1
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(state_files, "write", Mock(side_effect=OSError(28, "No space left on device")))
        await file.save()
    assert logs[0]["error"] == "No space left on device"
    await file.save()
    assert (tmp_path / "use").exists()


# --- issued keys


def key(number=1, *, removed=False):
    return IssuedKey(f"key-{number}", "t", b"%d" % number, "last", float(number), removed=float(removed))


def test_without_a_directory_there_are_none_and_the_first_one_makes_it_for_this_user_alone(tmp_path):
    directory = tmp_path / "state"
    file = KeyBookFile(directory)
    assert (file.read(), file.version) == ([], None)
    assert file.add([key()]) == [key()]
    assert KeyBookFile(directory).read() == [key()]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / "keys.lock").chmod(0o644)
    before = file.version
    file.add([key()])
    assert file.version == before
    file.add([key(removed=True)])
    assert file.version != before
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {"keys": 0o600, "keys.lock": 0o600}


def test_a_lock_that_another_process_keeps_is_given_up_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "_LOCK_S", 0.05)
    with (tmp_path / "keys.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another process has locked '.*/keys\.lock' for 0.05 s"):
            KeyBookFile(tmp_path).add([key()])
    assert KeyBookFile(tmp_path).add([key()]) == [key()]


def test_kvpins_that_share_it_lose_none_of_each_others_keys(tmp_path):
    """Each knows only its own."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: KeyBookFile(tmp_path).add([key(number)]), range(40)))
    assert [each.id for each in KeyBookFile(tmp_path).read()] == [f"key-{number}" for number in range(40)]


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flipped, "it is damaged"),
        (lambda data: data[:-1], "it is damaged"),
        (lambda _data: b"", "it is damaged"),
        (lambda data: data.replace(b"keys 1", b"keys 2"), "another version of kvpin wrote it"),
        (lambda _data: sealed(b"kvpin-keys 1\n", msgspec.msgpack.encode([["x"]])), "another version"),
        (lambda _data: sealed(b"kvpin-keys 1\n", b"\x91" * 100_000), "another version"),
        (lambda data: sealed(b"kvpin-keys 1\n", data[29:].replace(b"key-1", b"key-\xff")), "another version"),
    ],
)
def test_a_damaged_one_is_one_sentence_and_is_never_overwritten(tmp_path, change, why):
    file, path = KeyBookFile(tmp_path), tmp_path / "keys"
    file.add([key()])
    path.write_bytes(change(path.read_bytes()))
    before = path.read_bytes()
    for use in (file.read, lambda: file.add([key(2)])):
        with pytest.raises(SettingsError, match=f"cannot be read: {why}.*put a backup") as told:
            use()
        assert "\n" not in str(told.value)
    assert path.read_bytes() == before


def test_one_that_others_may_have_written_is_not_read(tmp_path):
    KeyBookFile(tmp_path).add([key()])
    (tmp_path / "keys").chmod(0o666)
    with pytest.raises(SettingsError, match="another user may have written it"):
        KeyBookFile(tmp_path).read()
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="others may change what is in it"):
        KeyBookFile(tmp_path).read()
