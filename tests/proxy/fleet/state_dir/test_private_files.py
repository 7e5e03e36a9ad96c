import os
import stat
import time
from pathlib import Path

import pytest

from proxy.fleet import state_files
from proxy.fleet.state_files import MAX_BYTES, make_directory, read, write
from proxy.settings import SettingsError


def test_a_file_is_replaced_whole_and_for_this_user_alone(tmp_path):
    path = tmp_path / "file"
    path.touch(0o644)
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_must_outlive_a_crash_is_on_disk_before_it_is_named_and_so_is_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        at = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((at.suffix, at.is_dir(), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "file", b"new", synced=True)
    assert synced == [(".part", False, False), ("", True, True)]


def test_what_cannot_be_written_leaves_the_old(tmp_path):
    path = tmp_path / "file"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_made_for_this_user_alone(tmp_path):
    directory = tmp_path / "a" / "b"
    make_directory(directory)
    make_directory(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_one_that_others_may_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(SettingsError, match=rf"others may change what is in it \(mode {mode:o}\): chmod 700"):
        make_directory(tmp_path)


def test_so_is_one_of_another_user(tmp_path, monkeypatch):
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


def test_one_that_cannot_be_written_is_refused_by_the_settings_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"state_dir: '.*/file/x' cannot be written: Not a directory"):
        make_directory(tmp_path / "file" / "x")


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
