"""Blocks that requests leave partly filled, on a cache whose memory shows what each token depends on."""

from __future__ import annotations

import pytest

from engine_adapter.errors import EngineError
from engine_adapter.torch_engine.kv_leftovers import find_beginning
from engine_adapter.types import KvTarget
from tests.engine_adapter.torch_engine.kv_world import World

PROMPT = list(range(10, 21))  # two blocks of 4, and 3 tokens


@pytest.mark.parametrize("length", range(1, 13))
def test_an_identical_prompt_computes_one_token(length):
    world = World()
    world.run(list(range(100, 100 + length)))
    expected = length - 1 if length >= 4 else 0  # a root without blocks is forgotten, with its leftovers
    assert world.begun(list(range(100, 100 + length))) == expected


def test_a_longer_block_gives_its_beginning():
    world = World()
    world.run([*PROMPT, 50, 51, 52, 53])
    assert world.begun(PROMPT) == len(PROMPT) - 1
    assert world.begun([*PROMPT[:10], 99, 98]) == 10
    assert world.begun([*PROMPT[:8], 99, 98]) == 8


def test_only_the_last_block_begins_with_a_copy():
    world = World()
    world.run(PROMPT)
    assert world.begun([*PROMPT[:10], 1, 2, 3, 4, 5]) == 8  # `extend` may still share its third block


def test_salts_and_extra_ids_keep_leftovers_apart():
    world = World()
    world.run(PROMPT, salt="one")
    assert world.begun(PROMPT, salt="two") == 0
    extras = [0] * 8 + [5, 0, 0]
    world.run(PROMPT, salt="one", extra_ids=extras)
    assert world.begun(PROMPT, salt="one", extra_ids=extras) == 8
    full = World()
    full.run([*PROMPT, 1], extra_ids=[*extras, 0])
    assert full.begun(PROMPT) == 8


def test_a_slot_with_a_leftover_is_taken_last_and_the_leftover_is_gone():
    world = World(gpu_blocks=8)
    world.run(PROMPT)
    world.run(list(range(200, 216)))  # four blocks: one slot is left, that of the leftover
    assert world.begun(PROMPT) == len(PROMPT) - 1
    world.run(list(range(200, 220)))
    assert world.begun(PROMPT) == 8


def test_equal_leftovers_take_one_slot():
    world = World()
    world.run(PROMPT)
    first, second = (world.sequence(PROMPT) for _ in range(2))
    for sequence in (first, second):
        assert world.begin(sequence)
        world.compute(sequence, 1)
    for sequence in (first, second):
        world.end(sequence)
        world.check()
    (block,) = world.cache.tree.below(world.cache.tree.roots[None].children.values())
    assert len(block.leftovers) == 1


@pytest.mark.parametrize("target", [KvTarget(), KvTarget(cache_salt="other")])
def test_a_flush_forgets_leftovers(target):
    world = World()
    sequence = world.sequence([*PROMPT[:8], 70])
    assert world.begin(sequence)
    world.compute(sequence, 9)
    world.run(PROMPT)
    world.cache.flush(target, 100)
    assert world.begun(PROMPT) == 8
    world.end(sequence)


def test_a_copy_that_fails_loses_no_block():
    world = World()
    world.run(PROMPT)

    def fail(source, target):
        raise RuntimeError("the device is on fire")

    world.memory.copy_on_gpu = fail
    sequence = world.sequence(PROMPT)
    with pytest.raises(EngineError, match="on fire"):
        world.begin(sequence)
    world.end(sequence)
    world.check()


def test_the_longest_beginning_wins():
    world = World()
    world.run([*PROMPT[:9], 80, 81])
    world.run(PROMPT)
    parent = next(iter(world.cache.tree.below(world.cache.tree.roots[None].children.values())))
    wanted = world.sequence(PROMPT[8:]).tokens.tobytes()
    slot, count = find_beginning(parent, wanted, 4)
    assert (parent.leftovers[wanted], 3) == (slot, count)
    assert find_beginning(parent, b"none", 4) is None
