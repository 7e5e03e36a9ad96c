import asyncio
import os
import threading
from array import array
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.llama_server.saved_files import FileFault, StateFileError, checksum, copy, read_tokens
from tests.state_files import LittleRoom, act, complete, frame, state_bytes, write_state

TOKENS = array("i", [5, 6, 7, 0, 2**31 - 1])


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "saved.bin"


def refused(path: Path, data: bytes, why: str = "") -> FileFault:
    path.write_bytes(data)
    with pytest.raises(StateFileError, match=f"{path}: .*{why}") as caught:
        read_tokens(path)
    return caught.value.reason


def test_the_tokens_of_a_file(path):
    write_state(path, TOKENS, b"kv")
    assert read_tokens(path) == TOKENS
    write_state(path, [])
    assert read_tokens(path) == array("i")


def test_a_plain_list_of_tokens_as_servers_of_before_wrote_it(path):
    path.write_bytes(state_bytes(TOKENS, b"kv"))
    assert read_tokens(path) == TOKENS
    path.write_bytes(state_bytes([]))
    assert read_tokens(path) == array("i")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "less than a header"),
        (state_bytes(frame(TOKENS))[:11], "less than a header"),
        (state_bytes(frame(TOKENS))[:-1], "less than its 9 token words"),
        (state_bytes(frame(TOKENS), magic=0x67677370), "it starts with 0x67677370"),
        (state_bytes([-1, 1, 0]), "less than a frame"),
        (state_bytes([-1, 1, -1, 0, 0]), "-1 tokens do not fit"),
        (state_bytes([-1, 1, 2, 8, 0]), "2 tokens do not fit"),
        (state_bytes([-1, 1, 1, 8, 0, 0]), "are too many"),
        (state_bytes(frame([8, -2])), "token id -2"),
        (state_bytes([8, -2]), "token id -2"),
    ],
)
def test_what_is_no_whole_file_is_damaged(path, data, why):
    assert refused(path, data, why) is FileFault.DAMAGED


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (state_bytes(frame(TOKENS), version=4), "format version 4"),
        (state_bytes([-1, 2, 0, 0]), "token list version 2"),
        (state_bytes(frame([8, -1, -1, 9], media=[1])), "images or audio"),
    ],
)
def test_what_another_version_wrote_may_be_sound(path, data, why):
    assert refused(path, data, why) is FileFault.FOREIGN


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
def test_the_checksum_is_of_the_whole_file(path, size):
    data = write_state(path, TOKENS, size=size)
    assert len(data) == size
    assert checksum(path) == xxhash.xxh3_64_intdigest(data)
    path.write_bytes(data[:-1] + b"\xff")
    assert checksum(path) != xxhash.xxh3_64_intdigest(data)


async def test_the_loop_runs_while_a_file_is_hashed(path):
    path.write_bytes(b"")
    os.truncate(path, 1 << 28)  # a hole: a while to hash, no room taken
    finished, turns = threading.Event(), 0
    task = asyncio.create_task(asyncio.to_thread(lambda: (checksum(path), finished.set())))
    while not task.done():
        await asyncio.sleep(0)
        turns += not finished.is_set()
    assert turns > 10


def test_a_copy_is_whole_and_hashed_on_its_way(path, tmp_path):
    data = write_state(path, TOKENS, size=3_000_000)
    target = tmp_path / "copy.bin"
    assert copy(path, target) == checksum(path)
    assert target.read_bytes() == data
    assert sorted(tmp_path.iterdir()) == [target, path]


def test_a_copy_without_room_leaves_nothing(path, tmp_path):
    write_state(path, TOKENS, size=200_000)
    room = LittleRoom(tmp_path / "little", 1 << 20)
    try:
        with room.full():
            with pytest.raises(StateFileError, match="no room") as caught:
                copy(path, room.path / "copy.bin")
            assert not list(room.path.glob("copy*"))
    finally:
        room.close()
    assert caught.value.reason is FileFault.NO_ROOM


def test_a_copy_into_no_directory(path, tmp_path):
    write_state(path, TOKENS)
    with pytest.raises(StateFileError, match="cannot be written") as caught:
        copy(path, tmp_path / "gone" / "copy.bin")
    assert caught.value.reason is FileFault.UNWRITABLE


# --- Files a real server wrote ---------------------------------------------------------------------


def test_the_file_of_a_real_server_and_the_same_in_the_plain_form(start_llama, save_dir):
    server = start_llama(slots=2, ctx=512, save_dir=save_dir)
    prompt = list(range(10, 110))
    answer = complete(server.url, prompt, 0, predict=4)
    said = act(server.url, 0, "save", "real.bin").json()
    file = save_dir / "real.bin"

    tokens = read_tokens(file)
    assert list(tokens) == [*prompt, *answer["tokens"]][: said["n_saved"]]
    assert said["n_saved"] == len(tokens) == 103
    assert file.stat().st_size == said["n_written"]

    data = file.read_bytes()
    plain = state_bytes(tokens, data[len(state_bytes(frame(tokens))) :])
    (save_dir / "plain.bin").write_bytes(plain)
    assert read_tokens(save_dir / "plain.bin") == tokens
    assert act(server.url, 1, "restore", "plain.bin").json()["n_restored"] == len(tokens)
    assert complete(server.url, list(tokens), 1)["timings"]["cache_n"] == len(tokens) - 1


def test_an_empty_slot_of_a_real_server_saves_no_tokens(start_llama, save_dir):
    server = start_llama(slots=1, ctx=512, save_dir=save_dir)
    act(server.url, 0, "save", "empty.bin").raise_for_status()
    assert read_tokens(save_dir / "empty.bin") == array("i")


def test_what_a_real_server_refuses_is_refused(start_llama, save_dir, path):
    server = start_llama(slots=1, ctx=512, save_dir=save_dir)
    complete(server.url, list(range(10, 40)), 0)
    act(server.url, 0, "save", "real.bin").raise_for_status()
    data = (save_dir / "real.bin").read_bytes()
    for wrong in (data[:8], data[:40], b"\0" + data[1:], data[:4] + b"\x09" + data[5:]):
        refused(save_dir / "wrong.bin", wrong)
        assert act(server.url, 0, "restore", "wrong.bin").status_code == 400
