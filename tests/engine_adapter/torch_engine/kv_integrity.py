"""Checks the invariants of the KV cache from first principles. Slow."""

from __future__ import annotations

from collections import Counter

from engine_adapter.types import Tier


def violations(cache, sequences):
    """Broken invariants of a cache whose running sequences are `sequences`; empty when all hold."""
    running = [sequence for sequence in sequences if sequence.root is not None]
    nodes = list(cache.tree.below(cache.tree.roots.values()))
    return [
        *_slots(cache, running, nodes),
        *_references(cache, running, nodes),
        *_leaves(cache, nodes),
        *_kept(cache, nodes),
        *_sequences(cache, running),
        *_roots(cache, running),
    ]


def _slots(cache, running, nodes):
    """Every slot of a tier is exactly one of: free, a node's, a running sequence's own."""
    private = [slot for sequence in running for slot in sequence.blocks[len(sequence.path) :]]
    for tier, pool in ((Tier.GPU, cache.tree.gpu), (Tier.HOST, cache.tree.host)):
        used = Counter(pool._free)
        used.update(node.slot for node in nodes if node.tier is tier)
        if tier is Tier.GPU:
            used.update(private)
        if used != Counter(range(pool.total)):
            yield f"{tier}: slots are lost or doubled: {used - Counter(range(pool.total))}"
    idle = sum(1 for node in nodes if node.idle and node.tier is Tier.GPU)
    if idle != cache.tree.idle:
        yield f"idle is {cache.tree.idle}, counted {idle}"
    stats = cache.stats(float("-inf"))
    gpu = stats["gpu"]
    if gpu["free"] + gpu["cached"] + gpu["active"] != gpu["total"]:
        yield f"free + cached + active is not total: {gpu}"
    held = {id(node) for sequence in running for node in sequence.path}
    if gpu["active"] != len(held) + len(private):
        yield f"active is {gpu['active']}, counted {len(held) + len(private)}"


def _references(cache, running, nodes):
    """Refs count sequences. A parent has at least its child's refs and pins. Used blocks are on the GPU."""
    refs = Counter(id(node) for sequence in running for node in sequence.path)
    for node in nodes:
        if node.refs != refs[id(node)]:
            yield f"refs of {node.name:x} are {node.refs}, counted {refs[id(node)]}"
        if node.refs and node.tier is not Tier.GPU:
            yield f"{node.name:x} is in use on {node.tier}"
        parent = node.parent
        if parent is not None and parent.parent is not None:
            if node.refs > parent.refs or node.pins > parent.pins:
                yield f"{node.name:x} is held more than its parent"
            if node.idle and parent.idle and node.value() >= parent.value():
                yield f"{node.name:x} is worth more than its parent"
    pinned = sum(1 for node in nodes if node.pins)
    if pinned != cache.pinned_blocks:
        yield f"pinned_blocks is {cache.pinned_blocks}, counted {pinned}"


def _leaves(cache, nodes):
    """Child counts are right, names are unique, and the queues hold every evictable block."""
    for node in [*nodes, *cache.tree.roots.values()]:
        on_gpu = sum(1 for child in node.children.values() if child.tier is Tier.GPU)
        if on_gpu != node.gpu_children:
            yield f"gpu_children of {node.name:x} is {node.gpu_children}, counted {on_gpu}"
    if len({node.name for node in nodes}) != len(nodes):
        yield "two blocks share a name"
    for tier in (Tier.GPU, Tier.HOST):
        queued = cache.tree.leaves[tier].nodes()
        missing = {node for node in nodes if node.tier is tier and node.evictable} - queued
        if missing:
            yield f"{tier}: {len(missing)} evictable blocks are not queued"


def by_owner(kept):
    """Number of blocks that each owner keeps."""
    return {owner: len(book) for owner, book in kept._books.items()}


def _kept(cache, nodes):
    """Retained blocks are known and within the limit. A parent is retained at least as long as its child."""
    kept = cache.tree.kept
    if {node for node in nodes if node.priority > 0} != set(kept._owners):
        yield "the kept blocks differ from those of the tree"
    if len(kept) > kept.limit or len(kept) != sum(by_owner(kept).values()):
        yield f"{len(kept)} blocks are kept of at most {kept.limit}, by owner: {by_owner(kept)}"
    for node in nodes:
        parent = node.parent
        if parent is not None and parent.parent is not None:
            if node.priority > parent.priority or node.kept_until > parent.kept_until:
                yield f"{node.name:x} is kept longer than its parent"
            if node.idle and parent.idle and node.recency() >= parent.recency():
                yield f"{node.name:x} was used after its parent"


def _sequences(cache, running):
    """A sequence holds the blocks of its own content, in the slots it reads, and enough of them."""
    for sequence in running:
        parent = sequence.root
        for index, node in enumerate(sequence.path):
            if node.parent is not parent or node.slot != sequence.blocks[index]:
                yield f"block {index} of a sequence is out of place"
            if node.key != cache.key_of(sequence, index):
                yield f"block {index} of a sequence has other content"
            parent = node
        size = cache.tokens_per_block
        if not len(sequence.path) * size <= sequence.computed <= len(sequence.blocks) * size:
            yield f"{sequence.computed} tokens computed over {len(sequence.blocks)} blocks"


def _roots(cache, running):
    """A salt has a root exactly as long as it has blocks or running sequences."""
    uses = Counter(sequence.salt for sequence in running)
    for salt, root in cache.tree.roots.items():
        if root.refs != uses[salt]:
            yield f"a root is held {root.refs} times, counted {uses[salt]}"
        if not root.refs and not root.children:
            yield "an empty root is remembered"
