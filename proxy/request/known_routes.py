"""What kvpin knows of routes that it passes on: who may use them, and the objects that engines keep for
clients."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from typing_extensions import override

from engine_adapter import (
    HINTS,
    NATIVE_ROUTES,
    OWN_IDS,
    PRIVATE_FIELDS,
    PRIVATE_WITHIN,
    UNREADABLE,
    HeaderPairs,
    JsonBody,
    route_of,
)
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.errors import Forbidden
from proxy.request.calls import Call
from proxy.request.stages import Event, Stage
from proxy.request.tenants import private_field
from proxy.request.translate import INPUT_TOKENS_PATH, RESPONSES_PATH
from proxy.request.translate.responses_store import MAX_ID

# --- objects that engines keep for clients: what several tenants may name, which engine keeps a response ---
# Engines know no tenants. With several, a route that reaches what engines keep is refused, and so is a field
# that names it. Responses are the exception: a tenant reaches those that it got through kvpin. With one
# tenant, or without keys, all is passed on, and a request that names a response goes to the engine that made
# it.

PREVIOUS = "previous_response_id"
CONTINUING = frozenset({RESPONSES_PATH, INPUT_TOKENS_PATH})
"""Routes whose body may name a response to go on from. Where engines get chats, kvpin keeps the responses."""
_NO_IDS = frozenset({"compact", "input_tokens"})
# Fields with an id, a list of them, or an object with an `id`; and those that name something as an object.
_FIELDS = frozenset({
    "container", "container_id", "conversation", "file_id", "file_ids", "part_ids", PREVIOUS, "skill_id",
    "vector_store_id", "vector_store_ids",
})  # fmt: skip
_OBJECTS = frozenset({"audio", "prompt", "video", "voice"})
_CLIENTS_OWN = frozenset({"arguments", "client_metadata", "input_schema", "metadata", "parameters", "schema"})
# Most bodies have none of these: they are not decoded. Common beginnings make the search twice as fast.
_MAYBE = re.compile(
    rb'"(?:audio"\s*:\s*\{|con(?:tainer(?:_id)?|versation)"|file_ids?"|skill_id"'
    rb'|p(?:art_ids"|revious_response_id"|rompt"\s*:\s*\{)|v(?:ector_store_ids?"|(?:ideo|oice)"\s*:\s*\{))'
)
# A letter of a name may be escaped. No encoder does that to letters.
_ESCAPED = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
_PRIVATE = PRIVATE_FIELDS | OWN_IDS | HINTS | {path[0] for path in PRIVATE_WITHIN}
_FORM_PARTS = re.compile(r"[\[\].']+")
MAX_HOMES = 10_000  # the most responses whose engines are known, for each tenant
_FAILED = 300


class NamedResponse(NamedTuple):
    """The response that a request names. `param`: the field that names it; None for the path."""

    id: str
    param: str | None = None


def response_in(route: str) -> str | None:
    """The id of the response that a route is about; None if it is about none."""
    below = route.removeprefix(f"{RESPONSES_PATH}/")
    return None if below == route or below in _NO_IDS else below.partition("/")[0]


def response_of(call: Call) -> NamedResponse | None:
    """The response that a request names in its path, or goes on from. Raises msgspec.DecodeError."""
    body = call.body
    if call.route in CONTINUING:
        previous = body.get(PREVIOUS) if isinstance(body, JsonBody) and PREVIOUS in body else None
        return NamedResponse(previous, PREVIOUS) if previous and isinstance(previous, str) else None
    found = response_in(call.route)
    return NamedResponse(found) if found is not None else None


async def check_fields(call: Call) -> None:
    """Checks what a request of one of several tenants names, beside the response of `response_of`. Raises
    Forbidden if an engine may keep it for another tenant, msgspec.DecodeError."""
    query = parse_qsl(call.path.partition("?")[2]) if "?" in call.path else ()
    named = next((name for name, _ in query if name in _FIELDS), None)
    if named is None and isinstance(body := call.body, JsonBody):
        raw = body.raw
        if _MAYBE.search(raw) or (b"\\u00" in raw and _ESCAPED.search(raw)):
            goes_on = (known := response_of(call)) is not None and known.param is not None
            ms = len(raw) / JSON_BYTES_PER_MS
            named = await off_loop(lambda: next(_named(body.decoded(), goes_on=goes_on), None), ms=ms)
    if named is not None:
        raise _not_followed(named)


async def check_items(body: JsonBody) -> None:
    """Raises Forbidden if the body names items of earlier answers, which its engine would look up."""
    if await off_loop(lambda: _names_items(body), ms=len(body.raw) / JSON_BYTES_PER_MS):
        raise _not_followed("input")


def check_form(names: Iterable[str]) -> None:
    """Raises Forbidden if one of a form's fields may name an object, as `file_id` or `video[id]`; BadRequest
    if one is a field between servers, or may hold one: what it holds is not read."""
    for name in names:
        parts = _FORM_PARTS.split(name)
        if not _PRIVATE.isdisjoint(parts):
            raise private_field(name[:MAX_ID])
        if not _FIELDS.isdisjoint(parts) or ("id" in parts and not _OBJECTS.isdisjoint(parts)):
            raise _not_followed(name)


def _not_followed(field: str) -> Forbidden:
    return Forbidden(
        f"{field[:MAX_ID]!r} names what an engine keeps: kvpin's API keys belong to several tenants, and it "
        "cannot tell whose that is. Send the content itself",
        param=field[:MAX_ID],
    )


def _named(whole: dict[str, Any], *, goes_on: bool) -> Iterator[str]:
    """The fields of a body that name an object. If it `goes_on` from a response, that is another one. Fields
    below `metadata`, in JSON schemas and in arguments of tools are the client's own and name nothing."""
    todo: list[Any] = [{**whole, PREVIOUS: None} if goes_on else whole]
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
                ids = inner if isinstance(inner, list) else [inner]
                if (field in _FIELDS or (is_object and field in _OBJECTS)) and any(map(_is_id, ids)):
                    yield field
                todo.append(inner)


