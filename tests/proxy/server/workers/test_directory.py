"""Where the workers' sockets are."""

import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from proxy.peers.unix_bus import UnixBus
from proxy.server.workers import directory as directory_module
from proxy.server.workers.directory import OwnDirectory
from proxy.settings import SettingsError


@pytest.fixture
def long(tmp_path, monkeypatch):
    """TMPDIR is too long for a socket."""
    path = tmp_path / ("x" * 100)
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_it_is_its_owners_alone_and_is_removed_with_all_in_it():
    own = OwnDirectory()
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    (own.path / "engines.json").write_text("{}")
    own.remove()
    assert not own.path.exists()


def test_what_cleans_temporary_directories_finds_it_locked():
    own = OwnDirectory()
    other = os.open(own.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(other)
    own.remove()


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
