from __future__ import annotations

from array import array

from engine_adapter.torch_engine.kv_node import GONE, Node
from engine_adapter.torch_engine.kv_tree import Journal
from engine_adapter.types import BlocksRemoved, BlocksStored, Tier

ROOT = Node(b"", 0, None, GONE, "s")


def chain(*contents):
    nodes = [ROOT]
    for index, (tokens, extras) in enumerate(contents):
        key = array("i", tokens).tobytes() + (array("Q", extras).tobytes() if extras else b"")
        nodes.append(Node(key, 10 + index, nodes[-1], index))
    return nodes[1:]


def test_a_chain_is_one_event():
    journal = Journal(2)
    for node in chain(([1, 2], None), ([3, 4], [0, 9])):
        journal.stored(Tier.GPU, node)
    assert journal.drain() == [
        BlocksStored(Tier.GPU, None, (10, 11), array("i", [1, 2, 3, 4]), 2, array("Q", [0, 0, 0, 9]), "s")
    ]
    assert journal.drain() == []


def test_breaks_in_a_chain_start_a_new_event():
    first, second, third = chain(([1, 2], None), ([3, 4], None), ([5, 6], None))
    journal = Journal(2)
    journal.stored(Tier.GPU, first)
    journal.stored(Tier.HOST, second)
    journal.stored(Tier.HOST, third)
    journal.stored(Tier.HOST, first)
    assert [(event.tier, event.parent, event.hashes) for event in journal.drain()] == [
        (Tier.GPU, None, (10,)),
        (Tier.HOST, 10, (11, 12)),
        (Tier.HOST, None, (10,)),
    ]


def test_removals_of_a_tier_gather_and_order_is_kept():
    first, second = chain(([1, 2], None), ([3, 4], None))
    journal = Journal(2)
    journal.removed(Tier.GPU, second)
    journal.removed(Tier.GPU, first)
    journal.removed(Tier.HOST, first)
    journal.stored(Tier.GPU, first)
    journal.removed(Tier.GPU, first)
    events = journal.drain()
    assert events[:2] == [BlocksRemoved(Tier.GPU, (11, 10)), BlocksRemoved(Tier.HOST, (10,))]
    assert [type(event) for event in events[2:]] == [BlocksStored, BlocksRemoved]