def _is_id(value: Any) -> bool:  # noqa: ANN401 - JSON
    named = value.get("id") if isinstance(value, dict) else value
    return bool(named) and isinstance(named, str)


def _names_items(body: JsonBody) -> bool:
    """True if a body names items of earlier answers by their ids alone. As OpenAI's API, which takes an item
    without type and role for a reference."""
    items = body.get("input")
    return any(
        item.get("type") == "item_reference"
        or (item.get("type") is item.get("role") is None and item.get("id") is not None)
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict)
    )


class Home(NamedTuple):
    """The process that keeps a response: an engine's id, and its `EngineInfo.instance`."""

    engine: str
    instance: str | None


class ResponseHomes:
    """Response → engine, of each tenant. The one that was used longest ago is forgotten first."""

    def __init__(self) -> None:
        """At first for one tenant, without a name."""
        self._homes: dict[str | None, OrderedDict[str, Home]] = {None: OrderedDict()}

    def divide(self, tenants: Iterable[str]) -> None:
        """Only these tenants have responses from now on; none are one without a name. Those of others go."""
        names: set[str | None] = {*tenants} or {None}
        self._homes = {name: self._homes.get(name, OrderedDict()) for name in names}

    def keep(self, tenant: str | None, response_id: str, home: Home) -> None:
        """A tenant got a response from an engine. An engine may give an id again, after a restart or a
        DELETE: then the response is the last one's alone."""
        if tenant not in self._homes or len(response_id) > MAX_ID:
            return
        for owned in self._homes.values():
            if owned.get(response_id) == home:
                del owned[response_id]
        homes = self._homes[tenant]
        homes[response_id] = home
        if len(homes) > MAX_HOMES:
            homes.popitem(last=False)

    def find(self, tenant: str | None, response_id: str) -> Home | None:
        """The engine that keeps a tenant's response; None if that is not known."""
        homes = self._homes.get(tenant)
        if homes is None or (home := homes.get(response_id)) is None:
            return None
        homes.move_to_end(response_id)
        return home


class _Made(msgspec.Struct):
    """An answer with a new response, or an event of its stream."""

    id: str | None = None
    response: _Made | None = None


_decode = msgspec.json.Decoder(_Made).decode


class ResponseNoter(Stage):
    """Notes the id of the new response in an answer."""

    reads_head = True

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    @override
    def begin(self, headers: HeaderPairs) -> HeaderPairs:
        if self.status >= _FAILED:
            self.marks = ()
        return headers

    @override
    def event(self, event: Event) -> Iterable[Event]:
        """Looks for the id in a whole answer, or in the first event of a stream that says something."""
        if event.data and self.marks is None:
            self.marks = ()
            with suppress(*UNREADABLE):
                made = event.read(_decode)
                if (given := (made.response or made).id) is not None:
                    self._note(given)
        return (event,)


