"""Flags, environment and TOML file → Settings. Every error is one sentence that says where it is."""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource
from pydantic_settings import SettingsError as SourceError
from typing_extensions import override

from proxy.settings.engine_settings import EngineSettings, EnginesFile, option_names
from proxy.settings.fields import SettingsError, details_of, plain_message
from proxy.settings.schema import Settings

# --- the admin key in a file of its own, which kvpin makes with a random key if it is missing -----------
# A key in a flag or a variable is seen by others: in the list of processes, or in a unit file.

_MAX_LENGTH = 4096
_KEY_BYTES = 32
_ROOT = 0
_NAMES = re.compile(r"([\w-]+):")  # of headers that are one text
# Names of headers that mostly hold a key.
_OF_KEYS = re.compile("auth|cookie|key|password|secret|token", re.IGNORECASE)


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
    found = [("--admin-key", values.get("admin_key"))]
    found += [(name, values.get(name)) for name in ("metrics_key", "record_traffic_key")]
    found += [("--api-key", entry.get("key")) for entry in _entries(values, "api_keys")]
    for name in ("engines", "managed", "discovery"):
        for engine in _entries(values, name):
            headers = engine.get("headers")
            names = str([*headers] if isinstance(headers, dict) else _NAMES.findall(str(headers)))
            found += [("--engine", engine.get("api_key")), ("--engine", _OF_KEYS.search(names))]
    if isinstance(exchange := values.get("exchange"), dict):
        with suppress(ValueError):  # a variable may have replaced it
            found.append(("--exchange", urlsplit(str(exchange.get("url"))).password))
    for flag, key in found:
        text = key.get_secret_value() if isinstance(key, SecretStr) else key
        if text and not str(text).startswith("sha256:"):
            yield flag


def _entries(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    given = values.get(name)
    entries = given if isinstance(given, list | tuple) else ()
    return [dict(entry) for entry in entries if isinstance(entry, dict | BaseModel)]


# --- loading --------------------------------------------------------------------------------------------

PREFIX = "KVPIN_"
DELIMITER = "__"
CONFIG_VARIABLE = "KVPIN_CONFIG"
# In the environment of a worker: its orders.
WORKER_VARIABLE = "KVPIN_WORKER"
# Variables that are no settings: commands and scripts read them.
_NOT_SETTINGS = (CONFIG_VARIABLE, WORKER_VARIABLE, "KVPIN_URL", "KVPIN_CACHE")
REUSE_SWITCHES = ("ENABLE_KV_CACHE_REUSE", "NIM_ENABLE_KV_CACHE_REUSE")
_SWITCH_VALUES = {"1": True, "true": True, "0": False, "false": False}


def load_settings(config: Path | None = None, **flags: Any) -> Settings:  # noqa: ANN401 - checked by the model
    """The settings. Lowest to highest: defaults, TOML file, reuse switches, KVPIN_ variables, flags.

    `config` is a TOML file; None takes the one that KVPIN_CONFIG names. `flags` are settings by name, nested
    ones as mappings; None means "not given". Raises SettingsError with a line for each fault: an unknown key,
    or a value that kvpin cannot use.
    """
    settings, faults = check_settings(config, makes_key=True, **flags)
    if settings is None or faults:
        raise SettingsError("\n".join(faults))
    return settings


def settings_file(config: Path | None) -> Path | None:
    """The TOML file: `config`, else the one that KVPIN_CONFIG names, if any."""
    named = os.environ.get(CONFIG_VARIABLE)
    return Path(named) if config is None and named else config


def check_settings(
    config: Path | None = None,
    *,
    makes_key: bool = False,
    **flags: Any,  # noqa: ANN401
) -> tuple[Settings | None, list[str]]:
    """The settings as `load_settings` takes them, None if they cannot be used, and every fault in a sentence.

    Settings together, and this machine, can be checked only once each setting can be used. A missing file of
    the admin key is no fault; with `makes_key`, it is made.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    config = settings_file(config)
    from_file, faults = dict[str, Any](), list[str]()
    try:
        if config is not None:
            from_file, faults = _read_file(config, Settings)
    except SettingsError as error:
        faults.append(str(error))
    switches, wrong_switches = _read_switches()
    faults += (*_unknown_variables(), *wrong_switches)
    loaded = _with_sources(from_file | switches)
    try:
        settings = loaded(**given)
        file = settings.admin_key_file
        if file is not None and (makes_key or file.exists()):
            settings = loaded(**given, admin_key=_admin_key_in(file, settings))
        loaded.exposed_keys = tuple(exposed_keys(given, config, from_file))
    except ValidationError as error:
        wrong = (each for each in details_of(error) if not _is_unknown_variable(each))
        sentences = (_sentence(each, given, from_file, config) for each in wrong)
        return None, faults + list(dict.fromkeys(line for each in sentences for line in each.splitlines()))
    except SourceError as error:
        return None, [*faults, _not_json(error)]
    except SettingsError as error:
        return None, [*faults, str(error)]
    return settings, [*faults, *settings.faults_together()]


def _with_sources(lower: dict[str, Any]) -> type[Settings]:
    """The settings whose sources are their arguments, the environment, and `lower`. Settings that are wrong
    together are no error: other faults are looked for as well."""

    class LoadedSettings(Settings):
        """Settings with this call's sources."""

        @override
        @model_validator(mode="after")
        def _check_together(self) -> Self:
            return self

        @override
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=lower)

    return LoadedSettings


