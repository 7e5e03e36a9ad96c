from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.load import Remaining
from proxy.core.placement.prefix_wait import LENIENCE, leader, patience_s


@dataclass
class Prompt:
    hashes: tuple
    found: int = 0


class TestLeader:
    def test_is_who_computes_the_last_block_that_is_shared(self):
        first, longer = Prompt((1, 2, 3, 4)), Prompt((1, 2, 3, 4, 5, 6), found=4)
        underway = [Prompt((1, 9)), first, longer]
        assert leader(underway, (1, 2, 3, 7), 3) is first
        assert leader(underway, (1, 2, 3, 4, 5, 7), 5) is longer
        assert leader(underway, (1, 2, 3, 4, 5, 7), 4) is first

    def test_is_nobody_who_waits_for_that_block(self):
        assert leader([Prompt((1, 2, 3, 4), found=3)], (1, 2, 3), 3) is None

    @pytest.mark.parametrize(("hashes", "blocks"), [((1, 2), 0), ((), 0), ((1, 8, 9), 3), ((1, 2, 3, 4), 4)])
    def test_is_nobody_where_nothing_is_shared(self, hashes, blocks):
        assert leader([Prompt((1, 2, 3)), Prompt(())], hashes, blocks) is None

    @given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
    def test_nobody_ever_waits_for_one_that_waits_for_it(self, rows):
        chain = tuple(range(6))
        prompts = [Prompt(chain[:length], min(found, length)) for length, found in rows]
        for prompt in prompts:
            waits_for, seen = leader(prompts, prompt.hashes, prompt.found), 0
            while waits_for is not None:
                seen += 1
                assert seen <= len(prompts)
                waits_for = leader(prompts, waits_for.hashes, waits_for.found)


class TestPatience:
    def test_as_long_as_going_beside_it_would_take_longer(self):
        # Side by side each takes twice as long.
        assert patience_s(Remaining(0.0, 1.9, seen=True), 1.0) == pytest.approx(1.9 * LENIENCE)
        assert patience_s(Remaining(0.0, 2.0, seen=True), 1.0) is None

    def test_what_is_before_both_delays_both(self):
        assert patience_s(Remaining(50.0, 1.0, seen=True), 1.0) == 51 * LENIENCE

    def test_whose_first_token_is_not_seen_is_taken_to_come_as_expected(self):
        assert patience_s(Remaining(0.5, 1.0, seen=False), 1.0) == 1.5
