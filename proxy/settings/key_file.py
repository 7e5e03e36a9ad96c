"""The admin key in a file of its own, which kvpin makes with a random key if it is missing.

A key in a flag or a variable is seen by others: in the list of processes, or in a unit file.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from pydantic import BaseModel, SecretStr

_MAX_LENGTH = 4096
_KEY_BYTES = 32
_ROOT = 0


def key_in(path: Path) -> str:
    """The key in a file; a missing file is made, with a random key and mode 0600. Raises ValueError if it
    cannot be read or made, is not a file, is too long, or others may read or change it."""
    try:
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{str(path)!r} can be neither read nor made: {reason}") from error


def _make(path: Path) -> None:
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:  # its mode is 0600
        file.write(f"{secrets.token_urlsafe(_KEY_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):  # another kvpin was quicker: both take the key of that one
            os.link(file.name, path)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file")
    with path.open(encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (os.geteuid(), _ROOT):
            raise ValueError(f"{str(path)!r} belongs to another user, who may read and change it: chown it")
        mode = stat.S_IMODE(found.st_mode)
        if open_to_others(mode):
            raise ValueError(f"others may read or change {str(path)!r} (mode {mode:o}): chmod 600 it")
        text = file.read(_MAX_LENGTH + 1)
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"{str(path)!r} has more than {_MAX_LENGTH} characters: that is no key")
    key = text.strip()
    if not key or len(key.splitlines()) > 1:
        raise ValueError(
            f"{str(path)!r} must hold one key, in one line; kvpin makes one if you delete the file"
        )
    return key


def open_to_others(mode: int) -> bool:
    """True if others may read or change a file of this mode, or its group may change it."""
    return bool(mode & (stat.S_IRWXO | stat.S_IWGRP))


def exposed_keys(
    flags: Mapping[str, Any], config: Path | None, from_file: Mapping[str, Any]
) -> Iterator[str]:
    """A sentence for each flag that holds a key, and for a settings file with keys that others can read. A
    digest of a key (`sha256:…`) is none."""
    for flag in dict.fromkeys(_flags_of_keys(flags)):
        yield (
            f"every user of this machine sees the key in {flag}, in the list of processes: give it by the "
            "settings file or an environment variable"
        )
    if config is not None and any(_flags_of_keys(from_file)):
        mode = stat.S_IMODE(config.stat().st_mode)
        if open_to_others(mode):
            yield f"others may read or change {str(config)!r} (mode {mode:o}), which holds keys: chmod 600 it"


def _flags_of_keys(values: Mapping[str, Any]) -> Iterator[str]:
    """The flag of each key in the values of flags or of a file."""
    found = [("--admin-key", values.get("admin_key")), ("metrics_key", values.get("metrics_key"))]
    found += [("--api-key", entry.get("key")) for entry in _entries(values, "api_keys")]
    for name in ("engines", "managed", "discovery"):
        found += [("--engine", engine.get("api_key")) for engine in _entries(values, name)]
    for flag, key in found:
        text = key.get_secret_value() if isinstance(key, SecretStr) else key
        if text and not str(text).startswith("sha256:"):
            yield flag


def _entries(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    given = values.get(name)
    entries = given if isinstance(given, list | tuple) else ()
    return [dict(entry) for entry in entries if isinstance(entry, dict | BaseModel)]
