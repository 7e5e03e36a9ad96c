import pytest

from proxy.replay.units import AmountError, parse_amount, parse_count, parse_tokens


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("12", (12, False)),
        ("500k", (500_000, False)),
        ("1.5M", (1_500_000, False)),
        ("2G", (2_000_000_000, False)),
        ("64 GiB", (64 << 30, True)),
        ("128KiB", (128 << 10, True)),
        ("3kb", (3000, True)),
        ("7B", (7, True)),
        ("1TB", (10**12, True)),
    ],
)
def test_amounts(text, amount):
    assert parse_amount(text) == amount


@pytest.mark.parametrize("text", ["", "k", "-1", "1e6", "5 apples", "1,000"])
def test_what_is_no_amount(text):
    with pytest.raises(AmountError, match="is not an amount; write 500k"):
        parse_amount(text)


@pytest.mark.parametrize("text", ["9" * 400, "1" + "0" * 300 + "G"])
def test_what_nobody_can_count(text):
    with pytest.raises(AmountError, match=r"^'\d{12}'… is too large$"):
        parse_amount(text)


def test_counts_are_not_of_bytes():
    assert parse_count("20k") == 20_000
    with pytest.raises(AmountError, match="'1MB' is in bytes"):
        parse_count("1MB")


def test_tokens_may_be_given_in_bytes():
    assert parse_tokens("2M", None) == 2_000_000
    assert parse_tokens("1GiB", 128 << 10) == 8192
    with pytest.raises(AmountError, match="give --bytes-per-token"):
        parse_tokens("1GiB", None)
