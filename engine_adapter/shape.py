"""The shape of JSON, counted before it is decoded.

Decoding takes time and memory for each value, more than for each byte: 51 MiB of `[],` took 9 s and 1.8 GB.
Here a body is read in pieces, with a few C calls for each. Between pieces, other threads may run.
"""

from __future__ import annotations

from typing import NamedTuple

# To decode as many takes up to 100 ms, in which no other Python code runs. A prompt of a million token ids
# has a million values; 128 tools with 500 fields each have half of the fields.
MOST_VALUES = 1_200_000
MOST_FIELDS = 131_072
MOST_TEXT = 16 << 20

# Bytes of a piece: the worst ones take 0.3 ms.
_PIECE = 16_384
_OPENING_ALONE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))


class Shape(NamedTuple):
    """The size of a body in values and fields: what its decoding costs.

    Attributes:
        values: entries of lists and objects.
        fields: fields of objects, and the lists and objects themselves; they cost ten times as much.
        text: bytes that are no data. Data are long strings without spaces, escapes and letters beyond ASCII,
            such as base64.
    """

    values: int = MOST_VALUES
    fields: int = MOST_FIELDS
    text: int = MOST_TEXT

    def above(self, most: Shape) -> str | None:
        """The first attribute that is above `most`; None if none is."""
        return next((name for name in self._fields if getattr(self, name) > getattr(most, name)), None)


def shape_of(raw: bytes, most: Shape) -> Shape:
    """The shape of a JSON text; of one above `most`, only as far as it was read. JSON that is wrong has the
    shape that a decoder would find up to the fault."""
    values = fields = text = inside = 0
    kept = b""
    for start in range(0, len(raw), _PIECE):
        piece = kept + raw[start : start + _PIECE]
        size, has_escapes = len(piece), b"\\" in piece
        if has_escapes:
            piece = piece.replace(b"\\\\", b"")
            kept = b"\\" if piece.endswith(b"\\") else b""  # it escapes the next piece's first byte
            piece = piece.replace(b'\\"', b"")
        else:
            kept = b""
        strings = piece.split(b'"')
        is_data = inside and len(strings) == 1 and not has_escapes and b" " not in piece and piece.isascii()
        text += 0 if is_data else size
        outside = b"".join(strings[inside::2])
        inside = (inside + len(strings) - 1) & 1
        values += outside.count(b",")
        fields += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        found = Shape(values, fields, text)
        if found.above(most) is not None:
            return found
    return Shape(values, fields, text)


def is_deeper(raw: bytes, levels: int) -> bool:
    """True if lists and objects of a JSON text lie more than `levels` deep within each other."""
    if raw.count(b"[") + raw.count(b"{") <= levels:
        return False
    strings = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    brackets = b"".join(strings[::2]).translate(_OPENING_ALONE, _NO_BRACKETS)
    for _ in range(levels):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # all that hold no others
    return bool(brackets)
