from __future__ import annotations

from array import array

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.torch_engine.kv_tree import CopyFailed, KeptBlocks, LeafQueue, Node
from engine_adapter.torch_engine.requests import PinLimitReached
from engine_adapter.types import KvTarget, Retention, Tier
from tests.engine_adapter.torch_engine.kv_integrity import by_owner
from tests.engine_adapter.torch_engine.kv_world import SIZE, World


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


# --- operations ---------------------------------------------------------------------------------------


A = list(range(8))
B = [*range(4), *range(50, 54)]  # shares its first block with A
ALL = KvTarget()


def prefix(tokens, salt=None):
    return KvTarget(array("i", tokens), None, salt)


def filled(gpu=8, host=8):
    world = World(gpu, host)
    world.run(A)
    world.run(B)
    world.run(A, salt="s")
    return world


def test_flush_all_in_slices():
    world = filled()
    results = [world.cache.flush(ALL, 2) for _ in range(3)]
    told = [(each.moved, each.remaining, each.bytes) for each in results]
    assert told == [(2, 3, 200), (2, 1, 200), (1, 0, 100)]
    world.check()
    assert world.blocks(Tier.GPU) == 0
    assert world.cache.tree.roots == {}


def test_flush_by_salt_and_by_prefix():
    world = filled()
    assert world.cache.flush(KvTarget(cache_salt="s"), 10).moved == 2
    assert world.cache.flush(KvTarget(cache_salt="unknown"), 10).moved == 0
    world.check()
    assert world.cache.flush(prefix(A), 10).moved == 3  # with all blocks below its first one
    world.check()
    assert world.blocks(Tier.GPU) == 0


def test_flush_leaves_what_runs():
    world = filled()
    running = world.sequence(A)
    assert world.begin(running)
    result = world.cache.flush(prefix(A), 10)
    assert (result.moved, result.left["in_use"]) == (1, 1)
    world.compute(running, 4)
    world.check()
    result = world.cache.flush(ALL, 10)
    assert (result.moved, result.left["in_use"]) == (3, 2)
    world.check()


def test_offload_of_a_prefix_moves_that_chain_and_leaves_its_children():
    world = filled()
    result = world.cache.offload(prefix(A), 10)
    assert (result.moved, result.remaining) == (2, 0)
    world.check()
    assert world.blocks(Tier.HOST) == 2
    assert world.run([*B, 1]) == 8  # its shared first block is restored, the second never moved
    assert world.cache.stats(0.0)["blocks"] == {"evicted": 0, "offloaded": 2, "restored": 1}


def test_offload_says_why_blocks_stay():
    world = filled(host=1)
    running = world.sequence([*B, 1])
    assert world.begin(running)
    world.cache.pin(prefix(A, "s"), 10, now=0.0)
    result = world.cache.offload(ALL, 10)
    assert (result.moved, result.left) == (1, {"in_use": 2, "pinned": 2, "no_room": 0})
    world.check()
    world.end(running)
    result = world.cache.offload(ALL, 10)  # no host block has less value
    assert result.remaining == 0
    assert result.left["no_room"] + result.moved == 2
    world.check()


def test_offload_never_pushes_out_what_it_just_moved():
    world = World(12, 3)
    for start in (0, 100, 200):
        world.run(list(range(start, start + 8)))
    result = world.cache.offload(ALL, 10)
    assert (result.moved, result.left["no_room"]) == (3, 3)
    world.check()
    assert world.run([*range(200, 208), 1]) == 8


def test_restore_evicts_only_what_is_worth_less():
    world = World(4, 8)
    world.run(A)
    world.cache.offload(ALL, 10)
    world.run(list(range(100, 116)))
    world.check()
    assert world.cache.restore(ALL, 10).left["no_room"] == 2  # every GPU block was used later
    assert world.cache.restore(prefix(A), 10).moved == 2  # a named prefix counts as used now
    world.check()
    assert world.cache.tree.totals["evicted"] == 2
    assert world.run([*A, 1]) == 8


