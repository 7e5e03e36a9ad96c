import pytest

from proxy.core.index.match import Match, in_chunks, match_of


def test_matches_are_equal_by_tiers():
    assert {Match(gpu=1, lead=1), Match(gpu=1), Match(host=1)} == {Match(gpu=1), Match(host=1)}
    assert Match(gpu=1) != 1


def test_a_column_counts_each_block_at_its_fastest_tier():
    """Digits: 1 GPU, 2 host, 4 disk, 8 pending."""
    assert match_of("1832", [2, 3, 5, 9]) == Match(gpu=4, host=4, pending=1)
    assert match_of("1832", [2, 3, 5, 9]).lead == 5
    assert match_of("604", [2, 3, 5]) == Match(host=2)


@pytest.mark.parametrize(
    ("column", "ends", "match"),
    [
        ("2", [3], Match()),  # less than a chunk
        ("2", [9], Match(host=8)),
        ("4", [4], Match(disk=4)),
        ("12", [1, 5], Match(gpu=1)),  # the chunk that begins on the GPU is not there whole
        ("32", [1, 4], Match(gpu=1)),  # it is, and three blocks are not worth the way
        ("32", [1, 8], Match(gpu=1, host=7)),
        ("312", [5, 8, 16], Match(gpu=8, host=8)),
        ("312", [3, 5, 12], Match(gpu=5)),  # block 4 lies on the GPU alone
        ("1", [6], Match(gpu=6)),
        ("9832", [2, 5, 6, 12], Match(gpu=3, pending=3)),  # what is pending will be on the GPU
        ("302", [4, 6, 8], Match(gpu=4)),
        ("2a8", [4, 6, 8], Match(host=6, pending=2)),
    ],
)
def test_lower_tiers_give_back_whole_chunks(column, ends, match):
    """As vLLM 0.32's offloading connector with `blocks_per_chunk: 4`."""
    assert in_chunks(column, ends, 4) == match
