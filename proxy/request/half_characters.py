"""Halves of characters in JSON: clients cut texts within an emoji, and send the half again with each later
request of the conversation. No tokenizer takes it."""

from __future__ import annotations

import re
from collections.abc import Iterator

HALF_CHARACTERS = "half_characters"
"""The name of this change, as the client is told of it."""
# Half of a character that UTF-16 writes as two, and the second half behind its `\u`.
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SECOND = re.compile(rb"[dD][c-fC-F][0-9a-fA-F]{2}")
_FIRST_DIGITS = b"89abAB"
_HALF_BYTES, _REPLACEMENT = 6, rb"\ufffd"
# The arguments of a tool call: JSON in a string. Within another string, a backslash precedes the quotes.
_ARGUMENTS = re.compile(rb'"arguments"\s*:\s*"')
_BACKSLASH = b"\\"


def whole_characters(raw: bytes) -> bytes:
    """JSON in which each half of a character is U+FFFD; `raw` itself if there is none.

    The arguments of a tool call are JSON in a string, which templates read: halves are looked for there, too.
    """
    halves = [*_halves(raw, 0, len(raw), 1)]
    for found in _ARGUMENTS.finditer(raw) if rb"\\u" in raw else ():
        if raw[found.start() - 1] != ord(_BACKSLASH):
            halves += _halves(raw, found.end(), _end_of_string(raw, found.end()), 2)
    if not halves:
        return raw
    pieces, end = list[bytes](), 0
    for at in sorted(halves):
        pieces += (raw[end:at], _REPLACEMENT)
        end = at + _HALF_BYTES
    return b"".join([*pieces, raw[end:]])


def _halves(raw: bytes, start: int, stop: int, level: int) -> Iterator[int]:
    """Where halves of characters begin. In JSON, `level` 1, one backslash begins an escape; in JSON within a
    string, level 2, these are two."""
    end = start
    for found in _HALF.finditer(raw, start, stop):
        at = found.start()
        if at < end:  # the second half of a whole character
            continue
        run, end = _n_backslashes(raw[end : at + 1]), at + _HALF_BYTES
        if run % (2 * level) != level:
            continue
        second = end + level + 1
        is_first = raw[at + 3] in _FIRST_DIGITS
        if is_first and raw[end:second] == level * _BACKSLASH + b"u" and _SECOND.match(raw, second, stop):
            end = second + _HALF_BYTES - 2
        else:
            yield at


def _end_of_string(raw: bytes, start: int) -> int:
    """Where a string ends whose first character is at `start`."""
    at = start
    while (quote := raw.find(b'"', at)) >= 0 and _n_backslashes(raw[at:quote]) % 2:
        at = quote + 1
    return quote if quote >= 0 else len(raw)


def _n_backslashes(text: bytes) -> int:
    """How many backslashes `text` ends with."""
    return len(text) - len(text.rstrip(_BACKSLASH))
