"""The files of saved prefixes: as llama-server writes them, kvpin's record of each, checks, moves, deletion.

    kvpin-<key>-<unique>.bin    what llama-server saved
    kvpin-<key>-<unique>.json   its sidecar: kvpin's record of it; without one the file is no entry
    ….part                      one of them while it is written

A saved file, in 32-bit words of the machine's byte order (read and observed on llama.cpp 0c1e57098):

    0x67677371 · 3 · n · n words · KV to the end of the file

The n words are `-1 · 1 · t · t token ids · m · m positions of media · media`, or plain token ids in files of
older servers. The KV has no length and no checksum of its own. A file is whole if it has the size that the
server reported, and undamaged if its checksum has not changed since.

Everything here blocks and is called in a thread. Files with other names are never touched. Functions raise
StateFileError for a file or a directory that cannot be used.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import os
import re
import secrets
import stat
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from enum import StrEnum
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from engine_adapter.types import Tier, TokenIds, common_prefix

FORMAT = 1  # of sidecars
KEPT_SHARE = 0.5  # of a tier, at most, is retained for clients
_MOUNTS = Path("/proc/self/mounts")
GRACE_S = 600.0  # a file without its sidecar stays this long: another process may be working on it

_log = logging.getLogger("kvpin.llama_server")
_OWN = re.compile(r"(kvpin-([0-9A-Za-z]{1,128})-[0-9a-f]{32})(\.bin|\.json|\.bin\.part|\.json\.part)")
_KEY = re.compile(r"[0-9A-Za-z]{1,128}")
_MAGIC, _VERSION, _TOKENS_VERSION = 0x67677371, 3, 1
_HEAD = struct.Struct("=III")
_FRAMED, _MIN_FRAME = -1, 4  # a word that is no token id; the words of a frame without tokens and media
_CHUNK = 1 << 20  # bytes per read: the fastest measured, and enough for xxhash to release the GIL
_OTHER_BYTES = "its bytes are not those that were saved"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Stamp = tuple[int, int, int]  # inode, bytes, mtime in ns: the same file with the same content
Work = asyncio.Task[Any]


# --- an entry, and which of several is worth least -----------------------------------------------------


class Sidecar(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """kvpin's record of a saved file. It has no prompt content, and only a digest of the salt."""

    format: int
    key: str  # fingerprint of model and stream layout; a server restores only its own key
    salt: str | None  # `salt_digest` of the cache salt of the content
    count: int = msgspec.field(name="tokens")
    size: int
    checksum: int  # xxh3_64 of the file
    created: float  # seconds since the epoch, as all times here
    last_used: float  # time of its last restore or write
    uses: int  # restores of it and of entries it replaced
    # A client retains it until then: it is evicted after others, as far as `kept` says. In JSON, null stands
    # for infinity.
    kept_until: float = 0.0
    kept_for: str | None = None  # digest of that client's tenant


class Saved(Sidecar, kw_only=True, eq=False):
    """One saved prefix."""

    name: str  # file name, the same in either tier
    tokens: TokenIds[int] = msgspec.field(name="token_ids")
    tier: Tier = Tier.HOST
    # Until when which engine wants it kept. Servers that share a directory share its prefixes.
    pins: dict[str, float] = msgspec.field(default_factory=dict)
    seen: Stamp | None = None  # stamp of the file whose bytes were hashed in this process
    retry_at: float = 0.0  # it is not restored before this time, because it could not be read
    is_gone: bool = False  # its file was not where it belongs
    holds: int = 0  # restores that use it now; its files stay until they end
    work: Work | None = None

    @property
    def pinned_until(self) -> float:
        """It is not evicted before this time."""
        return max(self.pins.values(), default=0.0)

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
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=16, person=b"kvpin-salt").hexdigest()


def kept(entries: Iterable[Saved], room: int, now: float) -> set[Saved]:
    """The entries that count as retained: those that clients retain, up to KEPT_SHARE of `room` bytes.
    Tenants take turns, the one with the fewest bytes so far first; each gets its last used entry first."""
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


