"""The short forms of `--engine`, `--managed`, `--engines-from` and `--model-alias`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from proxy.settings.engine_settings import DiscoverySettings, EngineSettings, ManagedSettings, option_names
from proxy.settings.fields import SettingsError, details_of, plain_message

_Model = TypeVar("_Model", bound=BaseModel)
_COMMON = tuple(name for name in EngineSettings.model_fields if name not in ("kind", "url"))

_COMMAND_LINE = re.compile(r"\s*[A-Za-z][A-Za-z0-9_-]*:(\s|-|$)")
# What stands behind an address as a setting, as in `vllm=http://…,id=a`.
_SETTING = re.compile(r",\s*([A-Za-z][A-Za-z0-9_-]*)=")
_ADDRESS = "KIND=URL, e.g. vllm=http://127.0.0.1:8000"
_FORM = f"{_ADDRESS}, or 'KIND: command line', e.g. 'llama-server: -m model.gguf'"


def is_command_line(text: str) -> bool:
    """True if an `--engine` is `KIND: command line`, which starts an engine, rather than an address."""
    return _COMMAND_LINE.match(text) is not None


def parse_engine_flag(
    text: str,
    *,
    flag: str = "--engine",
    reads_as: type[EngineSettings] = EngineSettings,
    more: Mapping[str, str] = MappingProxyType({}),
) -> EngineSettings:
    """Reads `KIND=URL[,name=value…]`, e.g. `vllm=http://gpu1:8000,tokenizer=Qwen/Qwen3-8B`.

    `more`: options that other flags gave. Raises SettingsError without the options' values: one may be a key.
    """
    values = split_engine_flag(text, flag=flag, more=more)
    return _checked(reads_as, values, _label(flag, values["kind"]))


def parse_discovery_flag(text: str) -> DiscoverySettings:
    """Reads `KIND=SOURCE[,name=value…]`, e.g. `vllm=dns://vllm.llm.svc:8000`; raises SettingsError."""
    flag = "--engines-from"
    values = split_engine_flag(text, flag=flag, form="KIND=SOURCE, e.g. vllm=dns://vllm.example:8000")
    values["source"] = values.pop("url")
    return _checked(DiscoverySettings, values, _label(flag, values["kind"]))


def split_engine_flag(
    text: str, *, flag: str = "--engine", form: str = "", more: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The names and values of `KIND=URL[,name=value…]`, with only the names checked; else as above.

    `form`: the way to write it, for the error; by default also an engine to start, where it is a flag.
    """
    head, *options = text.split(",")
    kind, equals, url = head.partition("=")
    if not equals or not kind.strip() or not url.strip():
        url_alone = f"; `kvpin doctor {head}` says which kind it is" if "://" in kind else ""
        form = form or (_FORM if flag else _ADDRESS)
        raise SettingsError(f"{flag} {head!r}: write {form}{url_alone}")
    label = _label(flag, kind.strip())
    if "://" not in url:
        raise SettingsError(f"{label}: the address needs a scheme: http://… or https://…")
    values: dict[str, str] = {"kind": kind.strip(), "url": url.strip(), **more}
    known = (*_COMMON, *option_names(values["kind"]))
    for option in options:
        name, equals, value = option.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise SettingsError(f"{label}: unknown option {name!r}; {hint}")
        if not equals or not value.strip():
            raise SettingsError(f"{label}: option {name!r} needs a value: {name}=…")
        if name in values:
            raise SettingsError(f"{label}: option {name!r} is given twice")
        values[name] = value.strip()
    return values


def _label(flag: str, kind: str) -> str:
    return f"{flag} {kind}=…".lstrip()


def parse_managed_flag(text: str, *, flag: str = "--managed") -> ManagedSettings:
    """Reads `KIND: command line`, e.g. `llama-server: -m model.gguf` or `vllm: vllm serve qwen3
    --port {port}`. `embedded` may stand alone. Raises SettingsError."""
    kind, colon, command = text.partition(":")
    kind = kind.strip()
    if not kind or (not colon and " " in kind):
        raise SettingsError(f"{flag} {text!r}: write KIND: command line, e.g. 'embedded: --kv-blocks 512'")
    for name in _SETTING.findall(command):
        if name.replace("-", "_") in (*_COMMON, *option_names(kind)):
            raise SettingsError(
                f"{flag} {kind!r}: {name}=… is a setting of kvpin, and no word of the command line: write it "
                "in a [[managed]] table of the settings file, with this command"
            )
    return _checked(ManagedSettings, {"kind": kind, "command": command}, f"{flag} {kind!r}")


def parse_alias_flags(texts: Iterable[str]) -> dict[str, str]:
    """Reads each `NAME=MODEL` of `--model-alias`; raises SettingsError."""
    aliases: dict[str, str] = {}
    for text in texts:
        alias, _, model = (part.strip() for part in text.partition("="))
        if not alias or not model:
            raise SettingsError(f"--model-alias {text!r}: write NAME=MODEL, e.g. gpt-4o=qwen3")
        if alias in aliases:
            raise SettingsError(f"--model-alias {alias!r} is given twice")
        aliases[alias] = model
    return aliases


def _checked(reads_as: type[_Model], values: Mapping[str, str], label: str) -> _Model:
    try:
        return reads_as.model_validate(values)
    except ValidationError as error:
        first = details_of(error)[0]
        where = f"{first['loc'][0]}: " if first["loc"] else ""
        raise SettingsError(f"{label}: {where}{plain_message(first)}") from None
