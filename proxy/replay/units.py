"""Amounts as people write them: 500k and 2M tokens, 64GiB, 128KiB."""

from __future__ import annotations

import re
from math import isfinite

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BYTES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SHOWN = 12  # characters of an amount that goes on and on
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class AmountError(ValueError):
    """An amount that cannot be read; the message says what would do."""


def parse_amount(text: str) -> tuple[int, bool]:
    """The number, and whether it is one of bytes. `k`, `M` and `G` count, `kB` and `KiB` measure.

    Raises:
        AmountError: for anything else.
    """
    matched = _AMOUNT.fullmatch(text.strip())
    if matched is not None:
        unit = matched[2].lower()
        factor = _FACTORS.get(unit, _BYTES.get(unit))
        if factor is not None:
            number = float(matched[1]) * factor
            if not isfinite(number):
                raise AmountError(f"{text[:_SHOWN]!r}… is more than can be counted")
            return round(number), unit in _BYTES
    raise AmountError(f"{text!r} is no amount: write it like 500k, 2M or 64GiB")


def parse_count(text: str) -> int:
    """A number that is none of bytes.

    Raises:
        AmountError: for anything else.
    """
    number, of_bytes = parse_amount(text)
    if of_bytes:
        raise AmountError(f"{text!r} is an amount of bytes; it takes one like 500k or 2M")
    return number


def parse_tokens(text: str, bytes_per_token: int | None) -> int:
    """Tokens, given as such or as the bytes that their KV takes.

    Raises:
        AmountError: for anything else, or bytes without `bytes_per_token`.
    """
    number, of_bytes = parse_amount(text)
    if not of_bytes:
        return number
    if not bytes_per_token:
        raise AmountError(f"{text!r} is an amount of bytes: say --bytes-per-token, e.g. 128KiB")
    return number // bytes_per_token
