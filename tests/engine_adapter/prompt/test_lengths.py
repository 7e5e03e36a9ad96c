"""Texts that cannot fit are refused before they are encoded whole."""

import pytest

from engine_adapter.prompt.encoders import CannotFit, check_fits


class Encoder:
    """One token for each `size` characters."""

    def __init__(self, size):
        self.size, self.chars = size, 0

    def __call__(self, text):
        self.chars += len(text)
        return range(len(text) // self.size)


@pytest.mark.parametrize(
    ("texts", "limit", "size", "encoded"),
    [
        (["a" * 40_000, "b" * 40_000], 10_000, 1, 0),
        (["a" * 65_536], 100, 1, 0),
        (["a" * 1_000_000], None, 1, 0),
        (["a" * 90_000], 1000, 100, 90_000),
    ],
    ids=["usual texts", "a short text", "no limit", "a long text of few tokens"],
)
def test_what_fits_or_is_short_is_not_looked_at_unless_it_is_long(texts, limit, size, encoded):
    encode = Encoder(size)
    check_fits(texts, limit, encode)
    assert encode.chars == encoded


@pytest.mark.parametrize(
    ("texts", "limit", "size", "tokens", "encoded"),
    [
        (["a" * 256_000, "b" * 1000], 1000, 200, range(1003, 1004), 0),
        (["a" * 20_000_000], 100_000, 1, range(100_001, 200_001), 200_000),
        (["a" * 100] * 900, 1000, 1, range(1001, 90_001), 90_000),
    ],
    ids=["too many characters", "a long text", "many short texts"],
)
def test_what_cannot_fit_is_refused_without_much_work(texts, limit, size, tokens, encoded):
    encode = Encoder(size)
    with pytest.raises(CannotFit) as error:
        check_fits(texts, limit, encode)
    assert error.value.tokens in tokens
    assert encode.chars <= encoded
