"""Loads of router_cost.py: lengths, waves, and next turns that continue their chats."""

from itertools import pairwise

import msgspec
import pytest
from tokenizers import Tokenizer


@pytest.fixture
def work():
    import cost_work

    return cost_work


@pytest.fixture
def model():
    from large_tokenizer import DEFAULT_MODEL

    return DEFAULT_MODEL


def tokens_of(model, body):
    text = "".join(message["content"] for message in body["messages"])
    return len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


@pytest.mark.parametrize("tokens", [300, 8000])
def test_chats_have_the_length_asked_for_and_differ(work, model, tokens):
    (wave,) = work.Chats(model, 1).waves(work.Load("a", tokens, 1, 4, 4))
    found = [tokens_of(model, msgspec.json.decode(body)) for body in wave.first]
    assert sum(found) / 4 == pytest.approx(tokens, rel=0.3)
    assert len(set(wave.first)) == 4


def test_a_next_turn_continues_its_chat(work, model):
    waves = list(work.Chats(model, 1).waves(work.Load("a", 2000, 1, 5, 2)))
    assert [len(wave.first) for wave in waves] == [2, 2, 1]
    for first, after in zip(waves[0].first, waves[0].next, strict=True):
        before, later = msgspec.json.decode(first)["messages"], msgspec.json.decode(after)["messages"]
        assert later[: len(before)] == before
        roles = [message["role"] for message in later]
        assert all(left != right for left, right in pairwise(roles))
        assert (len(later), roles[-1]) == (len(before) + 2, "user")


def test_a_stream_asks_for_its_chunks(work, model):
    load = work.Load("a", 100, 1, 1, 1, chunks=64)
    (wave,) = work.Chats(model, 1).waves(load)
    body = msgspec.json.decode(wave.first[0])
    assert (body["stream"], body["max_tokens"]) == (True, 64)


def test_a_shorter_load_still_fills_its_connections(work):
    shorter = work.Load("a", 100, 64, 8192, 1024).shorter(1000)
    assert (shorter.requests, shorter.wave) == (256, 256)
