"""Chunks of a chat's stream, and the events of a message's."""

import json

from tests.fakes import ANSWER

USAGE = {"choices": [], "usage": ANSWER["usage"]}


def chunk(delta=None, finish=None, **fields):
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **fields}


def events_of(raw):
    events = [each.split(b"\n") for each in raw.strip().split(b"\n\n")]
    found = [json.loads(data.removeprefix(b"data: ")) for _, data in events]
    assert [name.decode() for name, _ in events] == [f"event: {each['type']}" for each in found]
    return found
