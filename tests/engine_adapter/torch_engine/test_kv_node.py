from __future__ import annotations

from engine_adapter.torch_engine.kv_node import GONE, BlockPool, LeafQueue, Node
from engine_adapter.types import Tier


def leaf(last_used, priority=0, slot=0):
    node = Node(b"", 1, None, slot)
    node.last_used, node.priority = last_used, priority
    return node


def test_a_pool_hands_out_low_slots_first():
    pool = BlockPool(4)
    assert [pool.take(), *pool.take_many(2)] == [0, 1, 2]
    pool.give(1)
    assert pool.free == 2
    assert list(pool.take_many(2)) == [1, 3]
    assert pool.free == 0


def test_a_queue_orders_by_priority_then_use_then_depth():
    deep = Node(b"", 1, leaf(2), 0)
    nodes = [leaf(1, priority=1), leaf(2), deep, leaf(3)]
    queue = LeafQueue(Tier.GPU)
    for node in nodes:
        queue.push(node)
    assert [queue.pop() for _ in range(5)] == [deep, nodes[1], nodes[3], nodes[0], None]


def test_a_queue_skips_what_changed():
    used, held, pinned, gone, moved, parent, good = nodes = [leaf(index) for index in range(7)]
    queue = LeafQueue(Tier.GPU)
    for node in nodes:
        queue.push(node)
    used.last_used = 50
    held.refs = 1
    pinned.pins = 1
    gone.slot = GONE
    moved.tier = Tier.HOST
    parent.gpu_children = 1
    assert queue.nodes() == {good}
    assert queue.pop() is good
    assert queue.pop() is None


def test_a_queue_pops_only_below_a_value():
    queue = LeafQueue(Tier.GPU)
    node = leaf(5)
    queue.push(node)
    assert queue.pop(below=node.value()) is None
    assert queue.pop(below=leaf(6).value()) is node


def test_a_queue_sweeps_stale_entries():
    queue = LeafQueue(Tier.GPU)
    node = leaf(0)
    for tick in range(1000):
        node.last_used = tick
        queue.push(node)
    assert len(queue._heap) <= 80
    assert queue.pop() is node
