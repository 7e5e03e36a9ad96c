"""What a record says after kvpin ended. That pins and owners hold: tests/live/test_warm_restarts.py."""

from __future__ import annotations

import stat

import msgspec
import pytest

from engine_adapter.llama_server.server_files import ServerRecord

URL = "http://127.0.0.1:1"


def record(directory, instance="one", url=URL, kind=list[int]):
    return ServerRecord(directory, url, instance, "numbers", kind)


def test_content_outlives_kvpin(tmp_path):
    assert record(tmp_path).read() is None
    for content in ([1, 2], [], [3]):
        record(tmp_path).write(content)
        assert record(tmp_path).read() == content
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


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


def test_without_a_directory_nothing_is_written(caplog):
    record(None).write([1])
    assert record(None).read() is None
    assert caplog.messages == []
