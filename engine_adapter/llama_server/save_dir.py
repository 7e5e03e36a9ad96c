"""The default host tier of a llama-server that kvpin starts: a directory in memory."""

from __future__ import annotations

import functools
import os
import shutil
import stat
from pathlib import Path

from engine_adapter.errors import EngineSpecError

_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it, see make_save_dir
_MOUNTS = Path("/proc/self/mounts")
_ENOUGH_BYTES = 2**30
_MOST_BYTES = 8 * 2**30


@functools.cache
def default_save_dir() -> Path:
    """`/dev/shm/kvpin-<uid>` if that is memory, otherwise `kv` in kvpin's cache directory.

    A tmpfs with less than 1 GiB free is too small for KV of real models (containers get 64 MiB by default).
    The answer does not change while the process runs.
    """
    directory = _MEMORY / f"kvpin-{os.getuid()}"
    if _is_tmpfs(_MEMORY) and _room(directory) >= _ENOUGH_BYTES:
        return directory
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVPIN_CACHE") or Path(home, "kvpin"), "kv")


@functools.cache
def default_save_bytes(directory: Path) -> int:
    """The cap of the files in `directory`: half of the room for them, at most 8 GiB.

    The answer does not change while the process runs, because servers that share a directory need equal caps.
    """
    return max(min(_room(directory) // 2, _MOST_BYTES), 1)


def make_save_dir(directory: Path) -> None:
    """Makes the directory for this user alone, because it holds prompts. It may exist already.

    Raises:
        EngineSpecError: it cannot be made, or another user made it in a shared place.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise EngineSpecError(
            f"the directory {str(directory)!r} for saved KV cannot be made: {error.strerror}"
        ) from error
    if directory != default_save_dir():
        return  # the operator chose it, and chooses who may read it
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise EngineSpecError(
            f"{directory} is not this user's directory: have it removed, or set host_cache_dir to another"
        )
    directory.chmod(0o700)


def _room(directory: Path) -> int:
    """Bytes that files in `directory` may take: the free ones and those they take already."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    own = sum(map(_size, directory.iterdir())) if place == directory else 0
    return shutil.disk_usage(place).free + own


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # gone since it was listed
        return 0


def _is_tmpfs(place: Path) -> bool:
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[1:3] == [str(place), "tmpfs"] for line in mounts)
