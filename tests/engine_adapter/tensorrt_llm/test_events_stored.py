from array import array

import pytest
from msgspec import UNSET

from engine_adapter.events.fields import MalformedEvents
from engine_adapter.prompt.media import media_extra_id
from engine_adapter.tensorrt_llm.events import name_of, runs_of, tier_of
from engine_adapter.tensorrt_llm.wire import Block, MmKey, Stored, Token
from engine_adapter.types import Tier

SIZE = 2


def block(name, *tokens, extra=(0, 0), **fields) -> Block:
    pairs = [Token(token, beside) for token, beside in zip(tokens, extra, strict=True)]
    return Block(block_hash=name, tokens=pairs, **fields)


def runs(*blocks, parent=None):
    return list(runs_of(Stored(blocks=list(blocks), parent_hash=parent), blocks, SIZE))


def test_one_run_of_text():
    (run,) = runs(block(1, 10, 11), block("b", 12, 13), parent="a")
    assert (run.tier, run.parent, run.hashes, run.tokens_per_block) == (Tier.GPU, b"a", (1, b"b"), SIZE)
    assert (run.token_ids, run.extra_ids) == (array("i", [10, 11, 12, 13]), None)
    assert (run.salt, run.lora) == (None, None)


def test_runs_end_where_the_tier_changes():
    first, second, third = runs(
        block(1, 1, 2), block(2, 3, 4, cache_level=1), block(3, 5, 6, cache_level=1), block(4, 7, 8)
    )
    assert [(r.tier, r.parent, r.hashes) for r in (first, second, third)] == [
        (Tier.GPU, None, (1,)),
        (Tier.HOST, 1, (2, 3)),
        (Tier.GPU, 3, (4,)),
    ]


@pytest.mark.parametrize("level", [-1, 3])
def test_a_level_that_is_not_known(level):
    assert tier_of(level) is None
    with pytest.raises(MalformedEvents, match=f"cache level {level}"):
        runs(block(1, 1, 2, cache_level=level))


def test_salt_and_adapter_stand_at_the_root_of_a_chain():
    (root,) = runs(block(1, 1, 2, cache_salt="s", lora_id=7))
    assert (root.salt, root.lora) == ("s", "lora_id 7")
    (child,) = runs(block(2, 3, 4, cache_salt="s", lora_id=7), parent=1)
    assert (child.salt, child.lora) == (None, None)
    (plain,) = runs(block(1, 1, 2, cache_salt=None, lora_id=None))
    assert (plain.salt, plain.lora) == (None, None)
    (untold,) = runs(block(1, 1, 2, cache_salt=UNSET, lora_id=UNSET))
    assert (untold.salt, untold.lora) == (None, None)


@pytest.mark.parametrize("other", [{"cache_salt": "t"}, {"lora_id": 1}])
def test_a_run_of_two_namespaces_is_none(other):
    with pytest.raises(MalformedEvents, match="several"):
        runs(block(1, 1, 2), block(2, 3, 4, **other))


def test_extra_ids_are_taken_as_they_are():
    (run,) = runs(block(1, 1, 2, extra=(0, 2**64 - 1)), block(2, 3, 4))
    assert run.extra_ids == array("Q", [0, 2**64 - 1, 0, 0])


@pytest.mark.parametrize("token", [Token(2**31), Token(-(2**31) - 1), Token(1, -1), Token(1, 2**64)])
def test_ids_out_of_bounds(token):
    wrong = Block(block_hash=1, tokens=[token, Token(1)])
    with pytest.raises(MalformedEvents, match="beyond"):
        list(runs_of(Stored(blocks=[wrong]), [wrong], SIZE))


def test_an_image_is_marked_once_on_the_block_it_begins_in():
    (run,) = runs(
        block(1, 1, 2), block(2, 3, 4, mm_keys=[MmKey("ab", 0)]), block(3, 5, 6, mm_keys=[MmKey("ab", 1)])
    )
    assert run.extra_ids == array("Q", [0, 0, media_extra_id("ab"), 0, 0, 0])
    (rest,) = runs(block(3, 5, 6, mm_keys=[MmKey("ab", 1)]), parent=2)
    assert rest.extra_ids is None


def test_images_that_begin_in_one_block_stand_beside_extra_ids():
    keys = [MmKey("ab", 0), MmKey("cd", 0)]
    both = (media_extra_id("ab") + media_extra_id("cd")) % 2**64
    (run,) = runs(block(1, 1, 2, mm_keys=keys))
    assert run.extra_ids == array("Q", [both, 0])
    (run,) = runs(block(1, 1, 2, extra=(5, 6), mm_keys=keys), block(2, 3, 4, extra=(7, 0)))
    assert run.extra_ids == array("Q", [(both + 5) % 2**64, 6, 7, 0])


def test_no_blocks_are_no_run():
    assert runs() == []
    assert (name_of(5), name_of("é")) == (5, "é".encode())
