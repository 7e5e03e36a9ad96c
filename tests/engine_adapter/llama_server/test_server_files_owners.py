"""What a record says after kvpin ended, however it ended."""

from __future__ import annotations

from engine_adapter.llama_server.server_files import UNKNOWN_OWNER, SlotOwners

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


def test_a_record_of_another_number_of_slots_tells_nothing(tmp_path):
    owners(tmp_path).holds(0, "a")
    assert SlotOwners(tmp_path, URL, "one", 2)[0] == UNKNOWN_OWNER


def test_without_a_directory_nothing_is_written(tmp_path):
    record = owners(None)
    record.holds(0, "a")
    assert record[0] == "a"
    assert list(tmp_path.iterdir()) == []
