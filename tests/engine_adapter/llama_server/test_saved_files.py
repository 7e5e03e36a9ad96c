import logging
import os
import time
from array import array
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.llama_server import saved_files
from engine_adapter.llama_server.saved_files import (
    GRACE_S,
    FileFault,
    Saved,
    StateFileError,
    checksum,
    copy,
    read_tokens,
)
from engine_adapter.types import Tier
from tests.state_files import (
    frame,
    no_handles,
    state_bytes,
    unprivileged,
    write_state,
)

TOKENS = array("i", [3, 4, 5])


@pytest.fixture
def path(tmp_path) -> Path:
    """An entry: a file and its sidecar."""
    path = tmp_path / saved_files.new_name("key")
    write_state(path, TOKENS, size=5000)
    saved_files.write_sidecar(path, record(path))
    return path


def record(path: Path) -> Saved:
    size = path.stat().st_size
    return Saved(1, "key", None, 3, size, checksum(path), 1.0, 2.0, 3, name=path.name, tokens=TOKENS)


def there(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def scan(directory: Path, *, later: float = 0.0, taken=frozenset()) -> list[str]:
    found, _ = saved_files.scan(directory, Tier.HOST, time.time() + later, taken)
    return [each.name for each in found]


def test_a_name_holds_its_key_and_is_never_the_same():
    name = saved_files.new_name("a1B2")
    assert name != saved_files.new_name("a1B2")
    assert saved_files.key_of(name) == "a1B2"
    for other in ("notes.bin", "kvpin-k-1.bin", name + ".part", name.replace(".bin", ".json"), "../" + name):
        assert saved_files.key_of(other) is None


@pytest.mark.parametrize("key", ["", "a-b", "a/b", "..", "é", "k" * 129])
def test_a_key_that_makes_no_name(key):
    with pytest.raises(ValueError, match="must be 1 to 128"):
        saved_files.new_name(key)


def test_a_file_that_changes_while_it_is_read_is_not_taken(path, monkeypatch):
    def written_meanwhile(path: Path) -> int:
        with path.open("ab") as file:
            file.write(b"more")
        return checksum(path)

    monkeypatch.setattr(saved_files, "checksum", written_meanwhile)
    with pytest.raises(StateFileError, match="changed while it was read"):
        saved_files.inspect(path, "key", None, None, None)


def test_a_file_of_the_same_stamp_is_not_hashed_again(path):
    wanted = record(path)
    seen = wanted.seen = saved_files.verify(path, wanted)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(seen[2], seen[2]))  # nobody does this: it shows that the bytes are not read
    assert saved_files.verify(path, wanted) == seen


def test_a_sidecar_is_written_whole_or_not_at_all(path, little):
    before = path.with_suffix(".json").read_bytes()
    with little.full(), pytest.raises(StateFileError, match="no room"):
        saved_files.write_sidecar(little.path / path.name, record(path))
    assert there(little.path) == set()
    path.with_suffix(".json.part").mkdir()
    with pytest.raises(StateFileError, match="Is a directory") as caught:
        saved_files.write_sidecar(path, record(path))
    assert caught.value.reason is FileFault.UNWRITABLE
    assert path.with_suffix(".json").read_bytes() == before


def test_a_cap_beyond_the_file_system_is_lowered(tmp_path, caplog):
    assert saved_files.capacity(tmp_path, 1000, 0) == 1000
    assert not caplog.records
    room = saved_files.capacity(tmp_path, 1 << 62, 0)
    assert 0 < room < 1 << 62
    assert "the cap is lowered" in caplog.text
    with pytest.raises(StateFileError, match="No such file"):
        saved_files.capacity(tmp_path / "none", 1, 0)


def test_what_entries_hold_is_room_of_theirs_and_what_others_wrote_is_not(little):
    empty = saved_files.capacity(little.path, 1 << 62, 0)
    (little.path / "some.bin").write_bytes(bytes(400 << 10))
    for held, change in [(400 << 10, 0), (0, 400 << 10)]:
        if little.is_mounted:  # else others write to the same file system meanwhile
            assert abs(empty - change - saved_files.capacity(little.path, 1 << 62, held)) < 16 << 10


