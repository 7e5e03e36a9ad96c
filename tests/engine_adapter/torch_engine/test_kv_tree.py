from __future__ import annotations

from engine_adapter.torch_engine.kv_node import Node
from engine_adapter.torch_engine.kv_tree import KvTree


class Copies:
    def __init__(self):
        self.down = []
        self.up = []

    def copy_to_host(self, gpu_slots, host_slots):
        self.down.append((list(gpu_slots), list(host_slots)))

    def copy_to_gpu(self, host_slots, gpu_slots):
        self.up.append((list(host_slots), list(gpu_slots)))


def chain(tree, length, salt=None):
    """An idle chain of blocks."""
    root = tree.hold_root(salt)
    nodes: list[Node] = []
    for index in range(length):
        nodes.append(tree.insert(nodes[-1] if nodes else root, b"key%d" % index, tree.gpu.take()))
    tree.touch(nodes)
    for node in reversed(nodes):
        tree.release(node)
    tree.release_root(root)
    return nodes


def make(gpu=4, host=4):
    copies = Copies()
    return KvTree(gpu_blocks=gpu, host_blocks=host, tokens_per_block=1, copier=copies), copies


def test_one_eviction_is_one_copy_and_tells_of_a_chain_once():
    tree, copies = make()
    nodes = chain(tree, 4)
    tree.journal.drain()
    assert tree.make_room(3)
    assert copies.down == [([3, 2, 1], [0, 1, 2])]
    stored, removed = tree.journal.drain()
    assert stored.hashes == tuple(node.name for node in nodes[1:])
    assert set(removed.hashes) == set(stored.hashes)


def test_a_host_slot_given_twice_in_one_batch_is_copied_once():
    tree, copies = make(gpu=4, host=1)
    chain(tree, 4)
    assert tree.make_room(4)
    assert copies.down == [([0], [0])]
    assert tree.totals["evicted"] == 4


def test_make_room_in_vain_evicts_nothing():
    tree, copies = make()
    chain(tree, 2)
    tree.gpu.take_many(2)
    assert not tree.make_room(3)
    assert copies.down == []
    assert tree.idle == 2


def test_dropping_a_block_takes_along_what_hangs_below_on_any_tier():
    tree, _ = make(gpu=4, host=1)
    nodes = chain(tree, 3)
    assert tree.offload([nodes[1]], 1) == 1
    assert tree.drop([nodes[0]]) == 3
    assert (tree.gpu.free, tree.host.free, tree.idle, tree.roots) == (4, 1, 0, {})


def test_roots_live_as_long_as_they_are_held_or_carry():
    tree, _ = make()
    root = tree.hold_root("a")
    assert tree.hold_root("a") is root
    tree.release_root(root)
    tree.release_root(root)
    assert tree.roots == {}
    chain(tree, 1, salt="b")
    assert list(tree.roots) == ["b"]


def test_a_block_known_on_the_host_moves_up_into_the_slot_it_is_computed_in():
    tree, copies = make()
    (node,) = chain(tree, 1)
    tree.offload([node], 1)
    tree.journal.drain()
    slot = tree.gpu.take()
    root = tree.hold_root(None)
    assert tree.insert(root, b"key0", slot) is node
    assert (node.slot, node.refs, tree.host.free) == (slot, 1, 4)
    assert copies.up == []
    assert len(tree.journal.drain()) == 2
