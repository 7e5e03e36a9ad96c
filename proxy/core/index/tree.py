"""Known prompts as a prefix tree. A run of blocks without a branch is one node.

A block's hash covers all blocks before it. So where two chains part is found in a few steps,
however long they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proxy.core.index.blocks import BlockHash

Owner = TypeVar("Owner")


@dataclass(slots=True, eq=False)
class PrefixNode(Generic[Owner]):
    """A run of blocks that all chains through it share."""

    chain: Sequence[BlockHash]  # a chain through it; its blocks from `start` to `end` are the node's own
    start: int
    end: int
    newest: Owner  # the owner of the chain that was added last
    parent: PrefixNode[Owner] | None  # the node before it; None for the beginning of a prompt
    chains: int = 1  # how many chains go through its first block
    blocks: int = 0  # different blocks, its own and all below
    # The nodes after it, by their first block.
    children: dict[BlockHash, PrefixNode[Owner]] = field(default_factory=dict)

    @property
    def own(self) -> Sequence[BlockHash]:
        """Its own blocks."""
        return self.chain[self.start : self.end]

    @property
    def last(self) -> BlockHash:
        """Its last block, which names it: it stays the last of a node when more chains are added."""
        return self.chain[self.end - 1]

    def path(self) -> list[PrefixNode[Owner]]:
        """The nodes from the beginning of the prompt to this one."""
        nodes: list[PrefixNode[Owner]] = []
        node: PrefixNode[Owner] | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree(Generic[Owner]):
    """A prefix tree of chains, each of which has an owner."""

    def __init__(self) -> None:
        self.roots: dict[BlockHash, PrefixNode[Owner]] = {}

    def add(self, chain: Sequence[BlockHash], owner: Owner) -> None:
        """Adds a chain. Add older ones first."""
        nodes, at, parent = self.roots, 0, None
        while at < len(chain):
            node = nodes.get(chain[at])
            if node is None:
                nodes[chain[at]] = leaf = PrefixNode(chain, at, len(chain), owner, parent)
                for each in leaf.path():
                    each.blocks += len(chain) - at
                return
            at = _shared(node, chain)
            if at < node.end:
                _split(node, at)
            node.chains += 1
            node.newest = owner
            nodes, parent = node.children, node

    def __iter__(self) -> Iterator[PrefixNode[Owner]]:
        """All nodes, each before those below it."""
        left = [*self.roots.values()]
        while left:
            node = left.pop()
            yield node
            left += node.children.values()


def _shared(node: PrefixNode[Owner], chain: Sequence[BlockHash]) -> int:
    """Where the chain leaves the node, whose first block it has."""
    places = range(min(node.end, len(chain)))
    return bisect_left(places, True, lo=node.start + 1, key=lambda at: node.chain[at] != chain[at])


def _split(node: PrefixNode[Owner], at: int) -> None:
    """Puts the node's blocks from a place on, and all below, into a new child."""
    rest = PrefixNode(
        node.chain, at, node.end, node.newest, node, node.chains, node.blocks - (at - node.start)
    )
    rest.children = node.children
    for child in rest.children.values():
        child.parent = rest
    node.end, node.children = at, {node.chain[at]: rest}
