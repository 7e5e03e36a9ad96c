"""The OpenAPI 3.1 document, made from the endpoints and their structs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec

from proxy.api.admin.answers import ErrorAnswer
from proxy.api.admin.endpoint import Endpoint

_REF = "#/components/schemas/{name}"


def document(prefix: str, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The whole document; `prefix` is where the endpoints are mounted."""
    endpoints = list(endpoints)
    structs = [
        kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer) if kind is not None
    ]
    unique = list(dict.fromkeys([*structs, ErrorAnswer]))
    refs, schemas = msgspec.json.schema_components(unique, ref_template=_REF)
    by_struct = dict(zip(unique, refs, strict=True))
    for endpoint in endpoints:
        if endpoint.open_body and endpoint.body is not None:
            schemas[endpoint.body.__name__]["additionalProperties"] = True
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(prefix + endpoint.path, {})[endpoint.method.lower()] = _route(endpoint, by_struct)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvpin admin API",
            "version": version("kvpin"),
            "description": "Its own key; without one, it answers this machine only.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"adminKey": []}],
    }


def _route(endpoint: Endpoint, refs: dict[object, dict[str, Any]]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "As asked." if endpoint.answer is not None else "Done."}
    if endpoint.answer is not None:
        good["content"] = {"application/json": {"schema": refs[endpoint.answer]}}
    error = {"description": "An error.", "content": {"application/json": {"schema": refs[ErrorAnswer]}}}
    route: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "responses": {**{str(status): good for status in endpoint.statuses}, "default": error},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.text, "schema": {"type": query.kind}}
        for query in endpoint.query
    ]
    if parameters:
        route["parameters"] = parameters
    if endpoint.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": refs[endpoint.body]}}
        if endpoint.raw_body:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        route["requestBody"] = {"content": content}
    return route


def _operation_id(endpoint: Endpoint) -> str:
    words = re.sub(r"[{}]", "", endpoint.path).replace(".", "_").strip("/").split("/")
    return "_".join([endpoint.method.lower(), *words])
