"""What stands beside a block's tokens. Each way in which it is easily misread has a test of its own name."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.events.fields import (
    BlockKeys,
    MalformedEvents,
    StoredFields,
    narrow_tokens,
    read_sglang_keys,
    read_vllm_keys,
)
from engine_adapter.prompt.extra_ids import extra_id, media_extra_id
from engine_adapter.types import BlocksStored, Tier, extra_array, token_array
from tests.kv_batches import decode_batch

SIZE = 4
DIGEST = bytes(range(32))


def run(*per_block, **changes):
    """Fields of blocks of 4 tokens, with these keys."""
    return msgspec.convert(event(*per_block, **changes), StoredFields)


def event(*per_block, parent=None, **fields):
    """The same on the wire."""
    n = max(len(per_block), 1)
    return {
        "type": "BlockStored",
        "block_hashes": list(range(1, n + 1)),
        "parent_block_hash": parent,
        "token_ids": list(range(SIZE * n)),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": list(per_block) or None,
        **fields,
    }


def ids(n_tokens, **marks):
    """Extra ids of so many tokens: `t5=…` is that of token 5."""
    values = [0] * n_tokens
    for at, value in marks.items():
        values[int(at[1:])] = value
    return extra_array(values)


def embeds(digest=DIGEST):
    return extra_id("prompt_embeds_rows", digest)


CAT, DOG = ["cat", 1], ["dog", 0]
DOG_AND_ROWS = (media_extra_id("dog") + embeds()) % 2**64


class TestVllm:
    @pytest.mark.parametrize(
        ("fields", "keys"),
        [
            (run(None, None), BlockKeys()),
            (run(["tenant-Ü"], None), BlockKeys(salt="tenant-Ü")),
            # The name of an adapter is no hash of an image.
            (run(["ada"], ["ada"], lora_name="ada", lora_id=1), BlockKeys(lora="ada")),
            # An image marks the token it begins at, and none of a run that it began before.
            (run(None, [["cat", 2]], [["cat", -2]], None), BlockKeys(ids(16, t6=media_extra_id("cat")))),
            (run([["cat", -3]], None, parent=7), BlockKeys()),
            (
                run([["cat", -9], ["dog", 3]], [["dog", -1]], parent=7),
                BlockKeys(ids(8, t3=media_extra_id("dog"))),
            ),
            # Prompt embeddings mark the first token of each block.
            (run([DIGEST], [b"other"]), BlockKeys(ids(8, t0=embeds(), t4=embeds(b"other")))),
            # All of them.
            (
                run(["ada", CAT, "salt", DIGEST], ["ada", ["cat", -3], DOG, DIGEST], lora_name="ada"),
                BlockKeys(ids(8, t0=embeds(), t1=media_extra_id("cat"), t4=DOG_AND_ROWS), "salt", "ada"),
            ),
        ],
    )
    def test_what_they_say(self, fields, keys):
        assert read_vllm_keys(fields) == keys

    @pytest.mark.parametrize(
        "fields",
        [
            # A salt stands in the first block of a prompt, once.
            run(None, ["salt"]),
            run(["salt"], parent=7),
            run(["salt"], ["salt"]),
            run([""]),
            # An adapter that is not where it should be.
            run(["eve"], lora_name="ada"),
            run(["salt", "ada"], lora_name="ada"),
            run([["cat", 0], "ada"], parent=7, lora_name="ada"),
            run(None, lora_id=1),
            run(None, lora_name=5),
            # Out of order.
            run(["salt", ["cat", 1]]),
            run([DIGEST, "salt"]),
            run([DIGEST, ["cat", 1]]),
            run([DIGEST, DIGEST]),
            # Not one entry a block.
            run(extra_keys="salt"),
            run(extra_keys=[None, None]),
            run(extra_keys=[["a"], None]),
            *(run([["cat", *odd]]) for odd in ([4], [], [1, 2], ["1"], [1.0])),
            *(run([odd]) for odd in ([5, 1], 5, {"a": 1})),
        ],
    )
    def test_what_is_not_understood(self, fields):
        with pytest.raises(MalformedEvents):
            read_vllm_keys(fields)

    def test_bare_image_hashes_of_older_versions_are_at_most_an_unknown_salt(self):
        assert read_vllm_keys(run(["8d67"], None)) == BlockKeys(salt="8d67")
        for fields in (run(["8d67"], ["8d67"]), run(["8d67", "salt"]), run(["8d67"], parent=7)):
            with pytest.raises(MalformedEvents):
                read_vllm_keys(fields)

    @pytest.mark.parametrize(("medium", "tier"), [("CPU", Tier.HOST), ("STORAGE", Tier.DISK)])
    def test_offloaded_blocks_without_keys_are_names_and_no_text(self, medium, tier):
        assert read_vllm_keys(run(medium=medium)) == BlockKeys(complete=False)
        batch = decode_batch(msgspec.msgpack.encode([0, [event(medium=medium)], 0]), read_vllm_keys)
        assert batch.events == (BlocksStored(tier, None, (1,), token_array([]), SIZE),)

    def test_no_two_kinds_of_key_are_ever_the_same(self):
        """One name as adapter, salt, image and embeddings, in every combination."""
        seen = set()
        for n in range(5):
            for kinds in combinations(("adapter", "image", "salt", "embeds"), n):
                keys = {"adapter": "x", "image": ["x", 0], "salt": "x", "embeds": b"x"}
                fields = run([keys[kind] for kind in kinds], lora_name="x" if "adapter" in kinds else None)
                found = read_vllm_keys(fields)
                seen.add((found.lora, found.salt, tuple(found.extra_ids or ())))
        assert len(seen) == 16

    @given(st.lists(st.lists(st.text() | st.binary() | st.tuples(st.text(), st.integers(-9, 3)), max_size=4)))
    def test_any_keys_are_read_or_refused(self, per_block):
        keys = [[list(key) if isinstance(key, tuple) else key for key in block] for block in per_block]
        try:
            found = read_vllm_keys(run(*keys))
        except MalformedEvents:
            return
        assert found.extra_ids is None or len(found.extra_ids) == SIZE * max(len(keys), 1)


class TestSglang:
    def sglang(self, **changes):
        return run(None, None, **{"extra_keys": None, **changes})

    def test_salt_and_adapter_are_fields_on_every_run(self):
        keys = read_sglang_keys(self.sglang(cache_salt="s", lora_name="ada", parent_block_hash=7))
        assert keys == BlockKeys(salt="s", lora="ada", token_ids=token_array(range(8)))

    def test_the_array_form_with_metadata_where_vllm_has_the_adapter(self):
        array = ["BlockStored", [1, 2], None, list(range(8)), 4, None, "GPU", {"cache_salt": "s"}]
        (read,) = decode_batch(msgspec.msgpack.encode([0, [array]]), read_sglang_keys).events
        assert read == BlocksStored(Tier.GPU, None, (1, 2), token_array(range(8)), 4, None, "s", None)

    def test_images_are_tokens_too_large_for_a_vocabulary(self):
        pad = 1_000_000 + 2**61
        keys = read_sglang_keys(self.sglang(token_ids=[1, pad, pad, 4, 5, -(2**40), 7, 8]))
        marker, other = (
            extra_id("media", value.to_bytes(8, "little", signed=True)) for value in (pad, -(2**40))
        )
        assert keys.token_ids == token_array([1, 0, 0, 4, 5, 0, 7, 8])
        assert keys.extra_ids == ids(8, t1=marker, t2=marker, t5=other)

    @pytest.mark.parametrize(
        "fields",
        [
            {"token_ids": [1, 2**63]},
            {"extra_keys": [["salt"]]},
            {"lora_id": 1},
            {"cache_salt": 5},
            {"lora_name": 5},
            {"metadata": {"cache_salt": 5}},
        ],
    )
    def test_what_it_cannot_read(self, fields):
        with pytest.raises(MalformedEvents):
            read_sglang_keys(self.sglang(**fields))

    @pytest.mark.parametrize("token_ids", [[[1, 2], [2, 3]], [1, "2"], [2**40, None]])
    def test_pairs_of_tokens_as_eagle_has_them_and_other_things_are_unreadable(self, token_ids):
        odd = event(None, None, extra_keys=None, token_ids=token_ids)
        batch = decode_batch(msgspec.msgpack.encode([0, [odd]]), read_sglang_keys)
        assert (batch.events, batch.skipped) == ((), 1)

    @given(st.lists(st.integers(-(2**63), 2**63 - 1)))
    def test_narrow_tokens_tell_all_values_apart(self, raw):
        token_ids, extra_ids = narrow_tokens(raw)
        pairs = list(zip(token_ids, extra_ids or [0] * len(raw), strict=True))
        assert len(set(pairs)) == len(set(raw))
