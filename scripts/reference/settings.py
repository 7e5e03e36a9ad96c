"""The page of all settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from inspect import getdoc
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine_adapter.registry import KINDS
from proxy.settings import Settings
from scripts.reference.markdown import codes, linked, page, table

_OF_ENGINES = "## All engines\n\nIn `[[engines]]`, `[[managed]]` and `[[discovery]]`."
_OF_KINDS = "## Engines of some kinds\n\nIn the same tables."


def settings_page() -> str:
    """Every setting: its default, what it does."""
    parts = {name: part for name, field in Settings.model_fields.items() if (part := _part(field))}
    engines = [part for part in parts.values() if "kind" in part.model_fields]
    common = [name for name in engines[0].model_fields if all(name in each.model_fields for each in engines)]
    sections = []
    for name, part in parts.items():
        field, is_engine = Settings.model_fields[name], part in engines
        own = [each for each in part.model_fields if not is_engine or each not in common]
        title = f"[[{name}]]" if isinstance(field.default, tuple) else f"[{name}]"
        sections += [f"## `{title}`", linked(_said(field)), _settings(part, own)]
        if part is engines[-1]:
            sections += [_OF_ENGINES, _settings(part, common), _OF_KINDS, _options()]
    return page(
        """
        # Settings

        `scripts/docs` writes this page from `proxy/settings/`. Settings are keys of a TOML file, flags of
        [`kvpin serve`](cli.md#kvpin-serve), or variables: that of `limits.body_bytes` is
        `KVPIN_LIMITS__BODY_BYTES`. Sizes take units (`64MiB`); names that end in `_s` are in seconds.
        """,
        _settings(Settings, [name for name in Settings.model_fields if name not in parts]),
        *sections,
    )


def _part(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a setting that has parts."""
    types = (field.annotation, *get_args(field.annotation))
    return next((each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _settings(model: type[BaseModel], names: Iterable[str]) -> str:
    fields = ((name, model.model_fields[name]) for name in names)
    rows = ((f"`{name}`", default_of(field), f"{_said(field)}{_range(field)}") for name, field in fields)
    return table(("setting", "default", "meaning"), rows)


def _said(field: FieldInfo) -> str:
    if field.description is None:
        raise ValueError(f"a setting has no docstring: {field}")
    return " ".join(field.description.split())


def _range(field: FieldInfo) -> str:
    """The allowed values, where the model declares them."""
    low = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    high = next((each.le for each in field.metadata if isinstance(each, Le)), None)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        return f" One of {codes(choices)}."
    return "" if high is None else f" {low:,} to {high:,}."


def default_of(field: FieldInfo) -> str:
    """The default of a setting, as the table shows it."""
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator='').replace('.0', '')}`"
    if value in (None, (), "", PydanticUndefined):
        return "–"
    return f"`{json.dumps(value).strip(chr(34)).removesuffix('.0')}`"


def _options() -> str:
    """The settings that only some kinds of engine have, by the docstrings of their classes."""
    rows = []
    kinds: dict[str, list[str]] = {}
    for kind, declared in KINDS.items():
        for name in declared.options.__struct_fields__:
            kinds.setdefault(name, []).append(kind)
    for name, those in kinds.items():
        texts = (_attribute(each, name) for each in KINDS[those[0]].options.__mro__)
        rows.append((f"`{name}`", codes(those), next(text for text in texts if text)))
    return table(("setting", "of", "meaning"), rows)


def _attribute(kind: type, name: str) -> str:
    """Text of an attribute in the docstring of its class; empty if there is none."""
    found = re.search(rf"^    {name}: (.*(?:\n {{8,}}.*)*)", getdoc(kind) or "", re.MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    return text[:1].upper() + text[1:]
