"""What the operator decides: flags win over environment variables, these over the TOML file.

models.py   the settings themselves, typed, with their defaults
load.py     flags + environment + file → Settings; an unknown key is a start-up error
flags.py    the compact forms of `--engine` and `--managed`
"""

from proxy.settings.flags import is_command_line, parse_engine_flag, parse_managed_flag
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
    "parse_engine_flag",
    "parse_managed_flag",
]
