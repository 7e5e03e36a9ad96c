import fcntl
import stat
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from proxy.core.books import IssuedKey
from proxy.fleet import state_files
from proxy.fleet.state_files import KeyBookFile, sealed
from proxy.settings import SettingsError


def key(number=1, *, removed=False):
    return IssuedKey(f"key-{number}", "t", b"%d" % number, "last", float(number), removed=float(removed))


def test_without_a_directory_there_are_none_and_the_first_one_makes_it(tmp_path):
    file = KeyBookFile(tmp_path / "state")
    assert (file.read(), file.version) == ([], None)
    assert file.add([key()]) == [key()]
    assert KeyBookFile(tmp_path / "state").read() == [key()]
    assert stat.S_IMODE((tmp_path / "state" / "keys").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_lock_that_another_process_keeps_is_given_up_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "_LOCK_S", 0.05)
    with (tmp_path / "keys.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another process has locked '.*/keys\.lock' for 0.05 s"):
            KeyBookFile(tmp_path).add([key()])
    assert KeyBookFile(tmp_path).add([key()]) == [key()]


def test_the_lock_is_this_users_alone(tmp_path):
    (tmp_path / "keys.lock").touch(0o644)
    KeyBookFile(tmp_path).add([key()])
    assert stat.S_IMODE((tmp_path / "keys.lock").stat().st_mode) == 0o600


def test_a_book_in_a_directory_that_others_may_write_is_refused(tmp_path):
    KeyBookFile(tmp_path).add([key()])
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="others may change what is in it"):
        KeyBookFile(tmp_path).read()


def test_it_tells_when_it_has_changed(tmp_path):
    file = KeyBookFile(tmp_path)
    file.add([key()])
    before = file.version
    file.add([key()])
    assert file.version == before
    file.add([key(removed=True)])
    assert file.version != before


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
    (tmp_path / "keys").rename(tmp_path / "other")
    (tmp_path / "keys").symlink_to(tmp_path / "other")
    with pytest.raises(SettingsError, match="Too many levels of symbolic links"):
        KeyBookFile(tmp_path).read()