def _admin_key_in(file: Path, settings: Settings) -> SecretStr:
    """The admin key of the file that the settings name; raises SettingsError."""
    if settings.admin_key is not None:
        raise SettingsError("admin_key and admin_key_file are both set: set only one")
    try:
        return SecretStr(key_in(file))
    except ValueError as error:
        raise SettingsError(f"setting 'admin_key_file' cannot be used: {error}") from error


def _not_json(error: SourceError) -> str:
    """One sentence for a variable whose text must be JSON; the library names only the setting."""
    name = str(error).split('"')[1]
    return (
        f"setting {name!r} (from environment variable {_variable_of((name,))}) cannot be used: "
        "the variable must be JSON, as in '[…]' or '{…}'"
    )


def _is_unknown_variable(error: ErrorDetails) -> bool:
    """True if `_unknown_variables` names it."""
    variable = PREFIX + DELIMITER.join(str(part).upper() for part in error["loc"])
    return error["type"] == "extra_forbidden" and _variable_of(error["loc"]) == variable


def read_engines(path: Path) -> tuple[EngineSettings, ...]:
    """The engines of a file, in the shape of the settings' `engines`: TOML, or JSON if it ends in `.json`.
    Raises SettingsError if it cannot be read, or an engine cannot be used."""
    values, faults = _read_file(path, EnginesFile)
    if faults:
        raise SettingsError(faults[0])
    try:
        return EnginesFile.model_validate(values).engines
    except ValidationError as error:
        first = details_of(error)[0]
        if first["type"] == "missing" and first["loc"] == ("engines",):
            raise SettingsError(
                f"{str(path)!r} has no engines: write engines = [] if there are none"
            ) from None
        raise SettingsError(_sentence(first, {}, values, path).splitlines()[0]) from None


