import json
from array import array

import pytest

from engine_adapter import BlocksRemoved, BlocksStored, CacheCleared, Tier, ViewCurrent, ViewLost
from engine_adapter.sglang.windows import Windows, window_of
from engine_adapter.types import Attention, KvGroup, ViewResumed

PAGE, GROUP = 16, KvGroup(1, Attention.WINDOW, 33)
"""A window needs the two pages before a boundary."""
LOST, WHOLE = ViewLost("connected"), ViewCurrent(complete=True)
UNSURE = ViewCurrent(complete=False)


def run(*names, after=None, tier=Tier.GPU):
    return BlocksStored(tier, after, names, array("i", [7] * PAGE * len(names)), PAGE)


def gone(*names, tier=Tier.GPU):
    return BlocksRemoved(tier, names)


def started(capacity=None, window=GROUP.window):
    windows = Windows(window, PAGE, capacity)
    assert followed(windows, LOST, WHOLE)[0] == LOST
    return windows


def followed(windows, *events):
    return [event for sent in events for event in windows.follow(sent)]


def told(windows, event):
    """Names of pages that the windows hold now, and of those that they hold no longer, as the event tells."""
    first, *others = windows.follow(event)
    assert first == event
    assert {each.group for each in others} <= {GROUP}
    stored = [name for each in others if isinstance(each, BlocksStored) for name in each.hashes]
    return stored, [name for each in others if isinstance(each, BlocksRemoved) for name in each.hashes]


class TestWhatTheyHold:
    def test_the_last_window_of_a_run(self):
        windows = started()
        assert told(windows, run(1, 2, 3, 4)) == ([3, 4], [])
        assert told(windows, run(5, after=4)) == ([5], [])
        assert told(windows, run(6)) == ([6], [])

    def test_a_run_that_leaves_another_one_makes_the_window_before_it_whole(self):
        """A page more is kept of what had to be computed again."""
        windows = started()
        told(windows, run(1, 2, 3, 4, 5, 6, 7))
        assert told(windows, run(8, 9, 10, after=4)) == ([2, 3, 4, 9, 10], [])
        assert told(windows, run(11, 12, after=4)) == ([11, 12], [])
        assert told(windows, run(13, after=7)) == ([13], [])

    @pytest.mark.parametrize(
        ("length", "held"),
        [
            (5 * PAGE + 1, [4, 5, 6]),
            (5 * PAGE, [3, 4, 5, 6]),
            (4 * PAGE + 9, [3, 4, 5, 6]),
            (6 * PAGE + 15, [5, 6]),
            (7 * PAGE, [5, 6]),
            (0, [5, 6]),
        ],
    )
    def test_of_a_run_with_a_prompt_and_its_answer_the_prompts_window_counts(self, length, held):
        windows = started()
        windows.asked(array("i", [7] * length))
        windows.asked(array("i", [8] * 6 * PAGE))
        assert told(windows, run(1, 2, 3, 4, 5, 6)) == (held, [])

    def test_long_answers_move_the_window_on(self):
        windows = started()
        windows.asked(array("i", [7] * 3 * PAGE))
        assert told(windows, run(*range(1, 11))) == ([9, 10], [])

    def test_pages_that_full_attention_drops_leave_them(self):
        windows = started()
        told(windows, run(1, 2, 3, 4))
        assert told(windows, gone(2)) == ([], [])
        assert told(windows, gone(4, 3)) == ([], [4, 3])
        assert told(windows, gone(4)) == ([], [])

    @pytest.mark.parametrize("cleared", [CacheCleared(), LOST, ViewResumed()])
    def test_a_new_view_begins_with_nothing(self, cleared):
        windows = started()
        told(windows, run(1, 2))
        assert followed(windows, cleared) == [cleared]
        assert told(windows, run(3, after=2)) == ([3], [])

    def test_other_tiers_do_not_count(self):
        windows = started()
        assert told(windows, run(1, 2, tier=Tier.HOST)) == ([], [])
        assert told(windows, gone(1, 2, tier=Tier.HOST)) == ([], [])


class TestLittleMemory:
    def test_those_used_longest_ago_are_dropped_and_nothing_is_sure_then(self):
        windows = started(capacity=6 * PAGE)
        assert told(windows, run(1, 2)) == ([1, 2], [])
        assert told(windows, run(3, 4)) == ([3, 4], [])
        assert told(windows, run(5, after=2)) == ([5], [])
        sent = run(6, 7, 8)
        assert followed(windows, sent) == [
            sent,
            UNSURE,
            BlocksRemoved(Tier.GPU, (3, 4), GROUP),
            BlocksStored(Tier.GPU, None, (7, 8), array("i"), PAGE, group=GROUP),
        ]
        assert followed(windows, WHOLE) == [UNSURE]

    def test_pages_that_stay_are_not_walked_to_find_those_that_go(self):
        class Counted(dict):
            walked = 0

            def __iter__(self):
                for name in super().__iter__():
                    self.walked += 1
                    yield name

        windows = started(capacity=1002 * PAGE)
        windows._held = Counted.fromkeys(range(1000))
        assert BlocksRemoved(Tier.GPU, (0, 1), GROUP) in followed(windows, run(*range(1000, 1004)))
        assert windows._held.walked <= 3

    def test_a_cleared_cache_is_sure_again(self):
        windows = started(capacity=2 * PAGE)
        assert UNSURE in followed(windows, run(1, 2, 3))
        assert followed(windows, CacheCleared(), WHOLE) == [CacheCleared(), WHOLE]


class TestUnknownWindow:
    def test_no_view_is_complete(self):
        windows, events = Windows(None, PAGE, None), [run(1, 2), gone(1), CacheCleared()]
        assert followed(windows, LOST, WHOLE) == [LOST, UNSURE]
        assert followed(windows, *events) == [*events, UNSURE]


class TestWindowOf:
    @pytest.mark.parametrize(
        ("config", "window"),
        [
            ({"sliding_window": 128}, 128),
            ({"text_config": {"sliding_window": 64}, "sliding_window": 128}, 64),
            ({"sliding_window": None}, None),
            ({"sliding_window": "128"}, None),
            ({}, None),
            ([128], None),
            ({"text_config": 1}, None),
        ],
    )
    def test_it_is_read_from_the_models_directory(self, tmp_path, config, window):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert window_of(str(tmp_path)) == window

    def test_none_is_found(self, tmp_path):
        assert window_of(None) is None
        assert window_of(str(tmp_path)) is None
        (tmp_path / "config.json").write_text("{", encoding="utf-8")
        assert window_of(str(tmp_path)) is None
        assert window_of("no-such/model") is None
