"""Writes the pages of docs/reference/ from the code: the help of every command, the routes of the admin API.

.venv/bin/python scripts/make_reference.py
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import typer
from click import Command, Context
from starlette.applications import Starlette

from engine_adapter import HttpTransport
from engine_adapter.torch_engine.serve import app as engine_app
from proxy.app import Proxy, admin_api
from proxy.cli.main import app
from proxy.settings import Settings

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
_WIDTH = 100


def main() -> None:
    """Writes both pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in (("cli.md", cli_page()), ("admin-api.md", admin_api_page())):
        (REFERENCE / name).write_text(text, encoding="utf-8")


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


if __name__ == "__main__":
    main()
