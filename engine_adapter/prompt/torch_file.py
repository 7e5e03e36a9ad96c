"""Reads one tensor that `torch.save` wrote, without running its pickle.

Such a file is a zip archive: a pickle says what the tensor is like, and another entry holds its bytes. The
pickle of a plain dense tensor always has the same instructions. They are compared, never carried out: a file
with any other instruction is not read.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from dataclasses import dataclass, field

# Bytes of each element, by the name of the storage.
_SIZES = {
    "torch DoubleStorage": 8,
    "torch FloatStorage": 4,
    "torch HalfStorage": 2,
    "torch BFloat16Storage": 2,
}
_PICKLE = "/data.pkl"
_PICKLE_BYTES = 4096  # a plain tensor's has about 150
_MEMO = frozenset({"PROTO", "BINPUT", "LONG_BINPUT"})
_INT = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
_FAULTS = (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, ValueError, KeyError, RuntimeError)


class NotPlainTensor(ValueError):
    """The file is not a dense tensor of floating-point numbers as `torch.save` writes it today."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor of two dimensions."""

    count: int
    row_bytes: int
    values: memoryview = field(repr=False)


def read_rows(content: bytes) -> Rows:
    """The rows of a 2-d tensor, or of a 3-d tensor with one entry in its first dimension. Raises
    NotPlainTensor if it is something else, or its rows do not lie one after another."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read(archive)
    except _FAULTS as error:
        raise NotPlainTensor(str(error)) from error


def _read(archive: zipfile.ZipFile) -> Rows:
    pickles = [entry for entry in archive.infolist() if entry.filename.endswith(_PICKLE)]
    if len(pickles) != 1:
        raise NotPlainTensor("it has no pickle, or several")
    folder = pickles[0].filename.removesuffix(_PICKLE)
    storage, key, offset, shape, strides = _layout(_stored(archive, pickles[0], _PICKLE_BYTES))
    order = f"{folder}/byteorder"
    if order in archive.namelist() and _stored(archive, archive.getinfo(order), len("little")) != b"little":
        raise NotPlainTensor("its numbers are big-endian")
    if len(shape) == 3 and shape[0] == 1:  # noqa: PLR2004 - a batch of one
        shape, strides = shape[1:], strides[1:]
    if len(shape) != 2 or 0 in shape or strides != (shape[1], 1):  # noqa: PLR2004 - rows and columns
        raise NotPlainTensor("its rows do not lie one after another")
    size = _SIZES[storage]
    entry = archive.getinfo(f"{folder}/data/{key}")
    values = memoryview(_stored(archive, entry, entry.compress_size))
    first, length = offset * size, math.prod(shape) * size
    if first < 0 or first + length > len(values):
        raise NotPlainTensor("it is larger than its storage")
    return Rows(shape[0], shape[1] * size, values[first : first + length])


def _stored(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes:
    """The bytes of an entry. `torch.save` compresses none, so that none takes more memory than the file."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise NotPlainTensor(f"{entry.filename} is compressed, or too large")
    return archive.read(entry)


def _layout(pickle: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Storage class and key, offset, shape and strides, in elements, from a tensor's pickle."""
    steps = [
        ("INT" if op.name in _INT else op.name, argument)
        for op, argument, _ in pickletools.genops(pickle)
        if op.name not in _MEMO
    ]
    match steps:
        case [
            ("GLOBAL", "torch._utils _rebuild_tensor_v2"),
            ("MARK", None),
            ("MARK", None),
            ("BINUNICODE", "storage"),
            ("GLOBAL", str(storage)),
            ("BINUNICODE", str(key)),
            ("BINUNICODE", _),
            ("INT", _),
            ("TUPLE", None),
            ("BINPERSID", None),
            ("INT", int(offset)),
            *numbers,
            ("NEWFALSE" | "NEWTRUE", None),
            ("GLOBAL", "collections OrderedDict"),
            ("EMPTY_TUPLE", None),
            ("REDUCE", None),
            ("TUPLE", None),
            ("REDUCE", None),
            ("STOP", None),
        ]:
            return storage, key, offset, *_shape(numbers)
        case _:
            raise NotPlainTensor("it is no plain tensor")


def _shape(steps: list[tuple[str, object]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides: the integers of each, and then how many these are."""
    n = len(steps) // 2 - 1
    made = [("INT", argument) for _, argument in steps[:n]] + [(f"TUPLE{n}", None)]
    made += [("INT", argument) for _, argument in steps[n + 1 : -1]] + [(f"TUPLE{n}", None)]
    if steps != made:
        raise NotPlainTensor("it is no plain tensor")
    numbers = [int(str(argument)) for name, argument in steps if name == "INT"]
    return tuple(numbers[:n]), tuple(numbers[n:])
