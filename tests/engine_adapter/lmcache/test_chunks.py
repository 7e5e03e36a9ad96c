from array import array

import pytest

from engine_adapter.lmcache.chunks import Chunk, below_gpu, chunks_of, leading, text_of
from engine_adapter.lmcache.client import Key, KeyPlacements, Placement
from engine_adapter.types import BelowGpu, KvTarget


def chunk(tiers: str) -> Chunk:
    return Chunk((), "h" in tiers, "d" in tiers, 100)


def objects(name: str, *tiers: str, instance="a", shared=False, salt="") -> KeyPlacements:
    places = [Placement(instance, tier, 100, shared) for tier in tiers]
    return KeyPlacements(Key(name, "m", 0, cache_salt=salt), places)


@pytest.mark.parametrize(
    ("tiers", "n_tokens", "expected"),
    [
        ([], 100, BelowGpu(0, 0, 0)),
        (["hd", "hd", ""], 200, BelowGpu(128, 0, 128)),
        (["h", "d", "hd"], 200, BelowGpu(64, 128, 192)),
        (["", "hd"], 200, BelowGpu(0, 0, 0)),
        (["d", "d"], 128, BelowGpu(0, 128, 127)),  # of a prompt held whole, the last token is computed again
        (["hd", "d"], 129, BelowGpu(64, 64, 128)),
    ],
)
def test_what_an_engine_takes_of_a_prompt(tiers, n_tokens, expected):
    assert below_gpu([chunk(each) for each in tiers], n_tokens, 64) == expected


def test_a_chunk_lies_where_the_objects_of_all_ranks_do():
    found = chunks_of([objects("x", "l1", "l2"), objects("x", "l2"), objects("y", "l1")], "a")
    assert [(each.on_host, each.on_disk, len(each.keys)) for each in found] == [
        (False, True, 2),
        (True, False, 1),
    ]
    assert [each.bytes for each in found] == [200, 100]


def test_objects_of_another_salt_are_another_chunk():
    assert len(chunks_of([objects("x", "l1"), objects("x", "l1", salt="s")], "a")) == 2


@pytest.mark.parametrize(
    ("instance", "shared", "held"), [("a", False, True), ("b", False, False), ("b", True, True)]
)
def test_what_other_nodes_hold_counts_where_it_is_shared(instance, shared, held):
    (found,) = chunks_of([objects("x", "l2", instance=instance, shared=shared)], "a")
    assert found.held is held


def test_leading_chunks_end_at_the_first_gap():
    assert len(leading([chunk("h"), chunk("d"), chunk(""), chunk("h")])) == 2


def test_only_whole_chunks_before_the_first_image_are_text():
    tokens, marks = array("i", range(200)), array("Q", bytes(8 * 200))
    assert len(text_of(KvTarget(tokens), 64)) == 192
    assert len(text_of(KvTarget(tokens, marks), 64)) == 192
    marks[130] = 1
    assert text_of(KvTarget(tokens, marks), 64) == tokens[:128]
    assert len(text_of(KvTarget(), 64)) == 0
