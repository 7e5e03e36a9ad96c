"""Writes the pages of docs/reference/ from the code.

.venv/bin/python scripts/make_reference.py
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from inspect import getdoc
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin

import httpx
import typer
from annotated_types import Ge, Le
from click import Command, Context
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from starlette.applications import Starlette

from engine_adapter import PRIVATE_HEADERS, HttpTransport
from engine_adapter.http.control import ENDS_HERE
from engine_adapter.registry import KINDS
from engine_adapter.torch_engine.serve import app as engine_app
from proxy.app import Proxy, admin_api
from proxy.cli.main import app
from proxy.error_codes import Code
from proxy.fleet.fleet import Fleet
from proxy.headers import ANSWERED, ASKED, DROPPED_HEADERS, OWN_PREFIX
from proxy.observe.metrics import Metrics
from proxy.settings import Settings

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
_WIDTH = 100
_OF_ENGINES = "## All engines\n\nIn `[[engines]]`, `[[managed]]` and `[[discovery]]`."
_OF_KINDS = "## Engines of some kinds\n\nIn the same tables."
# Links of texts in the code are relative to docs/.
_LINK = re.compile(r"\]\((?!http)")


def main() -> None:
    """Writes all pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


def cli_page() -> str:
    """The help of every command."""
    parts = [
        "# Commands",
        "",
        "`scripts/docs` writes this page: the text that each command shows with `--help`.",
    ]
    for words, command in _commands("kvpin", typer.main.get_command(app)):
        parts += ["", f"## {words}", "", "```", _help(words, command), "```"]
    return "\n".join(parts) + "\n"


