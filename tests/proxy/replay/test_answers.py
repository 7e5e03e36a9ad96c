"""The blocks of answers, by the prompts that go on with them."""

from dataclasses import replace

import pytest

from proxy.replay.cache import answer_blocks
from tests.proxy.replay.making import ask, model_of, play


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize(("output", "answer"), [(50, ()), (51, (3,)), (151, (3, 4)), (900, (3, 4, 5, 6))])
def test_the_next_turn_tells_what_an_answer_has_completed(session, output, answer):
    """Blocks of 100 tokens: the prompt leaves 50 of the third one free."""
    turns = [
        ask((1, 2), output=output, session=session, name=0),
        ask((9,), session="other" if session else None, name=1),
        ask((1, 2, 3, 4, 5, 6), session=session, name=2),
    ]
    assert answer_blocks(turns) == [answer, (), ()]


def test_the_next_turn_finds_the_answer_in_the_cache():
    first = replace(ask((1, 2), output=151, name=1), answer=(3, 4))
    engine, diary = play(model_of(), first, ask((1, 2, 3, 4, 5), at=5.0, name=2))
    assert ("stored", "gpu", [3, 4]) in diary.lines
    assert diary.of("started")[1] == ("started", 5.0, 2, 400, 0)
    assert engine.evicted == 0


def test_an_answer_evicts_what_was_used_longest_ago_and_is_dropped_where_there_is_no_room():
    engine, diary = play(model_of(4), ask((7,), name=1), replace(ask((1, 2), at=2.0, name=2), answer=(3, 4)))
    assert diary.of("removed")[-1] == ("removed", "gpu", [7])
    assert (engine.evicted, engine.held) == (1, 4)
    _, diary = play(model_of(4), replace(ask((1, 2), name=1), answer=(3, 4, 5)))
    assert ("stored", "gpu", [3, 4, 5]) not in diary.lines
