"""The metadata at the head of a GGUF file, read without the tensors that follow it.

    "GGUF" · version (u32) · number of tensors (u64) · number of entries (u64) · entries
    entry: name (u64 length, bytes) · type (u32) · value

All numbers are little-endian. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_BYTES = 256 << 20  # of one value: a length beyond it is damage


class GgufError(ValueError):
    """A file that is no GGUF, or a damaged one; the text says what is wrong with it."""


def read_metadata(path: Path) -> dict[str, Any]:
    """All entries by name: numbers, strings, and lists of them.

    Raises:
        GgufError: it is not a GGUF that can be read.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise GgufError("it is no GGUF file")
        reader = _Reader(file)
        version = reader.number("I")
        if version not in _VERSIONS:
            raise GgufError(f"version {version} of GGUF is not known")
        reader.number("Q")
        entries = reader.number("Q")
        found = {}
        for _ in range(entries):
            name = reader.string()
            found[name] = reader.value()
        return found


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def number(self, code: str) -> Any:  # noqa: ANN401 - as the code has it
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        """A string; bytes that are not UTF-8 are kept as surrogates."""
        return self._bytes(self.number("Q")).decode(errors="surrogateescape")

    def value(self) -> Any:  # noqa: ANN401 - as the file has it
        """A type, and a value of that type."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._reader_of(kind)(1)[0]
        item = self.number("I")
        return self._reader_of(item)(self.number("Q"))

    def _reader_of(self, kind: int) -> Callable[[int], list[Any]]:
        if kind == _STRING:
            return lambda count: [self.string() for _ in range(count)]
        code = _NUMBERS.get(kind)
        if code is None:
            raise GgufError(f"type {kind} of a value is not known")
        return lambda count: self._numbers(code, count)

    def _numbers(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize(f"<{code}")
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * size)))

    def _bytes(self, length: int) -> bytes:
        raw = self._file.read(length) if length <= _MOST_BYTES else b""
        if len(raw) != length:
            raise GgufError("the file ends within its metadata")
        return raw