def admin_api_page() -> str:
    """Every route: what it does, what it takes."""
    document = asyncio.run(_document())
    schemas = document["components"]["schemas"]
    parts = [
        "# Admin API",
        "",
        "`scripts/docs` writes this page from `/admin/v1/openapi.json`, which also describes every answer.",
        "Requests carry the admin key: `authorization: Bearer KEY`. Without an admin key, the API answers",
        "only the machine it runs on. Errors have OpenAI's shape.",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts += ["", f"## {method.upper()} {path}", "", route["summary"]]
            fields = [*_parameters(route), *_fields(route, schemas)]
            if fields:
                parts += ["", "| field | type | |", "|---|---|---|", *fields]
    return "\n".join(parts) + "\n"


def errors_page() -> str:
    """Every error code: its status, what it means."""
    statuses = {code: str(code.status) for code in Code} | {Code.ENGINE_REJECTED: "the engine's"}
    return _page(
        """
        # Error codes

        `scripts/docs` writes this page from `proxy/error_codes.py`: the `error.code` of kvpin's own errors.
        An error of an engine keeps its status, code and further fields; some engines give a number or null as
        code. The [embedded engine](../engines/embedded.md) uses these codes, and a few of its own.

        A request that is no HTTP/1.1 gets a 400, one with a head of more than 64 KiB a 431, both in plain
        text. Errors under `/v1/messages` have [Anthropic's shape](../api.md#anthropics-api), which has
        no code.
        """,
        _table(
            ("code", "status", "meaning"),
            ((f"`{code}`", status, code.meaning) for code, status in statuses.items()),
        ),
    )


def headers_page() -> str:
    """Every header that kvpin reads, sets or drops."""
    return _page(
        """
        # Headers

        `scripts/docs` writes this page from `proxy/headers.py`.

        ## Of answers
        """,
        _table(
            ("header", "on", "meaning", "example"),
            ((_codes(each.names), each.on, each.meaning, f"`{each.example}`") for each in ANSWERED),
        ),
        f"""
        All other headers of an engine's answer are passed on, except {_codes(sorted(DROPPED_HEADERS))}
        and `{OWN_PREFIX}*`. Of an engine's error only those of the table are.

        ## Of requests

        kvpin reads these and passes them on, except where the table says otherwise.
        """,
        _table(("header", "meaning"), ((_codes(each.names), each.meaning) for each in ASKED)),
        f"""
        These are never passed on: `{OWN_PREFIX}*`, {_codes(sorted(ENDS_HERE))}.
        With several tenants, neither are
        {_codes(sorted(name.decode() for name in PRIVATE_HEADERS))}.
        """,
    )


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
        sections += [f"## `{title}`", _linked(_said(field)), _settings(part, own)]
        if part is engines[-1]:
            sections += [_OF_ENGINES, _settings(part, common), _OF_KINDS, _options()]
    return _page(
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
    rows = ((f"`{name}`", _default(field), f"{_said(field)}{_range(field)}") for name, field in fields)
    return _table(("setting", "default", "meaning"), rows)


def _said(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _range(field: FieldInfo) -> str:
    """What values there are, where the model says so."""
    low = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    high = next((each.le for each in field.metadata if isinstance(each, Le)), None)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        return f" One of {_codes(choices)}."
    return "" if high is None else f" {low:,} to {high:,}."


def _default(field: FieldInfo) -> str:
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
        rows.append((f"`{name}`", _codes(those), next(text for text in texts if text)))
    return _table(("setting", "of", "meaning"), rows)


def _attribute(kind: type, name: str) -> str:
    """What the docstring of a class says of one of its attributes; empty if nothing."""
    found = re.search(rf"^    {name}: (.*(?:\n {{8,}}.*)*)", getdoc(kind) or "", re.MULTILINE)
    text = " ".join(found[1].split()) if found else ""
    return text[:1].upper() + text[1:]


def metrics_page() -> str:
    """Every metric: its type, labels and meaning."""
    rows = (
        (f"`{each.name}`", each.kind, _codes(each.labels) or "–", each.text)
        for each in Metrics(Fleet()).declared
    )
    return _page(
        """
        # Metrics

        `scripts/docs` writes this page from `proxy/observe/`: what `/metrics` shows, with the text of each
        metric's `HELP`. Times are in seconds. `/metrics` answers in OpenMetrics if the client asks for it, as
        Prometheus does. How to read them: [watching](../operations.md#watching),
        [dashboards and alerts](../observe.md).

        An embedded engine has [its own metrics](../engines/embedded.md) on its port; a llama-server that
        kvpin starts has llama.cpp's on `/metrics`.
        """,
        _table(("metric", "type", "labels", "meaning"), rows),
    )


def _commands(words: str, command: Command) -> Iterator[tuple[str, Command]]:
    """A command and those below it."""
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        if words == "kvpin" and name == "engine":
            yield "kvpin engine", typer.main.get_command(engine_app)
        else:
            yield from _commands(f"{words} {name}", each)


def _help(words: str, command: Command) -> str:
    context = Context(command, info_name=words, terminal_width=_WIDTH, max_content_width=_WIDTH)
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines()).strip()


async def _document() -> dict[str, Any]:
    """The OpenAPI document, as a kvpin serves it."""
    transport = HttpTransport()
    proxy = Proxy(Settings(), transport)
    try:
        local = httpx.ASGITransport(Starlette(routes=[admin_api(proxy)]))
        async with httpx.AsyncClient(transport=local, base_url="http://127.0.0.1") as client:
            answer = await client.get("/admin/v1/openapi.json")
            found: dict[str, Any] = answer.raise_for_status().json()
            return found
    finally:
        await proxy.stop()


def _parameters(route: dict[str, Any]) -> Iterator[str]:
    for each in route.get("parameters", ()):
        where = "in the path" if each["in"] == "path" else "in the query"
        yield _row(each["name"], _type(each["schema"]), f"{where}. {each.get('description', '')}")


def _fields(route: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    """The fields of a route's JSON body."""
    schema = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body = schemas[schema["$ref"].rpartition("/")[2]] if schema else {}
    required = body.get("required", ())
    for name, field in body.get("properties", {}).items():
        said = "in the body" + (", required" if name in required else "")
        if field.get("default") not in (None, ""):
            said += f", by default `{json.dumps(field['default'])}`"
        yield _row(name, _type(field), said)


def _page(*parts: str) -> str:
    """A page of these parts."""
    return "\n\n".join(dedent(part).strip() for part in parts) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, of texts of the code."""
    lines = (titles, ["---"] * len(titles), *rows)
    return _linked("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def _linked(text: str) -> str:
    """A text of the code, with links as they are in docs/reference/."""
    return _LINK.sub("](../", text)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(name: str, kind: str, text: str) -> str:
    return f"| `{name}` | {kind} | {text.strip().rstrip('.')} |"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in a word or two."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        kinds = (_type(each) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


PAGES = {
    "cli.md": cli_page,
    "admin-api.md": admin_api_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "headers.md": headers_page,
}

if __name__ == "__main__":
    main()
