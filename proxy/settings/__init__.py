"""The operator's settings. Flags win over environment variables, which win over the TOML file.

models.py   the settings, typed, with their defaults
load.py     flags, environment and file → Settings; an unknown key is an error at start
flags.py    the short forms of `--engine`, `--managed`, `--engines-from` and `--model-alias`
changes.py  what differs when the settings are read again
sources.py  the addresses of `[[discovery]]`

A setting that every engine has is a field of `EngineSpec` and of `_EngineSettings` in models.py. A setting
of one kind of engine is a field of that kind's options in engine_adapter. Flags, TOML and the admin API
read both.
"""

from proxy.settings.changes import EngineChanges, EngineEntry, engine_changes, needs_restart
from proxy.settings.flags import (
    is_command_line,
    parse_alias_flags,
    parse_discovery_flag,
    parse_engine_flag,
    parse_managed_flag,
    split_engine_flag,
)
from proxy.settings.load import load_settings, read_engines
from proxy.settings.models import (
    ApiKeySettings,
    DiscoverySettings,
    EngineSettings,
    ExchangeSettings,
    HealthSettings,
    LimitSettings,
    LogSettings,
    ManagedSettings,
    Settings,
    SettingsError,
    TlsSettings,
    key_digest,
)
from proxy.settings.sources import DnsSource, KubernetesSource, SrvSource

__all__ = [
    "ApiKeySettings",
    "DiscoverySettings",
    "DnsSource",
    "EngineChanges",
    "EngineEntry",
    "EngineSettings",
    "ExchangeSettings",
    "HealthSettings",
    "KubernetesSource",
    "LimitSettings",
    "LogSettings",
    "ManagedSettings",
    "Settings",
    "SettingsError",
    "SrvSource",
    "TlsSettings",
    "engine_changes",
    "is_command_line",
    "key_digest",
    "load_settings",
    "needs_restart",
    "parse_alias_flags",
    "parse_discovery_flag",
    "parse_engine_flag",
    "parse_managed_flag",
    "read_engines",
    "split_engine_flag",
]