def least_valuable(
    entries: Iterable[Saved], size: int, room: int, now: float, value: Callable[[Saved], tuple[float, float]]
) -> list[Saved] | None:
    """The entries of least `value` that together hold `size` bytes of a tier of `room` bytes. None if too few
    may go. Entries that are pinned, in use, or worked on stay; retained ones go last."""
    entries = tuple(entries)
    free = [saved for saved in entries if saved.pinned_until <= now and not saved.holds and not saved.is_busy]
    staying = kept(entries, room, now)
    victims: list[Saved] = []
    for saved in sorted(free, key=lambda each: (each in staying, value(each))):
        if size <= 0:
            break
        victims.append(saved)
        size -= saved.size
    return None if size > 0 else victims


# --- errors --------------------------------------------------------------------------------------------


class FileFault(StrEnum):
    """The fault of a saved file, or of its target. Only a damaged file is deleted: any other may be sound."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    DAMAGED = "damaged"  # it is not what was saved
    FOREIGN = "foreign"  # another version of kvpin or of llama-server wrote it, or it holds media
    NO_ROOM = "no_room"  # the target: no room for the file, or for a copy of it
    UNWRITABLE = "unwritable"  # the target: the directory takes no files


class StateFileError(Exception):
    """A saved file cannot be used, written or moved; the text is one sentence with its path."""

    def __init__(self, path: Path, reason: FileFault, detail: str) -> None:
        super().__init__(f"saved prefix {path}: {detail}")
        self.reason = reason


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
        is_full = error.errno in _NO_ROOM
        reason = FileFault.NO_ROOM if is_full else FileFault.UNWRITABLE
        what = "there is no room to write it" if is_full else "it cannot be written"
        raise StateFileError(path, reason, f"{what}: {error.strerror}") from error


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


# --- one file -------------------------------------------------------------------------------------------


def read_tokens(path: Path) -> TokenIds[int]:
    """The token ids whose KV a saved file holds; reads only its header."""
    regular_file(path)
    with reading(path), path.open("rb") as file:
        words = _read_words(path, file)
    tokens = words if not words or words[0] != _FRAMED else _unframe(path, words)
    lowest = min(tokens, default=0)
    _check(path, lowest >= 0, f"token id {lowest} among its tokens is below 0")
    return tokens


def checksum(path: Path) -> int:
    """xxh3_64 of the whole file; reading and hashing release the GIL."""
    regular_file(path)
    with reading(path), path.open("rb", buffering=0) as file:
        return _hashed(path, file)


def copy(source: Path, target: Path) -> int:
    """Copies a saved file, whole or not at all; returns the checksum of the bytes that were copied."""
    regular_file(source)
    with (
        reading(source),
        source.open("rb", buffering=0) as file,
        written_whole(target) as part,
        part.open("wb", buffering=0) as copied,
    ):
        return _hashed(source, file, copied)


def _hashed(path: Path, file: FileIO, copied: FileIO | None = None) -> int:
    """xxh3_64 of the rest of a file, which is also written to `copied`."""
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(_CHUNK))
    while True:
        with reading(path):
            count = file.readinto(buffer)
        if not count:
            return digest.intdigest()
        rest = buffer[:count]
        digest.update(rest)
        while copied is not None and rest:
            rest = rest[copied.write(rest) :]


def regular_file(path: Path) -> os.stat_result:
    """The status of `path`. Callers check it before they open a file: opening a FIFO waits."""
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise StateFileError(path, FileFault.UNREADABLE, "it is not a regular file")
    return status


def stamp(path: Path) -> Stamp:
    """The stamp of a file; raises StateFileError if it does not exist."""
    status = regular_file(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check(path: Path, is_right: bool, detail: str) -> None:
    if not is_right:
        raise StateFileError(path, FileFault.DAMAGED, detail)


def _check_count(path: Path, unit: str, found: int, expected: int | None) -> None:
    _check(path, expected in (None, found), f"{found} {unit}, of {expected} that were saved")


def _foreign(path: Path, detail: str) -> StateFileError:
    return StateFileError(path, FileFault.FOREIGN, detail)


def _read_words(path: Path, file: BinaryIO) -> TokenIds[int]:
    """The words of the header's token list."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    _check(path, len(head) == _HEAD.size, f"{len(head)} bytes are less than a header")
    magic, version, count = _HEAD.unpack(head)
    _check(path, magic == _MAGIC, f"it starts with {magic:#010x}, not {_MAGIC:#010x}")
    if version != _VERSION:
        raise _foreign(path, f"format version {version}, known is {_VERSION}")
    words: TokenIds[int] = array("i")
    data = file.read(min(count * words.itemsize, size))
    is_whole = len(data) == count * words.itemsize
    _check(path, is_whole, f"{size} bytes are less than its {count} token words")
    words.frombytes(data)
    return words


