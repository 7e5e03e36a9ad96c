"""The operator's settings. Flags win over environment variables, which win over the TOML file.

schema.py             the settings, typed, with their defaults
engine_settings.py    the settings of engines
fields.py             what single values may be, addresses of `[[discovery]]`; errors in plain English
loading.py            flags, environment and file → Settings; an unknown key is an error at start
flags.py              the short forms of `--engine`, `--managed`, `--engines-from` and `--model-alias`
changes.py            what differs when the settings are read again

A setting that every engine has is a field of `EngineSpec` and of `_EngineSettings` in engine_settings.py. A
setting of one kind of engine is a field of that kind's options in engine_adapter. Flags, TOML and the admin
API read both.
"""

from proxy.settings.changes import (
    EngineChanges,
    EngineEntry,
    are_alike,
    engine_changes,
    kept_ids,
    needs_restart,
)
from proxy.settings.engine_settings import (
    DiscoverySettings,
    EngineSettings,
    ManagedSettings,
    StartedSettings,
    UndetectedSettings,
    engine_as_json,
)
from proxy.settings.fields import DnsSource, KubernetesSource, SettingsError, SrvSource, key_digest
from proxy.settings.flags import (
    is_command_line,
    parse_alias_flags,
    parse_discovery_flag,
    parse_engine_flag,
    parse_managed_flag,
    split_engine_flag,
)
from proxy.settings.loading import WORKER_VARIABLE, check_settings, load_settings, read_engines, settings_file
from proxy.settings.schema import (
    ApiKeySettings,
    ExchangeSettings,
    HealthSettings,
    LimitSettings,
    LogSettings,
    Settings,
    TlsSettings,
)
