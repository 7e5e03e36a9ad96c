"""One file that llama-server saved from a slot: reads its tokens, hashes it, copies it with a check.

In 32-bit words of the machine's byte order (read and observed on llama.cpp 0c1e57098):

    0x67677371 · 3 · n · n words · KV to the end of the file

The n words are `-1 · 1 · t · t token ids · m · m positions of media · media`, or plain token ids in files of
older servers. The KV has no length and no checksum of its own. A file is whole if it has the size that the
server reported, and undamaged if its checksum has not changed since.

Functions raise StateFileError for a file that is gone, damaged or cannot be used, and for a target that
cannot be written.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from engine_adapter.types import TokenIds

_MAGIC, _VERSION, _TOKENS_VERSION = 0x67677371, 3, 1
_HEAD = struct.Struct("=III")
_FRAMED, _MIN_FRAME = -1, 4  # a word that is no token id; the words of a frame without tokens and media
_CHUNK = 1 << 20  # bytes per read: the fastest measured, and enough for xxhash to release the GIL
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileFault(StrEnum):
    """The fault of a saved file, or of its target."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    MEDIA = "media"
    TOKENS = "tokens"
    SIZE = "size"
    CHECKSUM = "checksum"
    SIDECAR = "sidecar"
    FOREIGN = "foreign"  # another version of kvpin wrote it
    NO_ROOM = "no_room"  # the target: no room for the file, or for a copy of it
    UNWRITABLE = "unwritable"  # the target: the directory takes no files


_DAMAGE = frozenset(
    {
        FileFault.TRUNCATED,
        FileFault.MAGIC,
        FileFault.TOKENS,
        FileFault.SIZE,
        FileFault.CHECKSUM,
        FileFault.SIDECAR,
    }
)


class StateFileError(Exception):
    """A saved file cannot be used, written or moved; the text is one sentence with its path."""

    def __init__(self, path: Path, reason: FileFault, detail: str) -> None:
        super().__init__(f"saved prefix {path}: {detail}")
        self.reason = reason

    @property
    def is_damage(self) -> bool:
        """True if the file is proven damaged. Any other file may be sound and is not deleted."""
        return self.reason in _DAMAGE


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError of reading `path` into a StateFileError."""
    try:
        yield
    except OSError as error:
        reason = FileFault.MISSING if error.errno == errno.ENOENT else FileFault.UNREADABLE
        raise StateFileError(path, reason, f"it cannot be read: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of writing `path` into a StateFileError."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StateFileError(
                path, FileFault.NO_ROOM, f"there is no room to write it: {error.strerror}"
            ) from error
        raise StateFileError(path, FileFault.UNWRITABLE, f"it cannot be written: {error.strerror}") from error


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """The file to write, which gets the name `target` at the end. After an error no part of it is left."""
    part = target.with_name(f"{target.name}.part")
    try:
        with writing(target):
            yield part
            part.replace(target)
    except StateFileError:
        with suppress(OSError):
            part.unlink()
        raise


def read_tokens(path: Path) -> TokenIds[int]:
    """The token ids whose KV a saved file holds; reads only its header."""
    regular_file(path)
    with reading(path), path.open("rb") as file:
        words = _read_words(path, file)
    tokens = words if not words or words[0] != _FRAMED else _unframe(path, words)
    if tokens and min(tokens) < 0:
        raise StateFileError(path, FileFault.TOKENS, f"token id {min(tokens)} among its tokens is below 0")
    return tokens


def checksum(path: Path) -> int:
    """xxh3_64 of the whole file; reading and hashing release the GIL."""
    regular_file(path)
    digest = xxhash.xxh3_64()
    with reading(path), path.open("rb", buffering=0) as file:
        for chunk in _chunks(path, file):
            digest.update(chunk)
    return digest.intdigest()


def copy(source: Path, target: Path) -> int:
    """Copies a saved file, whole or not at all; returns the checksum of the bytes that were copied."""
    regular_file(source)
    digest = xxhash.xxh3_64()
    with (
        reading(source),
        source.open("rb", buffering=0) as file,
        written_whole(target) as part,
        part.open("wb", buffering=0) as copied,
    ):
        for chunk in _chunks(source, file):
            digest.update(chunk)
            _write_all(copied, chunk)
    return digest.intdigest()


def regular_file(path: Path) -> os.stat_result:
    """The status of `path`. Callers check it before they open a file: opening a FIFO waits."""
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StateFileError(path, FileFault.UNREADABLE, "it is not a regular file")
    return status


def _chunks(path: Path, file: FileIO) -> Iterator[memoryview]:
    """The rest of `file` in views of one buffer; each view is valid until the next."""
    buffer = memoryview(bytearray(_CHUNK))
    while True:
        with reading(path):
            count = file.readinto(buffer)
        if not count:
            return
        yield buffer[:count]


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _read_words(path: Path, file: BinaryIO) -> TokenIds[int]:
    """The words of the header's token list."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise StateFileError(path, FileFault.TRUNCATED, f"{len(head)} bytes are less than a header")
    magic, version, count = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise StateFileError(path, FileFault.MAGIC, f"it starts with {magic:#010x}, not {_MAGIC:#010x}")
    if version != _VERSION:
        raise StateFileError(path, FileFault.VERSION, f"format version {version}, known is {_VERSION}")
    words: TokenIds[int] = array("i")
    wanted = count * words.itemsize
    data = file.read(min(wanted, size))
    if len(data) < wanted:
        raise StateFileError(path, FileFault.TRUNCATED, f"{size} bytes are less than its {count} token words")
    words.frombytes(data)
    return words


def _unframe(path: Path, words: TokenIds[int]) -> TokenIds[int]:
    """The tokens between the frame's `-1 · 1 · t` and its `m`."""
    if len(words) < _MIN_FRAME:
        raise StateFileError(path, FileFault.TOKENS, f"{len(words)} words are less than a frame of tokens")
    version, count = words[1], words[2]
    if version != _TOKENS_VERSION:
        raise StateFileError(
            path, FileFault.VERSION, f"token list version {version}, known is {_TOKENS_VERSION}"
        )
    if not 0 <= count <= len(words) - _MIN_FRAME:
        raise StateFileError(path, FileFault.TOKENS, f"{count} tokens do not fit {len(words)} words")
    if words[3 + count] != 0:
        raise StateFileError(
            path, FileFault.MEDIA, "it holds images or audio, which its tokens do not identify"
        )
    if len(words) != _MIN_FRAME + count:
        raise StateFileError(path, FileFault.TOKENS, f"{len(words)} words for {count} tokens are too many")
    return words[3 : 3 + count]
