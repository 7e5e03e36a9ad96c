"""The page of the admin API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
from starlette.applications import Starlette

from engine_adapter import HttpTransport
from proxy.api.together import Together
from proxy.server.app import Proxy, admin_api
from proxy.settings import Settings


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


async def _document() -> dict[str, Any]:
    """The OpenAPI document, as a kvpin serves it."""
    transport = HttpTransport()
    proxy = Proxy(Settings(), transport)
    try:
        local = httpx.ASGITransport(Starlette(routes=[admin_api(proxy, Together())]))
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
