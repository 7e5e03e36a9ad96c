"""Loads of router_cost.py: lengths, waves, and next turns that continue their chats."""

from itertools import pairwise

import msgspec
import pytest
from tokenizers import Tokenizer


@pytest.fixture
def model():
    from large_tokenizer import DEFAULT_MODEL

    return DEFAULT_MODEL


def tokens_of(model, body):
    text = "".join(message["content"] for message in body["messages"])
    return len(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


def test_chats_have_the_length_asked_for_and_differ(script, model):
    (wave,) = script.Chats(model, 1).waves(script.Load("a", 300, 1, 4, 4))
    found = [tokens_of(model, msgspec.json.decode(body)) for body in wave.first]
    assert sum(found) / 4 == pytest.approx(300, rel=0.3)
    assert len(set(wave.first)) == 4


def test_a_next_turn_continues_its_chat(script, model):
    waves = list(script.Chats(model, 1).waves(script.Load("a", 2000, 1, 5, 2)))
    assert [len(wave.first) for wave in waves] == [2, 2, 1]
    for first, after in zip(waves[0].first, waves[0].next, strict=True):
        before, later = msgspec.json.decode(first)["messages"], msgspec.json.decode(after)["messages"]
        assert later[: len(before)] == before
        roles = [message["role"] for message in later]
        assert all(left != right for left, right in pairwise(roles))
        assert (len(later), roles[-1]) == (len(before) + 2, "user")


def test_a_shorter_load_still_fills_its_connections(script):
    shorter = script.Load("a", 100, 64, 8192, 1024).shorter(1000)
    assert (shorter.requests, shorter.wave) == (256, 256)
