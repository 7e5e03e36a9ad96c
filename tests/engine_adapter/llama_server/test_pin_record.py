"""What a record says after kvpin ended. That the pins hold: tests/live/test_warm_restarts.py."""

from __future__ import annotations

import logging
import stat
from array import array

import pytest

from engine_adapter.llama_server.pin_record import PinRecord, RecordedPin

URL = "http://127.0.0.1:1"
PINS = [RecordedPin("pin-1", array("i", [1, 2]).tobytes(), "digest", 1e9)]


def record(directory, instance="one", url=URL):
    return PinRecord(directory, url, instance)


def test_pins_outlive_kvpin(tmp_path):
    assert record(tmp_path).read() == []
    for pins in (PINS, [], PINS):
        record(tmp_path).write(pins)
        assert record(tmp_path).read() == pins
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert PINS[0].token_ids == array("i", [1, 2])


@pytest.mark.parametrize("other", [{"instance": "two"}, {"instance": None}, {"url": "http://127.0.0.1:2"}])
def test_the_record_of_another_process_or_server_counts_for_nothing(tmp_path, other):
    record(tmp_path).write(PINS)
    assert record(tmp_path, **other).read() == []


def test_a_damaged_record_counts_for_nothing(tmp_path):
    record(tmp_path).write(PINS)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"?")
    assert record(tmp_path).read() == []


def test_without_a_directory_nothing_is_kept_and_one_that_cannot_be_written_is_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "kvpin.llama_server")
    record(None).write(PINS)
    assert caplog.text == ""
    record(tmp_path / "none").write(PINS)
    assert "pins will not outlive kvpin" in caplog.text
