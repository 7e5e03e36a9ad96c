"""The OpenAPI 3.1 document, made from the endpoints and the structs they take and answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from proxy.api.admin.endpoint import Endpoint, answer

_REF = "#/components/schemas/{name}"
_Schema = dict[str, Any]


class OpenApi(msgspec.Struct):
    """An OpenAPI 3.1 document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


class ErrorFields(msgspec.Struct):
    """An error: its message, type and code, and the request field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error, in OpenAI's shape."""

    error: ErrorFields


def with_document(prefix: str, endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints, and one more that serves the document of them all."""

    async def get_document(_request: Request) -> Response:
        return answer(described)

    last = Endpoint("GET", "/openapi.json", get_document, "This document.", OpenApi)
    every = (*endpoints, last)
    described = document(prefix, every)
    return every


def document(prefix: str, endpoints: Iterable[Endpoint]) -> OpenApi:
    """The whole document; `prefix` is where the endpoints are mounted."""
    endpoints = list(endpoints)
    schemas, refs = _components(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(prefix + endpoint.path, {})[endpoint.method.lower()] = _route(endpoint, refs)
    return OpenApi(
        openapi="3.1.0",
        info={
            "title": "kvpin admin API",
            "version": version("kvpin"),
            "description": "It needs the admin key; without one, it answers only the machine it runs on.",
        },
        paths=paths,
        components={
            "schemas": schemas,
            "securitySchemes": {"adminKey": {"type": "http", "scheme": "bearer"}},
        },
        security=[{"adminKey": []}],
    )


def _components(endpoints: list[Endpoint]) -> tuple[_Schema, dict[object, _Schema]]:
    """The schemas by name, and a reference to that of each body and answer."""
    answers = dict.fromkeys(endpoint.answer for endpoint in endpoints if endpoint.answer is not None)
    told, schemas = _structs([*answers, ErrorAnswer])
    for schema in schemas.values():
        if "properties" in schema:
            schema["required"] = list(schema["properties"])  # defaults or not, an answer has all its fields
    bodies = dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None)
    taken, body_schemas = _structs([body for body in bodies if issubclass(body, msgspec.Struct)])
    refs, schemas = told | taken, schemas | body_schemas
    for body in bodies:
        if issubclass(body, BaseModel):
            schema = body.model_json_schema(ref_template=_REF.format(name="{model}"))
            schemas |= schema.pop("$defs", {}) | {body.__name__: schema}
            refs[body] = {"$ref": _REF.format(name=body.__name__)}
    for endpoint in endpoints:
        if endpoint.open_body and endpoint.body is not None:
            schemas[endpoint.body.__name__]["additionalProperties"] = True
    return schemas, refs


def _structs(kinds: list[type]) -> tuple[dict[object, _Schema], _Schema]:
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    return dict(zip(kinds, refs, strict=True)), schemas


def _route(endpoint: Endpoint, refs: dict[object, _Schema]) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "As asked." if endpoint.answer is not None else "Done."}
    if endpoint.answer is not None:
        kind = "text/event-stream" if endpoint.is_stream else "application/json"
        good["content"] = {kind: {"schema": refs[endpoint.answer]}}
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
    content: dict[str, Any] = {}
    if endpoint.body is not None:
        content["application/json"] = {"schema": refs[endpoint.body]}
    if endpoint.raw_body:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if content:
        route["requestBody"] = {"content": content}
    return route


def _operation_id(endpoint: Endpoint) -> str:
    words = re.sub(r"[{}]", "", endpoint.path).replace(".", "_").strip("/").split("/")
    return "_".join([endpoint.method.lower(), *words])
