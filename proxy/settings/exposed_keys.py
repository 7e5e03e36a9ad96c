"""Keys of the settings that other users of this machine can read."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr


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
