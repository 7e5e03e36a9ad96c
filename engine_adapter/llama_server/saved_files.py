"""The directory of saved prefixes: names, sidecars, checks, moves, and what is deleted.

    kvpin-<key>-<unique>.bin    what llama-server saved
    kvpin-<key>-<unique>.json   its sidecar: kvpin's record of it; without one the file is no entry
    ….part                      one of them while it is written

Everything here blocks and is called in a thread. Files with other names are never touched. Functions raise
StateFileError for a file or a directory that cannot be used.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import secrets
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import msgspec

from engine_adapter.llama_server import saved_entry
from engine_adapter.llama_server.saved_entry import (
    FileFault,
    Saved,
    Sidecar,
    Stamp,
    StateFileError,
    reading,
    written_whole,
)
from engine_adapter.types import Tier

FORMAT = 1  # of sidecars
_MOUNTS = Path("/proc/self/mounts")
GRACE_S = 600.0  # a file without its sidecar stays this long: another process may be working on it

_log = logging.getLogger("kvpin.llama_server")
_OWN = re.compile(r"(kvpin-([0-9A-Za-z]{1,128})-[0-9a-f]{32})(\.bin|\.json|\.bin\.part|\.json\.part)")
_KEY = re.compile(r"[0-9A-Za-z]{1,128}")


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
    if bytes_expected is not None:
        _check_count(path, FileFault.SIZE, "bytes", before[1], bytes_expected)
    tokens = saved_entry.read_tokens(path)
    if not tokens:
        raise StateFileError(path, FileFault.TOKENS, "it holds no tokens: the slot was empty")
    count, size = len(tokens), before[1]
    if tokens_expected is not None:
        _check_count(path, FileFault.TOKENS, "tokens", count, tokens_expected)
    checksum = saved_entry.checksum(path)
    if stamp(path) != before:
        raise StateFileError(path, FileFault.SIZE, "it changed while it was read")
    return Saved(
        FORMAT, key, salt, count, size, checksum, 0.0, 0.0, 0, name=path.name, tokens=tokens, seen=before
    )


def verify(path: Path, saved: Saved) -> Stamp:
    """Checks a file against its entry. A file that was seen before is not hashed again."""
    found = stamp(path)
    _check_count(path, FileFault.SIZE, "bytes", found[1], saved.size)
    if saved_entry.read_tokens(path) != saved.tokens:
        raise StateFileError(path, FileFault.TOKENS, "its tokens are not those it was saved with")
    if found != saved.seen:
        _check_checksum(path, saved_entry.checksum(path), saved.checksum)
    return found


def move(source: Path, target: Path, saved: Saved) -> Stamp:
    """Moves a saved file and its sidecar to another directory, and verifies the bytes on the way."""
    _check_count(source, FileFault.SIZE, "bytes", stamp(source)[1], saved.size)
    copied = saved_entry.copy(source, target)
    try:
        _check_checksum(source, copied, saved.checksum)
        write_sidecar(target, saved)
    except StateFileError:
        remove(target)
        raise
    remove(source)
    return stamp(target)


def _check_count(path: Path, reason: FileFault, unit: str, found: int, expected: int) -> None:
    if found != expected:
        raise StateFileError(path, reason, f"{found} {unit}, of {expected} that were saved")


def _check_checksum(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise StateFileError(path, FileFault.CHECKSUM, "its bytes are not those that were saved")


def stamp(path: Path) -> Stamp:
    """The stamp of a file; raises StateFileError if it does not exist."""
    status = saved_entry.regular_file(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


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
    """Bytes that saved files may take: `wanted`, or less if the file system has less room.

    The `held` bytes of a scan are room for entries too. Raises StateFileError where there is no directory.
    """
    with reading(directory):
        status = os.statvfs(directory)
    room = held + status.f_bavail * status.f_frsize
    room -= room // 50  # sidecars, and blocks that are not full
    if wanted <= room or not status.f_blocks:  # a tmpfs without a limit says 0 blocks
        return wanted
    _log.warning(
        "%s has room for %d of %d bytes of saved prefixes: the cap is lowered", directory, room, wanted
    )
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
                if error.is_damage:
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
    return found, sum(_size(directory / name) for name in names)


def _with_sidecars(names: Iterable[str]) -> set[str]:
    return {each for name in names for each in (name, _sidecar(name))}


def _size(path: Path) -> int:
    """Bytes of a file, 0 for one that is gone or hidden by permissions."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _sidecar(name: str) -> str:
    return f"{name.removesuffix('.bin')}.json"


def _read_entry(path: Path, tier: Tier) -> Saved:
    target = path.with_suffix(".json")
    saved_entry.regular_file(target)
    with reading(target):
        data = target.read_bytes()
    sidecar = _read_sidecar(target, data)
    if sidecar.key != key_of(path.name):
        raise StateFileError(target, FileFault.FOREIGN, f"its key {sidecar.key!r} is not the one of its name")
    _check_count(path, FileFault.SIZE, "bytes", stamp(path)[1], sidecar.size)
    tokens = saved_entry.read_tokens(path)
    _check_count(path, FileFault.TOKENS, "tokens", len(tokens), sidecar.count)
    return Saved(**msgspec.structs.asdict(sidecar), name=path.name, tokens=tokens, tier=tier)


def _read_sidecar(path: Path, data: bytes) -> Sidecar:
    """Sidecars are written whole or not at all: one that is no JSON is damaged, any other JSON is foreign."""
    try:
        record: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateFileError(path, FileFault.SIDECAR, f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise StateFileError(
            path, FileFault.FOREIGN, "kvpin did not write it: it is nested too deep"
        ) from error
    if isinstance(record, dict) and record.get("kept_until", 0.0) is None:
        record["kept_until"] = math.inf
    try:
        sidecar = msgspec.convert(record, Sidecar)
    except msgspec.ValidationError as error:
        raise StateFileError(
            path, FileFault.FOREIGN, f"another version of kvpin wrote it: {error}"
        ) from error
    if sidecar.format != FORMAT:
        detail = f"another version of kvpin wrote it: format {sidecar.format}, known is {FORMAT}"
        raise StateFileError(path, FileFault.FOREIGN, detail)
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
