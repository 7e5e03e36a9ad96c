from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.index.blocks import Chain
from proxy.core.placement import tiering
from proxy.core.placement.demand import Demand
from proxy.core.placement.tiering import Below, Thread, Threads, gain, soon


def never(_idle_s):
    return 0.0


def thread(gaps=(), ended=0.0, name="t"):
    return Thread(name, (1, 2), 32, ended, tuple(gaps))


def talk(threads, starts, *, first=0):
    """A conversation whose turns begin then; its last thread."""
    for number, start in enumerate(starts):
        hashes = tuple(range(first, first + number + 2))
        threads.turn(start, start + 1.0, hashes, 16 * len(hashes), f"turn {number}")
    return threads._threads[hashes[-1]]


def due(threads, now):
    return list(threads.due(now))


@pytest.mark.parametrize(
    ("gaps", "ended", "window"),
    [
        ((), 0.0, None),
        ((10.0,), 0.0, None),
        ((10.0, 10.0, 10.0), 100.0, (108.5, 111.5)),
        ((8.0, 10.0, 12.0), 0.0, (4.0, 16.0)),
        ((1.0, 10.0, 30.0), 0.0, (0.0, 37.0)),
    ],
    ids=["new", "one gap is no rhythm", "steady", "spread", "widely spread"],
)
def test_a_window_lies_around_the_usual_gap_as_wide_as_gaps_are_spread(gaps, ended, window):
    assert thread(gaps, ended).window == window


class TestChance:
    def test_it_is_how_often_it_came_back_by_then(self):
        assert thread((5.0, 10.0, 11.0)).chance(8.0, 12.0, never) == pytest.approx(2 / 3)
        assert thread((5.0, 10.0, 30.0)).chance(8.0, 12.0, never) == pytest.approx(1 / 3)

    def test_without_a_history_it_is_that_of_the_pool(self):
        returns = learned((10.0,) * 300)
        assert thread().chance(9.0, 14.0, returns) == pytest.approx(soon(returns, 9.0, 5.0))


def learned(gaps):
    """The returns of a pool in which prompts came back after these gaps, one after the other."""
    demand, now = Demand(), 0.0
    for number, gap in enumerate(gaps):
        demand.asked(now, Chain((1000 + 2 * number,), 16, 16), 16)
        demand.asked(now + gap, Chain((1000 + 2 * number, 1001 + 2 * number), 16, 32), 16)
        now += 10_000.0
    return demand.returns


class TestSoon:
    def test_most_come_back_when_they_do(self):
        returns = learned((10.0,) * 300)
        assert soon(returns, 9.0, 6.0) > 0.4
        assert soon(returns, 100.0, 60.0) < 0.05
        assert soon(returns, 1.0, 1.0) < 0.05

    @given(idle=st.floats(0, 1e5), within=st.floats(0, 1e5), more=st.floats(0, 1e5))
    def test_it_is_a_probability_and_grows_with_the_time(self, idle, within, more):
        returns = POOL
        assert 0 <= soon(returns, idle, within) <= returns(idle) + 1e-9 <= 1 + 1e-9
        if within >= tiering.HALF_OCTAVE * idle:
            assert soon(returns, idle, within) <= soon(returns, idle, within + more) + 1e-9


POOL = learned([0.5 * 1.1**n for n in range(100)])


