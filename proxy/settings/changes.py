"""The differences between the settings that kvpin runs with and those that are read again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.settings.engine_settings import EngineSettings, ManagedSettings, numbered
from proxy.settings.schema import Settings

EngineEntry = EngineSettings | ManagedSettings

# Settings that a running kvpin takes over.
RELOADED = frozenset(
    {
        "engines", "managed", "engines_file", "discovery", "api_keys", "admin_key", "admin_key_file",
        "metrics_key", "model_aliases", "default_model", "cors_origins", "ui", "limits", "retries",
        "graceful_shutdown_s", "drain_s", "timeouts", "tls",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineChanges:
    """The engines that join, leave, and are connected anew with other settings."""

    added: tuple[EngineEntry, ...]
    removed: tuple[str, ...]
    changed: tuple[EngineEntry, ...]


def engine_changes(have: Mapping[str, EngineEntry], want: Iterable[EngineEntry]) -> EngineChanges:
    """Compares the engines that run, by id, with those of the settings."""
    wanted = kept_ids(have, list(want))
    return EngineChanges(
        added=tuple(entry for entry in wanted if entry.id not in have),
        removed=tuple(sorted(have.keys() - {entry.id for entry in wanted})),
        changed=tuple(entry for entry in wanted if have.get(entry.id, entry) != entry),
    )


def needs_restart(old: Settings, new: Settings) -> list[str]:
    """Names of settings that differ and count only when kvpin starts again."""
    names = [name for name in Settings.model_fields if name not in RELOADED]
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    if old.timeouts.connect_s != new.timeouts.connect_s:  # connections to engines keep it
        changed.append("timeouts.connect_s")
    old_ca, new_ca = (tls and (tls.client_ca or "none") for tls in (old.tls, new.tls))
    return changed if old_ca == new_ca else [*changed, "tls"]  # certificate and key are read again


def kept_ids(have: Mapping[str, EngineEntry], want: list[EngineEntry]) -> list[EngineEntry]:
    """Gives each engine the id that it has. Ids that count engines shift when one before is taken out."""
    named = {entry.id for entry in want if not _is_counted(entry)}
    left = [entry for entry in have.values() if entry.id not in named]
    kept = dict[int, EngineEntry]()
    for position, entry in enumerate(want):
        if not _is_counted(entry):
            kept[position] = entry
        elif (same := next((each for each in left if are_alike(each, entry)), None)) is not None:
            kept[position] = same
            left.remove(same)
    taken = {entry.id for entry in kept.values()}
    for position, entry in enumerate(want):
        if position not in kept:
            unnamed = entry.model_copy(update={"id": ""})
            kept[position] = numbered(unnamed, {*taken, *have}) if entry.id in taken else entry
            taken.add(kept[position].id)
    return [kept[position] for position in range(len(want))]


def _is_counted(entry: EngineEntry) -> bool:
    return re.fullmatch(re.escape(entry.kind) + r"-\d+(-dp\d+)?", entry.id) is not None


def are_alike(one: EngineEntry, other: EngineEntry) -> bool:
    """True if they differ in nothing but their id."""
    return one == other.model_copy(update={"id": one.id})
