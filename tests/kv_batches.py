"""Reads one batch of KV events alone."""

from typing import NamedTuple

from engine_adapter.events.wire import EventReader


class EventBatch(NamedTuple):
    events: tuple
    skipped: int = 0


def decode_batch(payload, read_keys=None):
    reader = EventReader(read_keys)
    return EventBatch(tuple(reader.read(payload)), reader.skipped)