# --- scan --------------------------------------------------------------------------------------------


def test_a_scan_finds_what_is_sound_and_touches_nothing_foreign(path, tmp_path, caplog):
    foreign = ["notes.txt", "kvpin-notes.bin", "kvpin-key-12.json", "other.bin"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
        os.utime(tmp_path / name, (0, 0))
    before = there(tmp_path)
    ((found,), _) = saved_files.scan(tmp_path, Tier.DISK, time.time() + 2 * GRACE_S, frozenset())
    assert (found.name, found.tokens, found.tier) == (path.name, TOKENS, Tier.DISK)
    assert found.sidecar() == record(path).sidecar()
    assert there(tmp_path) == before
    assert not caplog.records


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "4999 bytes, of 5000"),
        (lambda path: write_state(path, [3, 4], size=5000), "2 tokens, of 3"),
        (lambda path: path.with_suffix(".json").write_text("{"), "it is no JSON"),
        (lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe"), "it is no JSON"),
        (lambda path: path.with_suffix(".json").write_bytes(b""), "it is no JSON"),
        (lambda path: path.with_suffix(".json").write_bytes(b'{"\xff": 1}'), "it is no JSON"),
    ],
)
def test_a_damaged_entry_is_deleted_with_one_line(path, tmp_path, caplog, harm, why):
    harm(path)
    assert scan(tmp_path) == []
    assert there(tmp_path) == set()
    (line,) = caplog.messages
    assert why in line
    assert line.endswith("it is deleted")


def rewrite_sidecar(path: Path, **fields) -> None:
    sidecar = path.with_suffix(".json")
    sidecar.write_bytes(msgspec.json.encode(msgspec.json.decode(sidecar.read_bytes()) | fields))


