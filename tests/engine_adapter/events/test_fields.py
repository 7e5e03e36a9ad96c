"""How batches are decoded. What their events mean: test_wire.py."""

from __future__ import annotations

import msgspec
import pytest

from engine_adapter.events import fields as module
from engine_adapter.events.fields import (
    ClearedFields,
    MalformedEvents,
    RemovedFields,
    StoredFields,
    decode_fields,
)

STORED = {"type": "BlockStored", "block_hashes": [1, b"x"], "token_ids": [7, 8], "block_size": 1}
REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "later": 5}
CLEARED = {"type": "AllBlocksCleared"}


def batch(*events, timestamp=1.5):
    return msgspec.msgpack.encode([timestamp, list(events), 0])


def test_a_short_batch_is_decoded_in_one_pass():
    stored, removed, cleared = decode_fields(batch(STORED, REMOVED, CLEARED))
    assert stored == StoredFields((1, b"x"), token_ids=[7, 8], block_size=1)
    assert removed == RemovedFields((1,), "CPU")
    assert cleared == ClearedFields()


def test_a_long_batch_is_decoded_event_by_event(monkeypatch):
    """So that others get a turn before it is read to its end."""
    decoded = []
    monkeypatch.setattr(module, "_map", lambda raw: decoded.append(raw) or StoredFields((1,)))
    events = decode_fields(batch(STORED, STORED, timestamp=bytes(20_000)))
    assert next(events) == StoredFields((1,))
    assert len(decoded) == 1


def test_an_event_that_cannot_be_read_is_none():
    assert list(decode_fields(batch(CLEARED, 5, ["AllBlocksCleared"]))) == [
        ClearedFields(),
        None,
        module._ClearedArray(),
    ]


def test_a_size_that_is_left_out_is_zero():
    assert (StoredFields((1,)).size, StoredFields((1,), block_size=4).size) == (0, 4)


@pytest.mark.parametrize("payload", [b"", msgspec.msgpack.encode([1.5]), msgspec.msgpack.encode([1.5, 5])])
def test_a_payload_that_is_no_batch(payload):
    with pytest.raises(MalformedEvents, match="a batch is"):
        list(decode_fields(payload))