@pytest.mark.parametrize(("host", "moved"), [(4, 0), (6, 2)])
def test_restore_loses_neither_what_it_restores_nor_what_is_kept(host, moved):
    """A retained block moves to the host tier to make room, if that has room for it."""
    world, other = World(8, host), list(range(100, 116))
    world.run(A, priority=1, ttl_s=60.0)
    world.run(other)
    world.cache.offload(prefix(other), 10)
    running = world.sequence(list(range(200, 224)))
    assert world.begin(running)
    world.compute(running, 24)
    result = world.cache.restore(prefix(other), 10)
    assert (result.moved, result.left["no_room"]) == (moved, 4 - moved)
    world.end(running)
    world.check()
    assert (world.held(other), world.held(A)) == (4, 2)


def test_a_pin_protects_until_it_ends():
    world = World(4)
    world.run(A)
    pinned = world.cache.pin(prefix(A), 5.0, now=100.0)
    assert (pinned.blocks, pinned.ttl_s) == (2, 5.0)
    world.run(list(range(100, 108)))
    assert not world.begin(world.sequence(list(range(12))[::-1]))
    assert world.run([*A, 1]) == 8
    stats = world.cache.stats(101.0)
    assert stats["pins"] == [{"pin_id": pinned.pin_id, "blocks": 2, "expires_in_s": 4.0}]
    assert stats["gpu"] == {"total": 4, "free": 1, "cached": 3, "active": 0}
    world.cache.expire(104.9)
    assert world.cache.pinned_blocks == 2
    assert world.cache.stats(105.0)["pins"] == []
    world.check()
    assert not world.cache.unpin(pinned.pin_id)


def test_overlapping_pins_count_once_and_end_one_by_one():
    world = filled()
    first = world.cache.pin(prefix(A), 10, now=0.0)
    second = world.cache.pin(prefix(B), 10, now=0.0)
    assert world.cache.pinned_blocks == 3
    assert world.cache.unpin(first.pin_id)
    assert world.cache.pinned_blocks == 2
    world.check()
    assert world.cache.flush(prefix(B), 10).moved == 3  # a flush ends the pins on its blocks
    assert not world.cache.unpin(second.pin_id)
    world.check()


def test_pins_may_not_take_the_pool():
    world = World(5)
    world.run(list(range(20)))
    with pytest.raises(PinLimitReached, match="to 5; at most 4 of 5 may be pinned"):
        world.cache.pin(prefix(list(range(20))), 10, now=0.0)
    assert world.cache.pinned_blocks == 0
    assert world.cache.pin(prefix(list(range(16))), 10, now=0.0).blocks == 4
    assert world.cache.pin(prefix([77] * 8), 10, now=0.0).blocks == 0


# --- retained blocks ------------------------------------------------------------------------------------


DAY_S = 86_400.0


def prompt(name, blocks=2):
    """Tokens of a prompt. Prompts of different names share nothing."""
    return [1000 * name + n for n in range(blocks * SIZE)]


def scan(world, prompts=20, blocks=2):
    """Runs prompts that nobody repeats."""
    for number in range(prompts):
        world.run(prompt(900 + number, blocks))


def kept(world):
    return world.cache.stats(0.0)["kept_blocks"]


@pytest.mark.parametrize("host", [0, 16])
def test_a_kept_prompt_outlives_a_scan_that_flushes_its_equal(host):
    world = World(8, host)
    world.run(prompt(1), priority=1, ttl_s=DAY_S)
    world.run(prompt(2))
    scan(world)
    assert [world.held(prompt(name)) for name in (1, 2)] == [2, 0]


def test_with_a_host_tier_the_gpu_goes_by_last_use():
    world = World(8, 16)
    world.run(prompt(1), priority=5)
    world.run(prompt(2))
    scan(world, prompts=3)
    assert world.cache.restore(KvTarget(array("i", prompt(2))), 8).moved == 0  # still on the GPU
    assert world.cache.restore(KvTarget(array("i", prompt(1))), 8).moved == 2


def test_a_ttl_begins_when_the_answer_is_over():
    world = World(8)
    world.cache.expire(100.0)
    sequence = world.sequence(prompt(1), priority=1, ttl_s=60.0)
    assert world.begin(sequence)
    world.compute(sequence, 2 * SIZE)
    world.cache.expire(150.0)
    world.end(sequence)
    world.cache.expire(209.9)
    assert kept(world) == 2
    world.cache.expire(210.0)
    assert kept(world) == 0
    scan(world)
    assert world.held(prompt(1)) == 0