# --- routes that kvpin passes on: which several tenants may use, which take only POST, what a wrong one means

# Method → the routes that several tenants may use, beside those of one response.
OPEN: Mapping[str, tuple[str, ...]] = {
    "POST": (
        "/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/chat/completions/render",
        "/v1/completions", "/v1/completions/render", RESPONSES_PATH, "/v1/responses/compact",
        INPUT_TOKENS_PATH, "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/classify",
        "/v1/moderations", "/v1/pooling", "/v1/ranking", "/v1/rerank", "/v1/reranking", "/v1/score",
        "/v1/tokenize", "/v1/detokenize", "/v1/audio/speech", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/v1/images/edits", "/v1/images/generations", "/v1/images/variations",
        "/apply-template", "/classify", "/completion", "/completions", "/detokenize", "/embedding",
        "/embeddings", "/encode", "/generate", "/infill", "/pooling", "/rerank", "/reranking", "/score",
        "/tokenize", "/v2/embed", "/v2/rerank",
    ),
    "GET": (
        "/v1/health", "/v1/health/live", "/v1/health/ready", "/v1/metadata", "/v1/version", "/version",
        "/get_model_info", "/lora-adapters", "/model_info", "/ping", "/props", "/tokenizer_info",
    ),
}  # fmt: skip
_OF_A_RESPONSE = frozenset({"GET ", "DELETE ", "GET input_items", "POST cancel"})
_CHATS = "/v1/chat/completions"
# A GET of chats lists those that an engine keeps.
POST_ONLY = frozenset(OPEN["POST"]) - {_CHATS, RESPONSES_PATH}  # routes that take no other method
_KEPT = ("conversations", "files", "uploads", "videos", "vector_stores", "containers")
_KNOWN = (*OPEN["POST"], *OPEN["GET"], *(f"/v1/{name}" for name in _KEPT), "/v1/models")
ALLOW_POST = "POST, OPTIONS"  # the methods of such a route: kvpin itself answers OPTIONS
# The 404 of llama-server and of FastAPI for a path that they do not have.
_NOTHING_THERE = frozenset({"file not found", "not found"})
_SHOWN = 100  # characters of a client's path that an error repeats
_ALIKE = 0.8  # lower, and `/v1/video` would mean `/v1/audio`


def check_route(method: str, path: str) -> None:
    """Raises Forbidden for a route that several tenants may not use."""
    route, read = route_of(path), "GET" if method == "HEAD" else method
    if response_in(route) is None:
        is_open = route in OPEN.get(read, ())
    else:
        is_open = f"{read} {''.join(route.split('/', 4)[4:])}" in _OF_A_RESPONSE
    if not is_open:
        meant = _nearest(route, [*OPEN["POST"], *OPEN["GET"], "/v1/models"])
        hint = f" (did you mean {meant}?)" if meant is not None else ""
        raise Forbidden(
            f"kvpin refuses {method} {path.partition('?')[0]}{hint}: its API keys belong to several "
            "tenants, and it cannot tell whose objects engines keep there. Use one tenant, or for each "
            "tenant a kvpin with engines of its own"
        )


def is_known(route: str) -> bool:
    """True if kvpin knows the route: not if it names an object, or is written wrong."""
    return route in _KNOWN or route in NATIVE_ROUTES


def of_lacking(route: str, message: str) -> str:
    """The end of an engine's 404 `message`: that it is about the route, where the engine only says that there
    is nothing, and the route that may be meant."""
    is_lacking = message.strip().rstrip(".").lower() in _NOTHING_THERE
    lacks = f": no engine that was asked has the route {route[:_SHOWN]}" if is_lacking else ""
    meant = _nearest(route, _KNOWN)
    return f"{lacks}; did you mean {meant}?" if meant is not None else lacks


def _nearest(route: str, among: Sequence[str]) -> str | None:
    """The route that one which does not exist is like; None if there is none, or if it exists."""
    if route in _KNOWN or not route.strip("/"):
        return None
    nearest = get_close_matches(route, among, 1, _ALIKE)
    begun = (known for known in among if known.startswith(f"{route.rstrip('/')}/"))
    return nearest[0] if nearest else next(begun, None)
