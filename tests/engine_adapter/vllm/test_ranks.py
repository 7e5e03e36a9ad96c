from engine_adapter.vllm.ranks import addressable, rank_headers, sent_to_rank


def test_a_rank_takes_the_place_of_the_clients():
    headers = {"X-Data-Parallel-Rank": "5", "x-other": "1"}
    assert sent_to_rank(headers, 0) == {"x-other": "1", "x-data-parallel-rank": "0"}
    assert sent_to_rank(headers, None) is headers
    assert rank_headers(None) == {}


def test_ranks_that_requests_cannot_name_are_none():
    assert addressable((0, 1, 2)) == (0, 1, 2)
    assert addressable((2, 3)) == addressable((1,)) == addressable(()) == ()
