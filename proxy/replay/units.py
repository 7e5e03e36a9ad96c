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
_SHOWN = 12  # characters that are shown of a very long amount
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class AmountError(ValueError):
    """An amount cannot be read; the message says how to write it."""


def parse_amount(text: str) -> tuple[int, bool]:
    """The number, and whether it is in bytes: `k`, `M` and `G` are plain, `kB` and `KiB` are bytes. Raises
    AmountError if the text is not an amount."""
    matched = _AMOUNT.fullmatch(text.strip())
    if matched is not None:
        unit = matched[2].lower()
        factor = _FACTORS.get(unit, _BYTES.get(unit))
        if factor is not None:
            number = float(matched[1]) * factor
            if not isfinite(number):
                raise AmountError(f"{text[:_SHOWN]!r}… is too large")
            return round(number), unit in _BYTES
    raise AmountError(f"{text!r} is not an amount; write 500k, 2M or 64GiB")


def parse_count(text: str) -> int:
    """A number that is not in bytes. Raises AmountError if the text is no such number."""
    number, of_bytes = parse_amount(text)
    if of_bytes:
        raise AmountError(f"{text!r} is in bytes; write a count like 500k or 2M")
    return number


def parse_tokens(text: str, bytes_per_token: int | None) -> int:
    """Tokens, written as a count or as the bytes of their KV. Raises AmountError if the text is neither, or
    is in bytes without `bytes_per_token`."""
    number, of_bytes = parse_amount(text)
    if not of_bytes:
        return number
    if not bytes_per_token:
        raise AmountError(f"{text!r} is in bytes: give --bytes-per-token, such as 128KiB")
    return number // bytes_per_token