def _unframe(path: Path, words: TokenIds[int]) -> TokenIds[int]:
    """The tokens between the frame's `-1 · 1 · t` and its `m`."""
    _check(path, len(words) >= _MIN_FRAME, f"{len(words)} words are less than a frame of tokens")
    version, count = words[1], words[2]
    if version != _TOKENS_VERSION:
        raise _foreign(path, f"token list version {version}, known is {_TOKENS_VERSION}")
    _check(path, 0 <= count <= len(words) - _MIN_FRAME, f"{count} tokens do not fit {len(words)} words")
    if words[3 + count] != 0:
        raise _foreign(path, "it holds images or audio, which its tokens do not identify")
    _check(path, len(words) == _MIN_FRAME + count, f"{len(words)} words for {count} tokens are too many")
    return words[3 : 3 + count]


# --- an entry: a file and its sidecar -------------------------------------------------------------------


def new_name(key: str) -> str:
    """A new file name, valid for llama-server."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r} of a saved prefix must be 1 to 128 ASCII letters and digits")
    return f"kvpin-{key}-{secrets.token_hex(16)}.bin"


def key_of(name: str) -> str | None:
    """The key in a name of `new_name`, None for any other name."""
    own = _OWN.fullmatch(name)
    return own[2] if own and own[3] == ".bin" else None


def inspect(
    path: Path, key: str, salt: str | None, tokens_expected: int | None, bytes_expected: int | None
) -> Saved:
    """Reads a new saved file, and checks it against the server's figures, if given. Its times are unset."""
    before = stamp(path)
    size = before[1]
    _check_count(path, "bytes", size, bytes_expected)
    tokens = read_tokens(path)
    count = len(tokens)
    _check(path, count > 0, "it holds no tokens: the slot was empty")
    _check_count(path, "tokens", count, tokens_expected)
    hashed = checksum(path)
    _check(path, stamp(path) == before, "it changed while it was read")
    return Saved(
        FORMAT, key, salt, count, size, hashed, 0.0, 0.0, 0, name=path.name, tokens=tokens, seen=before
    )


def verify(path: Path, saved: Saved) -> Stamp:
    """Checks a file against its entry. A file that was seen before is not hashed again."""
    found = stamp(path)
    _check_count(path, "bytes", found[1], saved.size)
    _check(path, read_tokens(path) == saved.tokens, "its tokens are not those it was saved with")
    if found != saved.seen:
        _check(path, checksum(path) == saved.checksum, _OTHER_BYTES)
    return found


def move(source: Path, target: Path, saved: Saved) -> Stamp:
    """Moves a saved file and its sidecar to another directory, and verifies the bytes on the way."""
    _check_count(source, "bytes", stamp(source)[1], saved.size)
    copied = copy(source, target)
    try:
        _check(source, copied == saved.checksum, _OTHER_BYTES)
        write_sidecar(target, saved)
    except StateFileError:
        remove(target)
        raise
    remove(source)
    return stamp(target)


def write_sidecar(path: Path, saved: Saved) -> None:
    """Writes the sidecar of the saved file `path`, whole or not at all."""
    with written_whole(path.with_suffix(".json")) as part:
        part.write_bytes(saved.sidecar())


def remove(path: Path) -> None:
    """Removes a saved file, its sidecar first. Logs what it cannot remove."""
    for each in (path.with_suffix(".json"), path):
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", each, error.strerror)


def capacity(directory: Path, wanted: int, held: int) -> int:
    """Bytes that saved files may take: `wanted`, or less if the file system has less room. The `held` bytes
    of a scan are room for entries too. Raises StateFileError where there is no directory."""
    with reading(directory):
        status = os.statvfs(directory)
    room = held + status.f_bavail * status.f_frsize
    room -= room // 50  # sidecars, and blocks that are not full
    if wanted <= room or not status.f_blocks:  # a tmpfs without a limit says 0 blocks
        return wanted
    text = "%s has room for %d of %d bytes of saved prefixes: the cap is lowered"
    _log.warning(text, directory, room, wanted)
    return room


