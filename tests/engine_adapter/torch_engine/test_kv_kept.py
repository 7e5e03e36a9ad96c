from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.torch_engine.kv_tree import KeptBlocks, Node
from engine_adapter.types import KvTarget, Retention
from tests.engine_adapter.torch_engine.kv_integrity import by_owner
from tests.engine_adapter.torch_engine.kv_world import SIZE, World

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
