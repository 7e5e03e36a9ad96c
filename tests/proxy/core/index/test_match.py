from proxy.core.index.match import Match, match_of


def test_matches_are_equal_by_tiers():
    assert {Match(gpu=1, lead=1), Match(gpu=1), Match(host=1)} == {Match(gpu=1), Match(host=1)}
    assert Match(gpu=1) != 1


def test_a_column_counts_each_block_at_its_fastest_tier():
    """Digits: 1 GPU, 2 host, 4 disk, 8 pending."""
    assert match_of("1832", [2, 3, 5, 9]) == Match(gpu=4, host=4, pending=1)
    assert match_of("1832", [2, 3, 5, 9]).lead == 5
    assert match_of("604", [2, 3, 5]) == Match(host=2)
