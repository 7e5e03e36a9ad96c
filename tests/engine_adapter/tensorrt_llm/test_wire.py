import json

import msgspec
import pytest
from msgspec import UNSET

from engine_adapter.events.fields import MalformedEvents
from engine_adapter.tensorrt_llm.wire import (
    Block,
    Created,
    Frame,
    LevelDiff,
    MmKey,
    Removed,
    Stored,
    Token,
    Updated,
    decode_answer,
    decode_data,
    decode_frame,
    kind_of,
)


def raw(value) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


BLOCK = {
    "type": "stored_block",
    "block_hash": 2**64 - 1,
    "tokens": [{"type": "unique_token", "token_id": 7, "token_extra_id": 2**63}],
    "cache_level": 1,
    "priority": 35,
    "cache_salt": "s",
    "lora_id": None,
    "mm_keys": [{"type": "mm_key", "hash": "ab", "start_offset": 3}],
}
STORED = {"type": "stored", "parent_hash": None, "blocks": [BLOCK]}
REMOVED = {"type": "removed", "block_hashes": [1, "x"]}
UPDATED = {
    "type": "updated",
    "block_hash": 5,
    "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0},
    "priority": {"type": "event_diff", "new_value": 20.5, "old_value": 35},
}


def test_every_field_is_read():
    assert decode_data(raw(STORED)) == Stored(
        blocks=[
            Block(
                block_hash=2**64 - 1,
                tokens=[Token(7, 2**63)],
                cache_level=1,
                cache_salt="s",
                lora_id=None,
                mm_keys=[MmKey("ab", 3)],
            )
        ]
    )
    assert decode_data(raw(REMOVED)) == Removed(block_hashes=[1, "x"])
    assert decode_data(raw(UPDATED)) == Updated(block_hash=5, cache_level=LevelDiff(1, 0))
    created = {"type": "created", "num_blocks_per_cache_level": [10, 0]}
    assert decode_data(raw(created)) == Created(num_blocks_per_cache_level=[10, 0])


def test_what_a_version_does_not_tell():
    block = decode_data(raw(STORED | {"blocks": [{"block_hash": 1, "tokens": [{"token_id": 7}]}]})).blocks[0]
    assert (block.cache_level, block.cache_salt, block.lora_id, block.mm_keys) == (0, UNSET, UNSET, None)
    assert block.tokens == [Token(7, 0)]
    assert decode_data(raw(UPDATED | {"cache_level": None, "priority": None})) == Updated(block_hash=5)


def test_what_it_tells_beyond_is_passed_over():
    assert decode_data(raw(REMOVED | {"new": 1})) == Removed(block_hashes=[1, "x"])
    frame = raw(
        {"event_id": 3, "data": REMOVED, "window_size": 8, "hash_algo": "sha256", "layer_group_id": 2}
    )
    read = decode_frame(frame)
    assert (read.event_id, read.window_size, read.attention_dp_rank, read.layer_group_id) == (3, 8, None, 2)
    assert isinstance(read, Frame)


def without(fields, name):
    return {key: value for key, value in fields.items() if key != name}


@pytest.mark.parametrize(
    "data",
    [
        {"type": "unheard_of"},
        {},
        [],
        None,
        "stored",
        without(STORED, "blocks"),
        STORED | {"parent_hash": 1.5},
        STORED | {"blocks": None},
        STORED | {"blocks": [[]]},
        *(
            STORED | {"blocks": [BLOCK | {name: value}]}
            for name, value in [
                ("block_hash", None),
                ("block_hash", True),
                ("tokens", [7]),
                ("tokens", [{"token_id": "7"}]),
                ("tokens", [{"token_id": 7, "token_extra_id": None}]),
                ("tokens", 7),
                ("cache_level", "0"),
                ("cache_level", None),
                ("cache_salt", 7),
                ("lora_id", "one"),
                ("mm_keys", [{"hash": 1, "start_offset": 0}]),
                ("mm_keys", [{"hash": "a"}]),
                ("mm_keys", "ab"),
            ]
        ),
        without(REMOVED, "block_hashes"),
        REMOVED | {"block_hashes": [None]},
        REMOVED | {"block_hashes": 1},
        without(UPDATED, "block_hash"),
        UPDATED | {"block_hash": []},
        UPDATED | {"cache_level": 1},
        UPDATED | {"cache_level": {"new_value": 1}},
        UPDATED | {"cache_level": {"new_value": "1", "old_value": 0}},
        UPDATED | {"layer_group_id": "0"},
        {"type": "created", "num_blocks_per_cache_level": [None]},
    ],
)
def test_data_of_a_wrong_type(data):
    with pytest.raises(MalformedEvents):
        decode_data(raw(data))


@pytest.mark.parametrize(
    "frame",
    [
        [],
        {"data": REMOVED},
        {"event_id": 1},
        {"event_id": "1", "data": REMOVED},
        {"event_id": 1, "data": REMOVED, "window_size": "all"},
        {"event_id": 1, "data": REMOVED, "attention_dp_rank": "0"},
    ],
)
def test_frames_of_a_wrong_type(frame):
    with pytest.raises(MalformedEvents):
        decode_frame(raw(frame))


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"error": "no"}', b"\xff", b"[" * 100_000])
def test_answers_that_are_no_list(content):
    with pytest.raises(MalformedEvents):
        decode_answer(content)


def test_the_type_of_what_cannot_be_read():
    assert kind_of(raw({"type": "removed", "block_hashes": 1})) == "removed"
    assert [kind_of(raw(data)) for data in ({}, [], {"type": 1})] == [None, None, None]
