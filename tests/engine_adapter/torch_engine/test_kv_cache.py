from __future__ import annotations

import pytest
import xxhash

from engine_adapter.torch_engine.kv_tree import CopyFailed, LeafQueue, Node
from engine_adapter.types import KvTarget, Tier
from tests.engine_adapter.torch_engine.kv_world import World


def tokens(length, start=0):
    return list(range(start, start + length))


@pytest.mark.parametrize(("length", "reused"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)])
def test_the_last_prompt_token_is_always_computed(length, reused):
    world = World(16)
    assert world.run(tokens(16)) == 0
    assert world.run(tokens(length)) == reused


def test_content_decides_not_the_hash():
    world = World(16)
    world.run(tokens(9))
    assert world.run([*tokens(4), 99, 5, 6, 7, 8]) == 4
    assert world.run(tokens(9), salt="s") == 0
    assert world.run(tokens(9), extra_ids=[0] * 9) == 8
    assert world.run(tokens(9), extra_ids=[0, 0, 0, 0, 1, 0, 0, 0, 0]) == 4
    assert world.run(tokens(9), extra_ids=[0, 0, 0, 0, 2, 0, 0, 0, 0]) == 4


def test_a_forced_collision_of_names_mixes_nothing_up(monkeypatch):
    real = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: 5 if len(data) > 8 else real(data))
    world = World(8)
    world.run(tokens(8))
    world.run(tokens(8, 100))
    assert world.blocks(Tier.GPU) == 4
    assert world.run(tokens(9)) == 8


def test_a_queue_sweeps_stale_entries():
    queue, node = LeafQueue(Tier.GPU), Node(b"", 1, None, 0)
    for tick in range(1000):
        node.last_used = tick
        queue.push(node)
    assert len(queue._heap) <= 80
    assert queue.pop() is node


def test_extend_takes_over_what_another_computed():
    world = World(8)
    pair = [world.sequence(tokens(13)) for _ in range(2)]
    for sequence in pair:
        assert world.begin(sequence)
    world.compute(pair[1], 2)
    world.compute(pair[0], 13)
    world.cache.extend(pair[1])
    assert pair[1].computed == 2  # not at a block boundary
    world.compute(pair[1], 2)
    world.cache.extend(pair[1])
    assert pair[1].computed == 12
    world.compute(pair[1], 1)
    world.check()


def test_no_room_changes_nothing():
    world = World(4)
    holder = world.sequence(tokens(12))
    assert world.begin(holder)
    world.compute(holder, 12)
    assert not world.begin(world.sequence(tokens(20)))
    assert not world.begin(world.sequence(tokens(4, 50)), spare=1)
    assert not world.cache.reserve(holder, 17)
    world.check()
    assert world.begin(world.sequence(tokens(4, 50)))
    world.check()


def test_eviction_takes_leaves_first_then_the_least_recently_used():
    world = World(6)
    world.run(tokens(8))
    world.run(tokens(8, 100))
    assert world.run(tokens(9)) == 8  # touches the first
    world.run(tokens(12, 200)[:11])  # 2 free, so it evicts 1: the leaf of the second
    assert [world.held(tokens(8, start)) for start in (0, 100, 200)] == [2, 1, 2]


def test_a_higher_priority_is_evicted_later():
    world = World(4)
    world.run(tokens(8), priority=1)
    world.run(tokens(8, 100))
    world.run(tokens(8, 200))
    assert world.run(tokens(9)) == 8


def test_reuse_raises_the_priority_of_a_prefix():
    world = World(5)
    world.run(tokens(8))
    world.run(tokens(9), priority=1)
    world.run(tokens(8, 100))
    world.run(tokens(8, 200))
    assert world.held(tokens(8)) == 2


def test_eviction_moves_down_and_a_prompt_brings_it_back():
    world = World(4, 4)
    world.run(tokens(12))
    world.run(tokens(12, 100))
    assert world.blocks(Tier.HOST) == 2
    assert world.run(tokens(13)) == 12
    assert world.cache.stats(0.0)["blocks"]["restored"] == 2


def test_a_full_host_tier_keeps_what_is_worth_more():
    world = World(4, 2)
    world.run(tokens(16))
    world.run(tokens(16, 100))  # 4 evicted into 2 host blocks: the two nearest the root stay
    assert world.blocks(Tier.HOST) == 2
    assert world.run(tokens(9)) == 8


def fail_once(world, verb):
    copy = getattr(world.memory, verb)

    def fail(*slots):
        setattr(world.memory, verb, copy)
        raise MemoryError

    setattr(world.memory, verb, fail)


def test_blocks_whose_copy_down_failed_are_forgotten():
    world = World(6, 6)
    world.run(range(8))
    world.run(range(100, 108))
    world.cache.offload(KvTarget(), 1)  # one host block
    fail_once(world, "copy_to_host")
    sequence = world.sequence(range(200, 220))
    with pytest.raises(CopyFailed):
        world.cache.begin(sequence)
    world.end(sequence)
    world.check()
    assert world.run(range(200, 220)) == 0
    fail_once(world, "copy_to_host")
    with pytest.raises(CopyFailed):
        world.cache.offload(KvTarget(), 10)
    world.check()


def test_a_failed_copy_while_extending_leaves_what_was_gained():
    world = World(12, 6)
    late = world.sequence([*range(9), 50])
    assert world.begin(late)
    world.run(range(9))
    world.cache.offload(KvTarget(), 10)
    fail_once(world, "copy_to_gpu")
    with pytest.raises(CopyFailed):
        world.cache.extend(late)
    world.check()
    world.cache.extend(late)
    assert late.computed == 8
    world.end(late)
    world.check()
