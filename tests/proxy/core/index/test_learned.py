from collections import OrderedDict
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from proxy.core.index.expected import LearnedBlocks

# Every chain of six blocks, of two kinds of token; a block is named by all tokens up to it.
CHAINS = [
    tuple(int("1" + "".join(tokens[: at + 1])) for at in range(6)) for tokens in product("01", repeat=6)
]


class LearnedMachine(RuleBasedStateMachine):
    """Against a cache that stores block by block."""

    chains = st.builds(lambda chain, end: chain[:end], st.sampled_from(CHAINS), st.integers(0, 6))

    def __init__(self):
        super().__init__()
        self.learned, self.blocks = LearnedBlocks(12), OrderedDict()

    @rule(chain=chains)
    def learn(self, chain):
        for block in reversed(chain):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        surplus = max(len(self.blocks) - self.learned.capacity, 0)
        gone = [self.blocks.popitem(last=False)[0] for _ in range(surplus)]
        assert self.learned.learn(chain) == tuple(reversed(gone))

    @rule(chain=chains)
    def flush(self, chain):
        for block in chain:
            self.blocks.pop(block, None)
        self.learned.forget(chain)

    @rule(chain=chains, start=st.integers(0, 6))
    def lose_an_end(self, chain, start):
        """Only where nothing follows it: else other blocks are evicted next, see below."""
        if not any(chain == other[: len(chain)] and other[-1] in self.blocks for other in CHAINS):
            for block in chain[start:]:
                self.blocks.pop(block, None)
            self.learned.forget(chain, start)

    @rule(capacity=st.sampled_from([3, 12, 20]))
    def resize(self, capacity):
        self.learned.capacity = capacity

    @rule()
    def restart(self):
        if len(self.learned) <= self.learned.capacity:
            earlier, self.learned = self.learned, LearnedBlocks(self.learned.capacity)
            assert all(self.learned.restore(stretch) for stretch in earlier.stretches())

    @rule()
    def clear(self):
        self.learned.clear()
        self.blocks.clear()

    @invariant()
    def same_blocks(self):
        assert len(self.learned) == len(self.blocks)
        stretches = self.learned._stretches
        assert {block for stretch in stretches.values() for block in stretch} == set(self.blocks)
        assert self.learned._numbers == {stretch[0]: number for number, stretch in stretches.items()}


TestLearnedMachine = LearnedMachine.TestCase
TestLearnedMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.fixture
def learned():
    return LearnedBlocks(6)


def test_what_an_earlier_engine_held_beyond_the_capacity_is_left_out():
    learned = LearnedBlocks(3)
    assert [learned.restore(stretch) for stretch in ((1, 2), (3, 4), (5,))] == [True, False, True]
    assert learned.learn((6,)) == (2,)


def test_what_follows_a_forgotten_middle_is_evicted_next(learned):
    learned.learn((1, 2))
    learned.learn((3, 4, 5, 6))
    learned.forget((3, 4, 5), 2)
    assert learned.learn((7, 8)) == (6,)


def test_what_another_has_learned_is_older_than_all_that_is_known():
    learned = LearnedBlocks(5)
    learned.learn((1, 2))
    assert learned.stretches() == [(1, 2)]
    assert learned.adopt((3, 4)) == (3, 4)
    assert learned.adopt((5, 6)) == (5,)
    assert learned.adopt((7,)) == ()
    assert learned.stretches() == [(5,), (3, 4), (1, 2)]
    assert learned.learn((8, 9)) == (4, 5)
