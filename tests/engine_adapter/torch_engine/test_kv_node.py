from __future__ import annotations

from engine_adapter.torch_engine.kv_node import LeafQueue, Node
from engine_adapter.types import Tier


def leaf(last_used, priority=0, slot=0):
    node = Node(b"", 1, None, slot)
    node.last_used, node.priority = last_used, priority
    return node


def test_a_queue_orders_by_priority_then_use_then_depth():
    deep = Node(b"", 1, leaf(2), 0)
    nodes = [leaf(1, priority=1), leaf(2), deep, leaf(3)]
    queue = LeafQueue(Tier.GPU)
    for node in nodes:
        queue.push(node)
    assert [queue.pop() for _ in range(5)] == [deep, nodes[1], nodes[3], nodes[0], None]


def test_a_queue_sweeps_stale_entries():
    queue = LeafQueue(Tier.GPU)
    node = leaf(0)
    for tick in range(1000):
        node.last_used = tick
        queue.push(node)
    assert len(queue._heap) <= 80
    assert queue.pop() is node
