"""What a record says after kvpin ended, however it ended."""

from __future__ import annotations

import pytest

from engine_adapter.llama_server.slot_owners import UNKNOWN_OWNER, SlotOwners

URL = "http://127.0.0.1:1"


def owners(directory, instance="one", url=URL):
    return SlotOwners(directory, url, instance, 3)


def known(record):
    return [record[slot] for slot in range(3)]


def test_owners_outlive_kvpin(tmp_path):
    record = owners(tmp_path)
    assert known(record) == [UNKNOWN_OWNER] * 3
    record.holds(0, "a")
    record.holds(1, None)
    assert known(owners(tmp_path)) == known(record) == ["a", None, UNKNOWN_OWNER]


def test_a_slot_that_changes_owners_has_none_meanwhile(tmp_path):
    record = owners(tmp_path)
    record.holds(0, "a")
    record.changes(0, "a")
    assert owners(tmp_path)[0] == "a"
    record.changes(0, "b")
    assert owners(tmp_path)[0] == UNKNOWN_OWNER
    record.holds(0, "b")
    assert owners(tmp_path)[0] == "b"


@pytest.mark.parametrize("other", [{"instance": "two"}, {"instance": None}, {"url": "http://127.0.0.1:2"}])
def test_the_record_of_another_process_or_server_tells_nothing(tmp_path, other):
    owners(tmp_path).holds(0, "a")
    assert known(owners(tmp_path, **other)) == [UNKNOWN_OWNER] * 3


@pytest.mark.parametrize("damage", ["", "{", '{"instance": "one", "owners": ["a"]}', '{"instance": 1}'])
def test_a_damaged_record_tells_nothing(tmp_path, damage):
    owners(tmp_path).holds(0, "a")
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    record = owners(tmp_path)
    assert known(record) == [UNKNOWN_OWNER] * 3
    record.holds(1, "b")
    assert known(owners(tmp_path)) == [UNKNOWN_OWNER, "b", UNKNOWN_OWNER]


def test_a_record_that_cannot_be_written_is_removed_and_said_once(tmp_path, caplog):
    record = owners(tmp_path)
    record.holds(0, "a")
    (path,) = tmp_path.iterdir()
    path.with_suffix(".part").mkdir()
    record.holds(0, "b")
    record.holds(0, "c")
    assert not path.exists()
    assert len(caplog.messages) == 1
    assert record[0] == "c"


def test_without_a_directory_nothing_is_written(tmp_path):
    record = owners(None)
    record.holds(0, "a")
    assert record[0] == "a"
    assert list(tmp_path.iterdir()) == []