def test_a_shared_beginning_is_kept_as_long_as_any_that_needs_it():
    world = World(16)
    world.cache.expire(0.0)
    stem = prompt(1)
    world.run([*stem, *prompt(2)], priority=1, ttl_s=100.0)
    world.run([*stem, *prompt(3)], priority=3, ttl_s=10.0)
    world.cache.expire(50.0)
    world.check()
    assert kept(world) == 4
    scan(world, blocks=4)
    assert world.held([*stem, *prompt(2)]) == 4
    assert world.held([*stem, *prompt(3)]) == 2


@pytest.mark.parametrize("host", [0, 16])
def test_a_prompt_whose_next_turn_is_expected_outlives_a_scan_until_then(host):
    world = World(8, host)
    for name in (1, 2):
        world.run(prompt(name))
    world.cache.await_turn(KvTarget(array("i", prompt(1))), Retention(1, 10.0), 100.0)
    world.check()
    scan(world)
    assert [world.held(prompt(name)) for name in (1, 2)] == [2, 0]
    world.cache.expire(110.0)
    assert kept(world) == 0
    scan(world)
    assert world.held(prompt(1)) == 0


def test_what_clients_asked_to_keep_loses_nothing_to_a_turn_that_is_expected():
    world = World(8)
    world.run(prompt(1, 3), priority=1, ttl_s=DAY_S)
    for name in (2, 3):
        world.run(prompt(name))
        world.cache.await_turn(KvTarget(array("i", prompt(name))), Retention(1, 10.0), 0.0)
    assert kept(world) == 4
    scan(world)
    assert [world.held(prompt(1, 3)), world.held(prompt(2)), world.held(prompt(3))] == [3, 1, 0]
    world.run(prompt(4, 1), priority=1, ttl_s=5.0)  # gets the room of the expected turn
    assert kept(world) == 4
    scan(world)
    assert [world.held(prompt(name, 3)) for name in (1, 2, 4)] == [3, 0, 1]


def test_a_prompt_that_is_kept_already_needs_no_more_room_for_its_next_turn():
    world = World(8)
    world.cache.expire(0.0)
    world.run(prompt(1, 4), priority=1, ttl_s=5.0)
    world.cache.await_turn(KvTarget(array("i", prompt(1, 4))), Retention(1, 10.0), 0.0)
    world.cache.expire(9.0)
    assert kept(world) == 4


def test_no_more_is_kept_than_its_share_and_the_oldest_goes_first():
    world = World(8)
    for name in (1, 2, 3):
        world.run(prompt(name), priority=1, ttl_s=DAY_S)
    assert kept(world) == 4
    scan(world)
    assert [world.held(prompt(name)) for name in (1, 2, 3)] == [0, 2, 2]


def test_a_long_chain_ends_at_once():
    chain, freed = [Node(b"", 0, None, 0)], []
    for number in range(20_000):
        chain.append(Node(b"%d" % number, number, chain[-1], 0))
        chain[-2].children[chain[-1].key] = chain[-1]
    book = KeptBlocks(100_000, freed.append)
    book.keep(chain[1:], Retention(1, 5.0, "a"), 0.0)
    book.keep(chain[1:10], Retention(1, 5.0, "b"), 0.0)
    book.expire(5.0)
    assert (len(book), by_owner(book)) == (0, {})
    assert set(freed) == set(chain[1:])
    assert {node.priority for node in chain} == {0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    asks=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30), st.integers(1, 6)), max_size=40),
    host=st.sampled_from([0, 24]),
)
def test_whatever_others_ask_an_owner_has_its_share(asks, host):
    world = World(24, host)
    asked = {}
    for owner, name, blocks in asks:
        world.run(prompt(100 * owner + name, blocks), priority=1, owner=owner)
        asked.setdefault(owner, {}).setdefault(name, 0)
        asked[owner][name] = max(asked[owner][name], blocks)
    shares = by_owner(world.cache.tree.kept)
    assert sum(shares.values()) == min(sum(sum(names.values()) for names in asked.values()), 12)
    for owner, names in asked.items():
        assert shares.get(owner, 0) >= min(sum(names.values()), 12 // 4)
