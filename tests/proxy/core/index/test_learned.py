from proxy.core.index.learned import LearnedBlocks


def test_the_least_recently_served_prompt_makes_room_leaves_first():
    learned = LearnedBlocks(4)
    assert learned.learn([1, 2]) == ()
    assert learned.learn([1, 3, 4]) == ()
    assert learned.learn([5, 6]) == (4, 2)
    assert len(learned) == 4


def test_serving_again_keeps():
    learned = LearnedBlocks(3)
    learned.learn([1])
    learned.learn([2, 3])
    learned.learn([1])
    assert learned.learn([4]) == (3,)


def test_a_prompt_longer_than_the_cache_keeps_its_beginning():
    learned = LearnedBlocks(2)
    assert learned.learn([1, 2, 3]) == (3,)


def test_evicted_blocks_are_told_in_the_order_of_their_chains():
    learned = LearnedBlocks(6)
    learned.learn([1, 2, 3])
    learned.learn([4, 5, 6])
    assert learned.learn([7, 8, 9, 10, 11]) == (5, 6, 1, 2, 3)


def test_forget_and_clear():
    learned = LearnedBlocks(2)
    learned.learn([1, 2])
    learned.forget([2, 9])
    assert learned.learn([3]) == ()
    learned.clear()
    assert len(learned) == 0
