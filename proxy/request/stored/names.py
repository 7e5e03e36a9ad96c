"""The stored objects that a request names: one in its path, others in its query and its body.

A body is decoded only if one of the fields' names is in it. Fields below `metadata`, in JSON schemas and in
arguments of tools are the client's own and name nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from engine_adapter import JsonBody, route_of
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.errors import BadRequest, Forbidden
from proxy.request.calls import Call
from proxy.request.stored.routes import COLLECTIONS, Kind, open_route, segments
from proxy.request.translate import INPUT_TOKENS_PATH, RESPONSES_PATH

CONTINUING = frozenset({RESPONSES_PATH, INPUT_TOKENS_PATH})
"""Routes whose body may name a response to go on from. Where engines get chats, kvpin keeps the responses."""
MAX_NAMED = 1024
"""The most objects that a request may name."""
PREVIOUS = "previous_response_id"
ITEM_ROUTES = (RESPONSES_PATH, "/v1/conversations")
"""Routes whose body may name items of earlier answers begin so."""
# Fields with an id, a list of them, or an object with an `id`.
_FIELDS: Mapping[str, Kind] = {
    "container": Kind.CONTAINER,
    "container_id": Kind.CONTAINER,
    "conversation": Kind.CONVERSATION,
    "file_id": Kind.FILE,
    "file_ids": Kind.FILE,
    "part_ids": Kind.PART,
    PREVIOUS: Kind.RESPONSE,
    "skill_id": Kind.SKILL,
    "vector_store_id": Kind.VECTOR_STORE,
    "vector_store_ids": Kind.VECTOR_STORE,
}
# Fields that name something only if they are an object with an `id`.
_OBJECTS: Mapping[str, Kind] = {
    "audio": Kind.AUDIO,
    "prompt": Kind.PROMPT,
    "video": Kind.VIDEO,
    "voice": Kind.VOICE,
}
_CLIENTS_OWN = frozenset({"arguments", "client_metadata", "input_schema", "metadata", "parameters", "schema"})
_ENDS = {**dict.fromkeys(_FIELDS, '"'), **dict.fromkeys(_OBJECTS, r'"\s*:\s*\{')}
# Names with the same first letter are one alternative, which makes the search twice as fast.
_MAYBE = re.compile(
    '"(?:{})'.format(
        "|".join(
            f"{first}(?:{'|'.join(name[1:] + end for name, end in _ENDS.items() if name[0] == first)})"
            for first in sorted({name[0] for name in _ENDS})
        )
    ).encode()
)
# A letter of a name may be escaped. No encoder does that to letters.
_ESCAPED = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
_ESCAPE = b"\\u00"
_FORM_PARTS = re.compile(r"[\[\].']+")
_REFERENCE = "item_reference"
_KINDS = {collection: kind for kind, collection in COLLECTIONS.items()}
_N_COLLECTION = 2  # segments of a collection's route


class Name(NamedTuple):
    """An object that a request names.

    Attributes:
        param: the field of the body or query that names it; None for the path.
    """

    kind: Kind
    id: str
    param: str | None = None


def name_in_path(path: str, *, isolated: bool) -> Name | None:
    """The object that a path names. With one tenant (not `isolated`), only responses are followed."""
    route = route_of(path)
    if not route.startswith("/v1/") or (not isolated and not route.startswith(f"{RESPONSES_PATH}/")):
        return None
    names = segments(route)
    kind = _KINDS.get("/".join(("", *names[:_N_COLLECTION])))
    if kind is None or len(names) == _N_COLLECTION:
        return None
    is_own = (found := open_route("POST", route)) is not None and found.kind is None
    return None if is_own else Name(kind, names[_N_COLLECTION])


def may_name(call: Call, *, isolated: bool) -> bool:
    """True if a request may name an object; cheap, even for a long body."""
    body = call.body
    if isinstance(body, JsonBody):
        if not isolated:
            return call.route in CONTINUING and PREVIOUS in body
        raw = body.raw
        if _MAYBE.search(raw) or (_ESCAPE in raw and _ESCAPED.search(raw)):
            return True
    return (isolated and "?" in call.path) or name_in_path(call.path, isolated=isolated) is not None


async def names_of(call: Call, *, isolated: bool) -> list[Name]:
    """The objects that a request names, that of its path first.

    Raises:
        msgspec.DecodeError: the body cannot be decoded.
        BadRequest: it names too many.
    """
    if not may_name(call, isolated=isolated):
        return []
    body, found = call.body, name_in_path(call.path, isolated=isolated)
    names = [] if found is None else [found]
    if isolated and "?" in call.path:
        query = parse_qsl(call.path.partition("?")[2])
        names += (Name(_FIELDS[field], value, field) for field, value in query if field in _FIELDS)
    if not isinstance(body, JsonBody):
        return names
    if not isolated:
        previous = body.get(PREVIOUS) if call.route in CONTINUING else None
        return [Name(Kind.RESPONSE, previous, PREVIOUS)] if previous and isinstance(previous, str) else names
    names += await off_loop(
        lambda: list(islice(_named(body.decoded()), MAX_NAMED + 1)), ms=len(body.raw) / JSON_BYTES_PER_MS
    )
    if len(names) > MAX_NAMED:
        raise BadRequest(f"the request names more than {MAX_NAMED} objects")
    return names


def names_items(body: JsonBody) -> bool:
    """True if a body names items of earlier answers by their ids alone."""
    lists = (body.get(field) for field in ("input", "items"))
    return any(_is_reference(item) for items in lists if isinstance(items, list) for item in items)


def _is_reference(item: Any) -> bool:  # noqa: ANN401 - JSON
    """As OpenAI's API, which takes an item without type and role for a reference."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == _REFERENCE or (
        item.get("type") is None and item.get("role") is None and item.get("id") is not None
    )


def check_form_field(name: str) -> None:
    """Raises Forbidden for a field of a form that may name an object, as `file_id` or `video[id]`."""
    parts = _FORM_PARTS.split(name)
    if not _FIELDS.keys().isdisjoint(parts) or ("id" in parts and not _OBJECTS.keys().isdisjoint(parts)):
        raise Forbidden(
            "kvpin has several tenants, and does not look up objects that a form names: send JSON", param=name
        )


def _named(whole: Any) -> Iterator[Name]:  # noqa: ANN401 - JSON
    todo = [whole]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            for field, inner in value.items():
                is_object = isinstance(inner, dict)
                # The `input` of a tool's call is the model's: an object, no list of items.
                if field in _CLIENTS_OWN or (field == "input" and is_object):
                    continue
                kind = _FIELDS.get(field) or (_OBJECTS.get(field) if is_object else None)
                if kind is not None:
                    yield from (Name(kind, each, field) for each in _ids(inner))
                todo.append(inner)


def _ids(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    values = value if isinstance(value, list) else [value]
    for each in values:
        named = each.get("id") if isinstance(each, dict) else each
        if named and isinstance(named, str):
            yield named
