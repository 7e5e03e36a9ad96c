"""How batches are decoded. What their events mean: test_wire.py."""

from __future__ import annotations

import msgspec

from engine_adapter.events import fields as module
from engine_adapter.events.fields import (
    StoredFields,
    decode_fields,
)

STORED = {"type": "BlockStored", "block_hashes": [1, b"x"], "token_ids": [7, 8], "block_size": 1}
REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "later": 5}
CLEARED = {"type": "AllBlocksCleared"}


def batch(*events, timestamp=1.5):
    return msgspec.msgpack.encode([timestamp, list(events), 0])


def test_a_long_batch_is_decoded_event_by_event(monkeypatch):
    """So that others get a turn before it is read to its end."""
    decoded = []
    monkeypatch.setattr(module, "_map", lambda raw: decoded.append(raw) or StoredFields((1,)))
    events = decode_fields(batch(STORED, STORED, timestamp=bytes(20_000)))
    assert next(events) == StoredFields((1,))
    assert len(decoded) == 1
