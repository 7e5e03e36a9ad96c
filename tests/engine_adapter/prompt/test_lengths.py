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
    ("texts", "limit"),
    [(["a" * 40_000, "b" * 40_000], 10_000), (["a" * 65_536], 100), (["a" * 1_000_000], None)],
    ids=["usual texts", "a short text", "no limit"],
)
def test_what_fits_or_is_short_is_not_looked_at(texts, limit):
    encode = Encoder(1)
    check_fits(texts, limit, encode)
    assert encode.chars == 0


def test_too_many_characters_are_refused_without_work():
    encode = Encoder(200)
    with pytest.raises(CannotFit) as error:
        check_fits(["a" * 256_000, "b" * 1000], 1000, encode)
    assert (error.value.tokens, encode.chars) == (1003, 0)


def test_a_long_text_is_encoded_up_to_the_limit():
    encode = Encoder(1)
    with pytest.raises(CannotFit) as error:
        check_fits(["a" * 20_000_000], 100_000, encode)
    assert 100_000 < error.value.tokens <= 200_000
    assert encode.chars <= 200_000


def test_many_short_texts_count_together():
    with pytest.raises(CannotFit):
        check_fits(["a" * 100] * 900, 1000, Encoder(1))


def test_a_long_text_of_few_tokens_fits():
    encode = Encoder(100)
    check_fits(["a" * 90_000], 1000, encode)
    assert encode.chars == 90_000
