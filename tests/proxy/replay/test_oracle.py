from proxy.replay.oracle import oracle_hits
from tests.proxy.replay.making import ask, model_of


def test_one_cache_for_all():
    prompts = [ask((1, 2)), ask((7,)), ask((1, 2, 3))]
    assert oracle_hits(prompts, 1, model_of(4)) == 200
    assert oracle_hits([*prompts, ask((7,))], 2, model_of(4)) == 300


def test_the_least_recently_used_goes_and_host_tiers_are_room_too():
    prompts = [ask((1, 2)), ask((7, 8)), ask((1, 2))]
    assert oracle_hits(prompts, 1, model_of(3)) == 100
    assert oracle_hits(prompts, 1, model_of(3, host=1)) == 200


def test_the_last_token_is_computed():
    assert oracle_hits([ask((1, 2), tail=0)] * 2, 1, model_of(4)) == 100
