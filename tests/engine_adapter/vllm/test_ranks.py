from engine_adapter.vllm.ranks import addressable, rank_headers


def test_a_rank_is_named_in_a_header():
    assert rank_headers(2) == {"x-data-parallel-rank": "2"}
    assert rank_headers(None) == {}


def test_ranks_that_requests_cannot_name_are_none():
    assert addressable((0, 1, 2)) == (0, 1, 2)
    assert addressable((2, 3)) == addressable((1,)) == addressable(()) == ()