def scan(directory: Path, tier: Tier, now: float, taken: AbstractSet[str]) -> tuple[list[Saved], int]:
    """Reads a directory: its sound entries, and the bytes of all files that are or may become entries.

    Deletes what is proven damaged, and old files of no entry.

    Left in place and not used: an entry that cannot be read now, and one that another version of kvpin or of
    llama-server wrote. Left while younger than GRACE_S, since another process may be saving or moving it: a
    file without its sidecar, a sidecar without its file, and an entry whose name is `taken`.
    """
    with reading(directory):
        names = {each.name for each in directory.iterdir() if _OWN.fullmatch(each.name)}
    found: list[Saved] = []
    unusable: dict[str, StateFileError] = {}
    for name in sorted(names - taken):
        if _sidecar(name) in names:
            try:
                found.append(_read_entry(directory / name, tier))
            except StateFileError as error:
                if error.reason is FileFault.DAMAGED:
                    _log.warning("%s; it is deleted", error)
                    remove(directory / name)
                elif error.reason is not FileFault.MISSING:
                    unusable[name] = error
    if unusable:
        first = next(iter(unusable.values()))
        _log.warning("%d saved prefixes are left in place and not used, e.g. %s", len(unusable), first)
    names -= _with_sidecars(unusable)
    for name in sorted(names - _with_sidecars(each.name for each in found)):
        _remove_leftover(directory / name, now)
    return found, sum(size_of(directory / name) for name in names)


def _with_sidecars(names: Iterable[str]) -> set[str]:
    return {each for name in names for each in (name, _sidecar(name))}


def size_of(path: Path) -> int:
    """Bytes of a file, 0 for one that is gone or hidden by permissions."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sidecar(name: str) -> str:
    return f"{name.removesuffix('.bin')}.json"


def _read_entry(path: Path, tier: Tier) -> Saved:
    target = path.with_suffix(".json")
    regular_file(target)
    with reading(target):
        data = target.read_bytes()
    sidecar = _read_sidecar(target, data)
    if sidecar.key != key_of(path.name):
        raise _foreign(target, f"its key {sidecar.key!r} is not the one of its name")
    _check_count(path, "bytes", stamp(path)[1], sidecar.size)
    tokens = read_tokens(path)
    _check_count(path, "tokens", len(tokens), sidecar.count)
    return Saved(**msgspec.structs.asdict(sidecar), name=path.name, tokens=tokens, tier=tier)


def _read_sidecar(path: Path, data: bytes) -> Sidecar:
    """Sidecars are written whole or not at all: one that is no JSON is damaged, any other JSON is foreign."""
    try:
        record: Any = msgspec.json.decode(data)
        if isinstance(record, dict) and record.get("kept_until", 0.0) is None:
            record["kept_until"] = math.inf
        sidecar = msgspec.convert(record, Sidecar)
    except msgspec.ValidationError as error:
        raise _foreign(path, f"another version of kvpin wrote it: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateFileError(path, FileFault.DAMAGED, f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise _foreign(path, "kvpin did not write it: it is nested too deep") from error
    if sidecar.format != FORMAT:
        raise _foreign(path, f"another version of kvpin wrote it: format {sidecar.format}, known is {FORMAT}")
    return sidecar


def _remove_leftover(path: Path, now: float) -> None:
    """Removes a file that belongs to no entry, unless it is young."""
    try:
        age_s = now - path.lstat().st_mtime
        if age_s < GRACE_S:
            return
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error.strerror)
        return
    _log.warning("%s belongs to no saved prefix and is %d s old: removed", path, age_s)


@functools.cache
def is_in_memory(directory: Path) -> bool:
    """True if a reboot loses the directory's files: it lies on a tmpfs."""
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    around = [mount for mount in mounts if directory.absolute().is_relative_to(mount[0])]
    return max(around, key=lambda mount: len(mount[0]), default=["", ""])[1] in ("tmpfs", "ramfs")
