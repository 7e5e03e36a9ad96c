from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.tree import PrefixTree


def grown(*chains):
    tree = PrefixTree()
    for number, chain in enumerate(chains):
        tree.add(chain, number)
    return tree


def shape(nodes):
    return {tuple(node.own): shape(node.children) for node in nodes.values()}


def test_a_run_without_a_branch_is_one_node():
    tree = grown((1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 5, 6), (9,))
    assert shape(tree.roots) == {(1, 2): {(3,): {}, (4, 5): {(6,): {}}}, (9,): {}}
    top = tree.roots[1]
    assert (top.chains, top.newest, top.blocks, top.last) == (3, 2, 6, 2)
    assert [node.last for node in top.children[4].children[6].path()] == [2, 5, 6]


def test_a_chain_that_ends_within_a_node_splits_it():
    tree = grown((1, 2, 3), (1,), (1, 2, 3))
    assert shape(tree.roots) == {(1,): {(2, 3): {}}}
    assert (tree.roots[1].chains, tree.roots[1].children[2].chains) == (3, 2)


def test_a_prompt_without_a_block_is_none():
    assert not grown(()).roots


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
