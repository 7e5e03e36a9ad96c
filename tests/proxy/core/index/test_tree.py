from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.tree import PrefixTree


def grown(*chains):
    tree = PrefixTree()
    for number, chain in enumerate(chains):
        tree.add(chain, number)
    return tree


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_it_holds_each_block_once(words):
    # As with hashes, a block stands for all before it.
    chains = [tuple(tuple(word[: n + 1]) for n in range(len(word))) for word in words]
    tree = grown(*chains)
    nodes = list(tree)
    assert sorted(block for node in nodes for block in node.own) == sorted({b for c in chains for b in c})
    for node in nodes:
        through = [number for number, chain in enumerate(chains) if node.own[0] in chain]
        assert (node.chains, node.newest) == (len(through), through[-1])
        assert node.blocks == len(node.own) + sum(child.blocks for child in node.children.values())
        assert all(child.parent is node and child.start == node.end for child in node.children.values())
        assert len(node.children) != 1 or any(chain and chain[-1] == node.last for chain in chains)
