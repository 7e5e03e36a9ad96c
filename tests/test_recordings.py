"""Events of a real vLLM, through the whole path: msgpack → decode → view → index, and over sockets.

What the index must hold is worked out a second time here, from the recorded JSON, by other code.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from engine_adapter.events.fields import read_vllm_keys
from engine_adapter.events.wire import EventReader
from engine_adapter.prompt.extra_ids import mark_media
from engine_adapter.types import MediaSpan, Tier, token_array
from proxy.core.index.blocks import chain, namespace_root
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView, slices

DATA = Path(__file__).parent / "data" / "vllm_events"
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in DATA.glob("*.gz"))
MODEL, POOL = "m", 16
# Order of vLLM's array form.
STORED = [
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind"),
]
REMOVED = ["block_hashes", "medium", "group_idx"]


def recorded(name):
    """The payloads of a recording, in order, bytes as bytes."""

    def restore(fields):
        return bytes.fromhex(fields["__bytes__"]) if fields.keys() == {"__bytes__"} else fields

    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        batches = [json.loads(line, object_hook=restore) for line in lines]
    assert all(later["seq"] == before["seq"] + 1 for before, later in pairwise(batches))
    return [batch["payload"] for batch in batches]


def as_array(event):
    fields = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": []}[event["type"]]
    return [event["type"], *(event.get(field) for field in fields)]


# --- what the index must hold, once more -----------------------------------------------------------


def framed(*parts):
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def blake2b_64(data):
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Reference:
    """Entries by the names of the blocks they end in."""

    def __init__(self):
        self.entries = {}

    def apply(self, event):
        if event["type"] == "AllBlocksCleared":
            self.entries.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.entries[name]
        else:
            self._store(event)

    def _store(self, event):
        lora, keys = event["lora_name"], [list(keys or ()) for keys in event["extra_keys"]]
        for each in keys:
            assert not lora or each.pop(0) == lora
        if event["parent_block_hash"] is None:
            salts = [key for key in keys[0] if isinstance(key, str)]
            frame = framed(b"model", MODEL.encode())
            frame += framed(b"lora", lora.encode()) if lora else b""
            frame += framed(b"salt", salts[0].encode()) if salts else b""
            parent = blake2b_64(frame)
        else:
            parent = self.entries[event["parent_block_hash"]][-1]
        tokens, size = event["token_ids"], event["block_size"]
        extra = [0] * len(tokens)
        for block, each in enumerate(keys):
            for key in each:
                if isinstance(key, list) and key[1] >= 0:
                    extra[block * size + key[1]] = blake2b_64(framed(b"media", key[0].encode()))
                elif isinstance(key, bytes):
                    extra[block * size] = blake2b_64(framed(b"prompt_embeds_rows", key))
        for block, name in enumerate(event["block_hashes"]):
            self.entries[name] = []
            for at in range(block * size, (block + 1) * size, POOL):
                data = struct.pack("<16i", *tokens[at : at + POOL])
                if any(extra[at : at + POOL]):
                    data += struct.pack("<16Q", *extra[at : at + POOL])
                parent = xxh3_64_intdigest(data, parent)
                self.entries[name].append(parent)

    def check(self, index):
        entries = {entry for entries in self.entries.values() for entry in entries}
        assert all(index.holds("e", entry) for entry in entries)
        assert len(index) == index.held("e", Tier.GPU) == len(entries)


# --- through the path ------------------------------------------------------------------------------


def a_view():
    index = PrefixIndex()
    index.add_engine("e")
    view = EngineView("e", index, lambda salt, lora: namespace_root(MODEL, lora=lora, salt=salt), POOL)
    return view, index


def replay(payloads, *, form=lambda event: event):
    """A view and its index that were told all of it; checked after each batch."""
    (view, index), reference, reader = a_view(), Reference(), EventReader(read_vllm_keys)
    for timestamp, events, rank in payloads:
        packed = msgspec.msgpack.encode([timestamp, [form(event) for event in events], rank])
        for event in reader.read(packed):
            for part in slices(event):
                view.apply(part)
        for event in events:
            reference.apply(event)
        reference.check(index)
    assert (view.counts.orphaned, reader.skipped) == (0, 0)
    return view, index


def match(index, token_ids, *, extra_ids=None, salt=None, lora=None):
    """Tokens of a prompt that the engine holds."""
    root = namespace_root(MODEL, lora=lora, salt=salt)
    found = index.match(chain(root, token_array(token_ids), extra_ids, POOL).hashes)
    return found["e"].gpu * POOL if "e" in found else 0


@pytest.mark.parametrize("form", [lambda event: event, as_array], ids=["maps", "arrays"])
@pytest.mark.parametrize("name", NAMES)
def test_the_index_holds_what_the_recording_says(name, form):
    _, index = replay(recorded(name), form=form)
    assert len(index) > 0


def test_adapter_and_salt_are_worlds_of_their_own():
    payloads = recorded("b")[:5]  # before the reset
    tokens = payloads[1][1][0]["token_ids"]
    _, index = replay(payloads)
    assert match(index, tokens, lora="ada") == 96
    assert match(index, tokens, lora="ada", salt="tenant-Ü") == 96
    assert match(index, tokens, salt="ada") == match(index, tokens, salt="tenant-Ü") == 0
    assert match(index, tokens, lora="tenant-Ü") == 0


def test_prompt_embeddings_are_no_text():
    payloads = recorded("b")[:5]
    embeds = payloads[3][1][0]
    _, index = replay(payloads)
    assert set(embeds["token_ids"]) == {0}
    assert match(index, embeds["token_ids"]) == 0


def test_a_request_with_the_same_image_is_predicted_whole_and_one_with_another_up_to_it():
    payloads = recorded("mm")
    stored = payloads[0][1][0]
    [[identity, offset]] = stored["extra_keys"][1]
    _, index = replay(payloads)
    tokens, at = stored["token_ids"], 32 + offset

    def with_image(name):
        return match(index, tokens, extra_ids=mark_media(len(tokens), [MediaSpan(name, at, 16)]))

    assert with_image(identity) == 128
    assert with_image("another") == at // POOL * POOL == match(index, tokens)
