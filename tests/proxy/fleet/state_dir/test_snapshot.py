import msgspec
import pytest

from engine_adapter import EventPosition
from proxy.core.pins import Pin
from proxy.fleet.recall import EngineMemory
from proxy.fleet.salts import KeptSalts
from proxy.fleet.state_dir.snapshot import SavedState, UnusableSnapshotError, decode, encode, on_other_clock

PIN = Pin("pin-1", {"a": "own"}, 3, 500.0, "prefix", 2**64 - 1, {"a": "i1"}, 7)
ENGINE = EngineMemory(
    "a",
    "m",
    16,
    "i1",
    KeptSalts({"t": ["s"]}, []),
    EventPosition(7, 2**64 - 1, complete=True),
    learned=[b"12345678"],
)
SNAPSHOT = SavedState(False, [on_other_clock(PIN, 1000.0)], [ENGINE])


def test_what_was_written_is_read():
    assert decode(encode(SNAPSHOT), isolated=False) == SNAPSHOT


def test_a_pin_ends_at_the_same_time_on_another_clock():
    assert SNAPSHOT.pins[0].expires == 1500.0
    assert on_other_clock(SNAPSHOT.pins[0], -1400.0).expires == 100.0
    assert on_other_clock(SNAPSHOT.pins[0], -1000.0) == PIN


def damaged(data):
    return bytes([*data[:-1], data[-1] ^ 1])


def of_other_fields(_data):
    return encode(msgspec.Raw(msgspec.msgpack.encode({"isolated": False})))


def of_endless_depth(_data):
    return encode(msgspec.Raw(b"\x81\xa4deep" + b"\x91" * 100_000 + b"\x00"))


def of_no_text(data):
    body = data[data.index(b"\n") + 17 :]
    return encode(msgspec.Raw(body.replace(b"pin-1", b"pin-\xff")))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damaged, "damaged"),
        (lambda data: data[:-1], "damaged"),
        (lambda data: data[:20], "damaged"),
        (lambda _data: b"", "damaged"),
        (lambda data: data.replace(b"state 1", b"state 2"), "another version"),
        (of_other_fields, "another version"),
        (of_endless_depth, "another version"),
        (of_no_text, "another version"),
    ],
)
def test_what_cannot_be_used_says_why(change, why):
    with pytest.raises(UnusableSnapshotError, match=why):
        decode(change(encode(SNAPSHOT)), isolated=False)


def test_salts_of_several_tenants_are_none_of_a_single_one():
    with pytest.raises(UnusableSnapshotError, match="one tenant now and were several"):
        decode(encode(SNAPSHOT), isolated=True)
