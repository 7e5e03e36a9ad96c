"""One saved prefix: its file as llama-server writes it, its record, and which of several is worth least."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from engine_adapter.types import Tier, TokenIds, common_prefix

# --- state file -----------------------------------------------------------------------------------------
# One file that llama-server saved from a slot: reads its tokens, hashes it, copies it with a check.
#
# In 32-bit words of the machine's byte order (read and observed on llama.cpp 0c1e57098):
#
#     0x67677371 · 3 · n · n words · KV to the end of the file
#
# The n words are `-1 · 1 · t · t token ids · m · m positions of media · media`, or plain token ids in files
# of older servers. The KV has no length and no checksum of its own. A file is whole if it has the size that
# the server reported, and undamaged if its checksum has not changed since.
#
# Functions raise StateFileError for a file that is gone, damaged or cannot be used, and for a target that
# cannot be written.

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


# --- saved entry ----------------------------------------------------------------------------------------
# One saved prefix: its record on disk, its state in the registry, and which of several is worth least.

KEPT_SHARE = 0.5  # of a tier, at most, is retained for clients
_HALF_LIFE_S = 1800.0  # an unused saved prefix loses half of its value in this time

Stamp = tuple[int, int, int]  # inode, bytes, mtime in ns: the same file with the same content
Work = asyncio.Task[Any]


class Sidecar(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """kvpin's record of a saved file. It has no prompt content, and only a digest of the salt.

    Attributes:
        key: fingerprint of model and stream layout; a server restores only its own key.
        salt: `salt_digest` of the cache salt of the content.
        checksum: xxh3_64 of the file.
        created: seconds since the epoch, as all times here.
        last_used: time of its last restore or write.
        uses: restores of it and of entries it replaced.
        kept_until: a client retains it until then: it is evicted after others, as far as `kept` says. In
            JSON, null stands for infinity.
        kept_for: digest of that client's tenant.
    """

    format: int
    key: str
    salt: str | None
    count: int = msgspec.field(name="tokens")
    size: int
    checksum: int
    created: float
    last_used: float
    uses: int
    kept_until: float = 0.0
    kept_for: str | None = None


class Saved(Sidecar, kw_only=True, eq=False):
    """One saved prefix.

    Attributes:
        name: file name, the same in either tier.
        pinned_until: it is not evicted before this time.
        seen: stamp of the file whose bytes were hashed in this process.
        retry_at: it is not restored before this time, because it could not be read.
        holds: restores that use it now; its files stay until they end.
    """

    name: str
    tokens: TokenIds[int] = msgspec.field(name="token_ids")
    tier: Tier = Tier.HOST
    pinned_until: float = 0.0
    seen: Stamp | None = None
    retry_at: float = 0.0
    holds: int = 0
    work: Work | None = None

    def __repr__(self) -> str:
        return f"Saved({self.name!r})"  # its tokens are secret

    @property
    def is_busy(self) -> bool:
        """True if a file operation is running."""
        return self.work is not None and not self.work.done()

    async def idle(self) -> None:
        """Waits until no file operation is running."""
        while self.work is not None and not self.work.done():
            await asyncio.wait({self.work})

    def shared(self, tokens: TokenIds[int], salt: str | None) -> int:
        """Number of leading tokens of `tokens` that it holds under `salt`."""
        return common_prefix(self.tokens, tokens) if self.salt == salt else 0

    def sidecar(self) -> bytes:
        """The content of its sidecar."""
        return msgspec.json.encode(msgspec.convert(self, Sidecar, from_attributes=True))


class SavedEvent(StrEnum):
    """An event in the life of an entry."""

    ADDED = "added"
    MOVED = "moved"  # to `Saved.tier`
    REMOVED = "removed"  # from its tier


Listener = Callable[[SavedEvent, Saved], None]


def salt_digest(salt: str | None) -> str | None:
    """The digest that stands for a cache salt in the registry and on disk; None for no salt."""
    if salt is None:
        return None
    data = salt.encode(errors="surrogatepass")
    return blake2b(data, digest_size=16, person=b"kvpin-salt").hexdigest()


def value(saved: Saved, now: float) -> float:
    """The value per byte: tokens it spares, times its uses plus one, halved every half hour without use."""
    return saved.count / saved.size * (1 + saved.uses) * recency(now - saved.last_used, _HALF_LIFE_S)


def recency(age_s: float, half_life_s: float) -> float:
    """1 right after a use, halved every half-life. A use in the future counts as now."""
    return float(0.5 ** (max(age_s, 0.0) / half_life_s))


def kept(entries: Iterable[Saved], room: int, now: float) -> set[Saved]:
    """The entries that count as retained: those that clients retain, up to KEPT_SHARE of `room` bytes.

    Tenants take turns, the one with the fewest bytes so far first; each gets its last used entry first.
    """
    wanted: dict[str | None, list[Saved]] = {}
    for saved in sorted(entries, key=lambda each: each.last_used):
        if saved.kept_until > now:
            wanted.setdefault(saved.kept_for, []).append(saved)
    chosen: set[Saved] = set()
    used = dict.fromkeys(wanted, 0)
    left = KEPT_SHARE * room
    while wanted:
        owner = min(wanted, key=lambda each: used[each])
        saved = wanted[owner].pop()
        if saved.size > left or not wanted[owner]:
            del wanted[owner]
        if saved.size <= left:
            chosen.add(saved)
            used[owner] += saved.size
            left -= saved.size
    return chosen


def least_valuable(entries: Iterable[Saved], size: int, room: int, now: float) -> list[Saved] | None:
    """The entries of least value that together hold `size` bytes of a tier of `room` bytes.

    None if too few may go. Entries that are pinned, in use, or worked on stay; retained ones go last.
    """
    entries = tuple(entries)
    free = [saved for saved in entries if saved.pinned_until <= now and not saved.holds and not saved.is_busy]
    staying = kept(entries, room, now)
    victims: list[Saved] = []
    for saved in sorted(free, key=lambda each: (each in staying, value(each, now))):
        if size <= 0:
            break
        victims.append(saved)
        size -= saved.size
    return None if size > 0 else victims