class TestThreads:
    def test_a_prompt_that_goes_on_is_the_next_turn(self):
        threads = Threads()
        last = talk(threads, (0.0, 11.0, 23.0))
        assert last.gaps == (10.0, 11.0)
        assert (last.prompt, last.n_tokens, last.ended, len(threads._threads)) == ("turn 2", 64, 24.0, 1)
        threads.turn(20.0, 30.0, tuple(range(5)), 80, "before the answer")
        assert threads._threads[4].gaps == ()
        assert threads.turn(40.0, 41.0, (), 5, "of no block") is None
        assert len(threads._threads) == 1

    def test_the_longest_of_several_is_it(self):
        threads = Threads()
        threads.turn(0.0, 1.0, (1,), 16, "document")
        threads._add(thread(name="question"))
        assert threads.turn(5.0, 6.0, (1, 2, 3), 48, "next").prompt == "question"
        assert len(threads._threads) == 2

    def test_the_time_of_tools_and_that_of_people_are_told_apart(self):
        threads, now = Threads(), 0.0
        for number in range(7):  # two steps with a tool, and then somebody reads the answer
            called_tool = number % 3 != 2
            threads.turn(now, now + 1.0, tuple(range(number + 2)), 16, "x", called_tool=called_tool)
            now += 1.0 + (2.0 if called_tool else 60.0)
        last = threads._threads[7]
        assert (last.gaps, last.other_gaps) == ((2.0,) * 4, (60.0, 60.0))
        threads.turn(now, now + 1.0, tuple(range(9)), 16, "x")
        assert threads._threads[8].window == (now + 1.0 + 51.0, now + 1.0 + 69.0)

    def test_the_oldest_are_forgotten(self, monkeypatch):
        monkeypatch.setattr(tiering, "MAX_THREADS", 2)
        threads = Threads()
        for name in (1, 2, 3):
            threads.turn(name, name, (name,), 16, "x")
        assert list(threads._threads) == [2, 3]
        monkeypatch.setattr(tiering, "MAX_TOKENS", 40)
        threads.turn(4.0, 4.0, (4,), 24, "x")
        assert (list(threads._threads), threads._tokens) == ([3, 4], 40)

    def test_each_is_due_in_its_window_and_lapses_once(self):
        threads = Threads()
        last = talk(threads, (0.0, 11.0, 22.0))  # again at 33
        assert due(threads, 31.4) == []
        assert due(threads, 31.5) == [last]
        assert threads.closes(last) == 34.5
        assert threads.lapsed(34.4) == []
        assert due(threads, 34.5) == []
        assert threads.lapsed(34.5) == [last]
        assert threads.lapsed(35.0) == []

    def test_who_cannot_look_at_all_comes_to_each(self):
        threads = Threads()
        some = [talk(threads, (0.0, 11.0, 22.0), first=100 * n) for n in range(3)]
        assert [next(threads.due(32.0 + n / 10)) for n in range(4)] == [*some, some[0]]
        assert due(threads, 33.0) == [some[1], some[2], some[0]]

    def test_one_that_closed_holds_up_nobody(self):
        threads = Threads()
        talk(threads, (0.0, 11.0, 22.0))
        late = talk(threads, (2.5, 13.5, 24.5), first=100)
        assert len(due(threads, 34.4)) == 2
        assert due(threads, 34.5) == [late]

    def test_one_that_came_is_not_due(self):
        threads = Threads()
        talk(threads, (0.0, 11.0, 22.0))
        due(threads, 32.0)
        threads.turn(32.5, 33.0, tuple(range(5)), 80, "came")
        assert due(threads, 33.5) == threads.lapsed(90.0) == []

    def test_those_that_came_early_are_not_held_on_to(self):
        threads = Threads()
        last = talk(threads, [11.0 * n for n in range(500)])
        assert len(threads._opening) <= 2 + tiering.SPARE
        assert due(threads, last.ended + 10.0) == [last]

    def test_one_that_is_found_late_is_not_due(self):
        threads = Threads()
        talk(threads, (0.0, 11.0, 22.0))
        assert due(threads, 40.0) == threads.lapsed(40.0) == []

    def test_one_that_was_brought_back_is_not_due_again(self):
        threads = Threads()
        last = talk(threads, (0.0, 11.0, 22.0))
        due(threads, 32.0)[0].restored_on = "a"
        assert due(threads, 32.5) == []
        assert threads.lapsed(34.5) == [last]


class TestGain:
    def gain(self, blocks=10, gaps=(10.0, 10.0), free=0, lost=0.0, until=11.0):
        asked = []

        def lost_of(blocks, within_s):
            asked.append((blocks, within_s))
            return lost * blocks

        worth = gain(Below(thread(gaps), blocks, until), 9.5, free, lost_of, never)
        leaving = max(blocks - free, 0)
        assert asked == ([(leaving, until - 9.5)] if leaving else [])
        return worth

    def test_it_is_how_likely_a_block_is_needed_not_how_many_there_are(self):
        assert self.gain() == self.gain(blocks=100) == pytest.approx(2 / 3)
        assert self.gain(gaps=(10.0, 40.0)) == pytest.approx(1 / 3)

    def test_what_leaves_must_be_worth_less_than_half(self):
        assert self.gain(lost=0.33) > 0  # 2 of 3 that it comes
        assert self.gain(lost=0.34) < 0
