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
