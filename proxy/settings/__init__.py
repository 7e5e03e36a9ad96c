"""What the operator decides. Flags win over environment variables, which win over the TOML file.

models.py   the settings, typed, with their defaults
load.py     flags, environment and file → Settings; an unknown key is an error at start
flags.py    the short forms of `--engine`, `--managed` and `--model-alias`

A setting that every engine has is a field of `EngineSpec` and of `_EngineSettings` in models.py. A setting
of one kind of engine is a field of that kind's options in engine_adapter. Flags, TOML and the admin API
read both.
"""

from proxy.settings.flags import (
    is_command_line,
    parse_alias_flags,
    parse_engine_flag,
    parse_managed_flag,
    split_engine_flag,
)
from proxy.settings.load import load_settings
from proxy.settings.models import (
    ApiKeySettings,
    EngineSettings,
    HealthSettings,
    LimitSettings,
    LogSettings,
    ManagedSettings,
    Settings,
    SettingsError,
)

__all__ = [
    "ApiKeySettings",
    "EngineSettings",
    "HealthSettings",
    "LimitSettings",
    "LogSettings",
    "ManagedSettings",
    "Settings",
    "SettingsError",
    "is_command_line",
    "load_settings",
    "parse_alias_flags",
    "parse_engine_flag",
    "parse_managed_flag",
    "split_engine_flag",
]