def _read_file(config: Path, model: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The values of a file under names that are in the model, and a sentence for each other name. Raises
    SettingsError if the file cannot be read."""
    read, language = (json.loads, "JSON") if config.suffix == ".json" else (tomllib.loads, "TOML")
    try:
        values = read(config.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"settings file {str(config)!r} cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise SettingsError(f"settings file {str(config)!r} is not {language}: {why}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {str(config)!r} must be an object")
    faults = []
    for holder, parents, name, known in list(_unknown_keys(values, model, ())):
        full = ".".join((*parents, name))
        is_of_all = bool(parents) and name in model.model_fields and language == "TOML"
        hint = f"write {name} above the first [table] of the file" if is_of_all else _hint(name, known)
        faults.append(f"unknown setting {full!r} in {str(config)!r}: {hint}")
        del holder[name]
    return values, faults


def _unknown_keys(
    values: dict[str, Any], model: type[BaseModel], parents: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], tuple[str, ...], str, list[str]]]:
    """Unknown keys, each with the object that has it, its parents and the names that exist there."""
    options = option_names(values.get("kind")) if model.model_config.get("extra") == "allow" else ()
    for name, value in values.items():
        if name in options:
            continue
        if name not in model.model_fields:
            yield values, parents, name, [*model.model_fields, *options]
            continue
        part = _part_model(model, name)
        if part is None:
            continue
        if isinstance(value, dict):
            yield from _unknown_keys(value, part, (*parents, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _unknown_keys(item, part, (*parents, f"{name}[{index}]"))


def _part_model(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a nested setting, or of the entries of a list of them."""
    annotation = model.model_fields[name].annotation
    parts = (annotation, *get_args(annotation))
    return next((each for each in parts if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _unknown_variables() -> Iterator[str]:
    """A sentence for each KVPIN_ variable that no setting reads: a misspelt one must not pass in silence."""
    for variable in os.environ:
        if not variable.upper().startswith(PREFIX) or variable in _NOT_SETTINGS:
            continue
        model: type[BaseModel] | None = Settings
        prefix = PREFIX
        for name in variable[len(PREFIX) :].lower().split(DELIMITER):
            if model is None or name not in model.model_fields:
                known = list(model.model_fields) if model is not None else []
                yield f"unknown environment variable {variable!r}: {_hint(name, known, prefix)}"
                break
            model, prefix = _part_model(model, name), f"{prefix}{name.upper()}{DELIMITER}"


def _read_switches() -> tuple[dict[str, bool], list[str]]:
    """`reuse`, from the variables that NIM's users know, and a sentence if they cannot be used."""
    found: dict[str, bool] = {}
    for name in REUSE_SWITCHES:
        text = os.environ.get(name)
        if not text:  # compose files set a variable they lack to the empty string
            continue
        value = _SWITCH_VALUES.get(text.strip().lower())
        if value is None:
            return {}, [f"environment variable {name} is {text!r}: use 1, 0, true or false"]
        found[name] = value
    if len(set(found.values())) > 1:
        return {}, [f"{' and '.join(found)} contradict each other: set only one"]
    return ({"reuse": any(found.values())} if found else {}), []


def _hint(name: str, known: list[str], variable: str = "") -> str:
    """The nearest names, or all. `variable`: what stands before them where they are environment variables."""
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.6)
    near = near or [candidate for candidate in known if name.lower() in candidate]
    if variable:
        near, known = ([f"{variable}{each.upper()}" for each in names] for names in (near, known))
    if near:
        return f"did you mean {' or '.join(repr(match) for match in near)}?"
    return f"known here: {', '.join(known)}" if known else "this setting has no parts"


def _sentence(
    error: ErrorDetails, given: Mapping[str, Any], from_file: Mapping[str, Any], config: Path | None
) -> str:
    """One sentence for a validation error, without the value: it may be secret."""
    location = error["loc"]
    message = plain_message(error)
    if not location:
        return message
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)[1:]
    top = str(location[0])
    variable = _variable_of(location)
    if top in given:
        origin = "given as a flag"
    elif variable is not None:
        origin = f"from environment variable {variable}"
    elif top in from_file:
        origin = f"in {str(config)!r}"
    else:
        origin = "by default"
    return f"setting {name!r} ({origin}) cannot be used: {message[:1].lower()}{message[1:]}"


def _variable_of(location: tuple[int | str, ...]) -> str | None:
    """The KVPIN_ variable that sets `location` or one of its parents; the longest name wins."""
    parts = [str(part).upper() for part in location]
    names = {name.upper(): name for name in os.environ}
    wanted = (PREFIX + DELIMITER.join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((names[name] for name in wanted if name in names), None)