def newer_server(path: Path) -> None:
    data = state_bytes(frame(TOKENS), version=4)
    path.write_bytes(data + bytes(5000 - len(data)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: rewrite_sidecar(path, format=2), "format 2, known is 1"),
        (lambda path: rewrite_sidecar(path, compression="zstd"), "unknown field `compression`"),
        (lambda path: rewrite_sidecar(path, checksum="a text now"), "another version of kvpin wrote it"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "another version of kvpin wrote it"),
        (lambda path: path.with_suffix(".json").write_text("[" * 5000), "it is nested too deep"),
        (lambda path: rewrite_sidecar(path, key="x"), "key 'x' is not the one of its name"),
        (newer_server, "format version 4, known is 3"),
    ],
)
def test_an_entry_of_another_version_is_left_in_place_with_one_line(path, tmp_path, caplog, change, why):
    change(path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert scan(tmp_path, later=2 * GRACE_S) == []
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    (line,) = caplog.messages
    assert "left in place and not used" in line
    assert why in line
    assert saved_files.scan(tmp_path, Tier.HOST, time.time(), frozenset())[1] == 0


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_an_entry_that_may_not_be_read_is_left_in_place(save_dir, suffix, caplog):
    paths = [save_dir / saved_files.new_name("key") for _ in range(3)]
    for path in paths:
        write_state(path, TOKENS, size=5000)
        saved_files.write_sidecar(path, record(path))
    for path in paths[:2]:
        path.with_suffix(suffix).chmod(0)
    before = there(save_dir)
    with unprivileged(save_dir):
        assert scan(save_dir, later=2 * GRACE_S) == [paths[2].name]
    assert there(save_dir) == before
    (line,) = caplog.messages
    assert line.startswith("2 saved prefixes are left in place and not used")
    assert "Permission denied" in line
    for path in paths:
        path.with_suffix(suffix).chmod(0o600)
    assert sorted(scan(save_dir)) == sorted(path.name for path in paths)


def test_a_full_table_of_file_handles_deletes_nothing(path, tmp_path):
    before = there(tmp_path)
    with no_handles(), pytest.raises(StateFileError, match="Too many open files"):
        scan(tmp_path, later=2 * GRACE_S)
    assert there(tmp_path) == before
    assert scan(tmp_path) == [path.name]


def test_the_bytes_of_entries_and_of_what_may_become_one_count(path, tmp_path):
    (tmp_path / saved_files.new_name("key")).write_bytes(bytes(300))
    (tmp_path / "notes.bin").write_bytes(bytes(300))
    sidecar = path.with_suffix(".json").stat().st_size
    assert saved_files.scan(tmp_path, Tier.HOST, time.time(), frozenset())[1] == 5300 + sidecar
    assert saved_files.size_of(tmp_path / "gone meanwhile") == 0


def test_what_belongs_to_no_entry_is_left_while_it_is_young(path, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    (tmp_path / saved_files.new_name("key")).write_bytes(b"a save in progress")
    (tmp_path / saved_files.new_name("key")).with_suffix(".json").write_bytes(b"a move in progress")
    (tmp_path / (saved_files.new_name("key") + ".part")).write_bytes(b"a copy in progress")
    before = there(tmp_path)
    assert scan(tmp_path, later=GRACE_S / 2) == [path.name]
    assert there(tmp_path) == before
    assert not caplog.records
    assert scan(tmp_path, later=2 * GRACE_S) == [path.name]
    assert there(tmp_path) == {path.name, path.with_suffix(".json").name}
    assert len(caplog.records) == 3


def test_a_scan_does_not_wait_for_a_sidecar_that_is_a_fifo(path, tmp_path):
    odd = tmp_path / saved_files.new_name("key")
    write_state(odd, TOKENS)
    os.mkfifo(odd.with_suffix(".json"))
    assert scan(tmp_path) == [path.name]


def test_a_scan_survives_what_it_cannot_read_or_remove(path, tmp_path, caplog):
    stuck = tmp_path / saved_files.new_name("key")
    write_state(stuck, TOKENS)
    stuck.with_suffix(".json").mkdir()
    leftover = tmp_path / (saved_files.new_name("key") + ".part")
    leftover.mkdir()
    os.utime(leftover, (0, 0))
    assert scan(tmp_path) == [path.name]
    assert stuck.with_suffix(".json").is_dir()
    assert "Is a directory" in caplog.text
    assert f"{leftover} cannot be removed" in caplog.text
    with pytest.raises(StateFileError, match="cannot be read: Not a directory"):
        scan(path)


@pytest.mark.parametrize(
    ("directory", "in_memory"),
    [("/run/fast/kv", True), ("/var/kv", False), ("/var/fast/kv", True), ("/var/fastest", False)],
)
def test_which_directories_a_reboot_empties(directory, in_memory, tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text("d / ext4 rw 0 0\nt /run/fast tmpfs rw 0 0\nt /var/fast ramfs rw 0 0\n")
    monkeypatch.setattr(saved_files, "_MOUNTS", mounts)
    saved_files.is_in_memory.cache_clear()
    assert saved_files.is_in_memory(Path(directory)) is in_memory
    monkeypatch.setattr(saved_files, "_MOUNTS", tmp_path / "none")
    saved_files.is_in_memory.cache_clear()
    assert not saved_files.is_in_memory(Path(directory))
    saved_files.is_in_memory.cache_clear()


# --- the format of a file ------------------------------------------------------------------------------

WORDS = array("i", [5, 6, 7, 0, 2**31 - 1])


@pytest.fixture
def saved(tmp_path) -> Path:
    return tmp_path / "saved.bin"


def refused(path: Path, data: bytes, why: str = "") -> FileFault:
    path.write_bytes(data)
    with pytest.raises(StateFileError, match=f"{path}: .*{why}") as caught:
        read_tokens(path)
    return caught.value.reason


@pytest.mark.parametrize("words", [WORDS, array("i")], ids=["some", "none"])
@pytest.mark.parametrize("form", [frame, list], ids=["framed", "plain, as by older servers"])
def test_the_tokens_of_a_file(saved, words, form):
    saved.write_bytes(state_bytes(form(words), b"kv"))
    assert read_tokens(saved) == words


DAMAGED, FOREIGN = FileFault.DAMAGED, FileFault.FOREIGN


@pytest.mark.parametrize(
    ("data", "fault", "why"),
    [
        (b"", DAMAGED, "less than a header"),
        (state_bytes(frame(WORDS))[:11], DAMAGED, "less than a header"),
        (state_bytes(frame(WORDS))[:-1], DAMAGED, "less than its 9 token words"),
        (state_bytes(frame(WORDS), magic=0x67677370), DAMAGED, "it starts with 0x67677370"),
        (state_bytes([-1, 1, 0]), DAMAGED, "less than a frame"),
        (state_bytes([-1, 1, -1, 0, 0]), DAMAGED, "-1 tokens do not fit"),
        (state_bytes([-1, 1, 2, 8, 0]), DAMAGED, "2 tokens do not fit"),
        (state_bytes([-1, 1, 1, 8, 0, 0]), DAMAGED, "are too many"),
        (state_bytes(frame([8, -2])), DAMAGED, "token id -2"),
        (state_bytes([8, -2]), DAMAGED, "token id -2"),
        # What another version wrote may be sound.
        (state_bytes(frame(WORDS), version=4), FOREIGN, "format version 4"),
        (state_bytes([-1, 2, 0, 0]), FOREIGN, "token list version 2"),
        (state_bytes(frame([8, -1, -1, 9], media=[1])), FOREIGN, "images or audio"),
    ],
)
def test_what_is_no_whole_file_of_this_format_is_refused(saved, data, fault, why):
    assert refused(saved, data, why) is fault


@given(st.data())
def test_no_bytes_break_the_reader(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.bin"
    good = bytearray(state_bytes(frame([1, 2, 3]), b"kv"))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        tokens = read_tokens(path)
    except StateFileError:
        return
    assert all(token >= 0 for token in tokens)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name, reason in [
        ("none", FileFault.MISSING),
        ("fifo", FileFault.UNREADABLE),
        (".", FileFault.UNREADABLE),
    ]:
        for call in (read_tokens, checksum, lambda path: copy(path, tmp_path / "copy")):
            with pytest.raises(StateFileError) as caught:
                call(tmp_path / name)
            assert caught.value.reason is reason
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fifo"]


def test_a_file_that_the_system_cannot_read(tmp_path):
    with pytest.raises(StateFileError, match="Input/output error") as caught:
        checksum(Path("/proc/self/mem"))
    assert caught.value.reason is FileFault.UNREADABLE


@pytest.mark.parametrize("size", [100, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_the_checksum_is_of_the_whole_file(saved, size):
    data = write_state(saved, WORDS, size=size)
    assert len(data) == size
    assert checksum(saved) == xxhash.xxh3_64_intdigest(data)
    saved.write_bytes(data[:-1] + b"\xff")
    assert checksum(saved) != xxhash.xxh3_64_intdigest(data)


def test_a_copy_is_whole_and_hashed_on_its_way(saved, tmp_path):
    data = write_state(saved, WORDS, size=3_000_000)
    target = tmp_path / "copy.bin"
    assert copy(saved, target) == checksum(saved)
    assert target.read_bytes() == data
    assert sorted(tmp_path.iterdir()) == [target, saved]


def test_a_copy_that_cannot_be_written_leaves_nothing(saved, tmp_path, little):
    write_state(saved, WORDS, size=200_000)
    with little.full(), pytest.raises(StateFileError, match="no room") as caught:
        copy(saved, little.path / "copy.bin")
    assert caught.value.reason is FileFault.NO_ROOM
    assert there(little.path) == set()
    with pytest.raises(StateFileError, match="cannot be written") as caught:
        copy(saved, tmp_path / "gone" / "copy.bin")
    assert caught.value.reason is FileFault.UNWRITABLE
