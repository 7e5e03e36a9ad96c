"""What the data plane lets in: paths, WebSockets, and forms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import unquote

from typing_extensions import override

from engine_adapter import (
    ADAPTER_FIELDS,
    NATIVE_ROUTES,
    HeaderPairs,
    Headers,
    NamedModel,
    route_of,
    websocket,
)
from proxy.errors import BadRequest, Forbidden, MethodNotAllowed, NotFound
from proxy.request.known_routes import ALLOW_POST, POST_ONLY, is_known
from proxy.request.stages import Stage

# --- the open paths of the data plane: most below `/v1`, and those that adapters declare ----------------

# kvpin does not serve these routes, because they change an engine for all clients.
ENGINE_ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
# Nor these: llama-server's clients could read, find, change and end each other's running answers.
STREAM_ROUTES = ("/v1/stream/", "/v1/streams/", "/v1/chat/completions/control/")
_ROOT = "/v1/"
# A client adds this to a base URL that ends with it already.
_TWICE = "/v1/v1/"


@lru_cache(maxsize=256)
def checked_path(target: bytes) -> str:
    """Path and query of a request for the engine. A native route that equals one of `/v1` becomes that one. A
    known route loses a slash at its end: engines redirect or refuse it with one. Raises NotFound: the route
    is not open, or has dot segments: they could leave `/v1` at the engine."""
    whole = target.decode("latin-1")
    path, _, query = whole.partition("?")
    if (native := NATIVE_ROUTES.get(path)) is not None:
        path = native.same_as or path
        return f"{path}?{query}" if query else path
    decoded = unquote(unquote(path))
    # Some servers ignore what follows a semicolon in a segment.
    segments = [segment.partition(";")[0] for segment in decoded.replace("\\", "/").split("/")]
    climbs = any(segment in (".", "..") for segment in segments)
    route = route_of(path)
    is_closed = route in ENGINE_ADMIN_ROUTES or f"{route}/".startswith(STREAM_ROUTES)
    is_open = (
        decoded.startswith(_ROOT) and decoded != _ROOT and not decoded.startswith(_TWICE) and not is_closed
    )
    if climbs or not path.isascii() or not is_open:
        raise NotFound(f"there is no route {decoded!r}{_hint(decoded)}")
    if path.endswith("/") and is_known(route):
        path = path.rstrip("/")
        return f"{path}?{query}" if query else path
    return whole.removesuffix("?")


def _hint(path: str) -> str:
    """A hint for the error message if the path looks like the result of a wrong base URL."""
    if path in ("/v1", _ROOT):
        return ": OpenAI's API begins here; /v1/models lists the models"
    if path.startswith(f"{_TWICE}messages"):
        return ": Anthropic's clients add /v1 themselves: set base_url to http://HOST:PORT"
    return ": write /v1 once, as the end of base_url" if path.startswith(_TWICE) else ""


def check_method(method: str, path: str) -> None:
    """Checks the method of a path that is open. Raises MethodNotAllowed: the route takes only POST; NotFound:
    only the engine's operator may use the method of a native route."""
    asked = path.partition("?")[0]
    if route_of(path) in POST_ONLY and method != "POST":
        raise MethodNotAllowed(f"{asked} takes POST, not {method}", allow=ALLOW_POST)
    native = NATIVE_ROUTES.get(asked)
    if native is not None and method != native.method and (method, native.method) != ("HEAD", "GET"):
        raise NotFound(f"there is no route {method} {asked}")


# --- WebSockets: which ones kvpin passes on, and the keys that browsers send in their subprotocols ------
# Their frames are not read: their prompts get no tenant's salt, and nobody checks which responses they
# name. So with several tenants, no WebSocket is passed on.

_SUBPROTOCOLS = b"sec-websocket-protocol"
# A page cannot set headers on a WebSocket: OpenAI's API takes its key as a subprotocol.
_KEY = "openai-insecure-api-key."


def check_websocket(path: str, *, isolated: bool) -> None:
    """Raises NotFound for a WebSocket that no kind of engine has, and Forbidden if there are several tenants
    (`isolated`)."""
    route = path.partition("?")[0]
    if websocket(route) not in NATIVE_ROUTES:
        raise NotFound(f"there is no WebSocket {route!r}")
    if isolated:
        raise Forbidden(
            "kvpin passes no WebSockets on while it has several tenants: it could not keep their KV apart"
        )


def with_key(headers: Headers) -> Headers:
    """The headers of an opening handshake. A key among the subprotocols moves to `authorization`."""
    offered = _offered(headers)
    keys = [each for each in offered if each.startswith(_KEY)]
    if not keys:
        return headers
    kept = [pair for pair in headers.raw if pair[0] not in (_SUBPROTOCOLS, b"authorization")]
    kept.append((b"authorization", f"Bearer {keys[0].removeprefix(_KEY)}".encode("latin-1")))
    others = ", ".join(each for each in offered if each not in keys)
    return Headers([*kept, (_SUBPROTOCOLS, others.encode("latin-1"))] if others else kept)


class Subprotocol(Stage):
    """Gives the client of a WebSocket the first of its subprotocols if the engine chooses none: most engines
    know none, and without a choice browsers close the WebSocket again."""

    marks, reads_head = (), True

    def __init__(self, headers: Headers) -> None:
        """`headers`: those of the opening handshake, without a key."""
        self._first = next(iter(_offered(headers)), None)

    @override
    def begin(self, headers: HeaderPairs) -> HeaderPairs:
        is_chosen = any(name == _SUBPROTOCOLS for name, _ in headers)
        if self.status == HTTPStatus.SWITCHING_PROTOCOLS and self._first is not None and not is_chosen:
            return [*headers, (_SUBPROTOCOLS, self._first.encode("latin-1"))]
        return headers


def _offered(headers: Headers) -> list[str]:
    """The subprotocols that the client offers, best first."""
    lists = [value.decode("latin-1") for name, value in headers.raw if name == _SUBPROTOCOLS]
    return [each for text in lists for each in map(str.strip, text.split(",")) if each]


# --- reads the names of the fields of a multipart form, and which model it names ------------------------
# Servers read odd forms in different ways. Forms whose fields they could read otherwise than kvpin are
# refused.

FORM_BYTES_PER_MS = 4 << 20
"""Bytes of a form that are read in about 1 ms."""
# The most fields of a form, bytes of a field's headers, and bytes of a model's name.
_MAX_FIELDS, _MAX_HEAD, _MAX_NAME = 1024, 8192, 1024
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]{1,70})"|([^\s";,]{1,70}))\s*(?:;|$)', re.IGNORECASE)
# Names and values in another character set than this one are others to kvpin.
_CHARSET = re.compile(r'charset(?!\s*=\s*"?utf-?8"?\s*(?:;|$))', re.IGNORECASE)
# All names of a field, as servers may read them: the first or the last, encoded or not. Some take these for
# white space, too.
_SPACE = rb"[\s\x1c-\x1f\x85\xa0]*"
_NAMES = re.compile(rb'\bname\*?\d*\*?%b=%b"?([^";\r]*)' % (_SPACE, _SPACE), re.IGNORECASE)
_UNUSUAL = "the body is no multipart form, or an unusual one"
_NEW_LINE, _HEAD_END = b"\r\n", b"\r\n\r\n"
_LAST = (b"--", b"--\r\n", b"--\r\n\r\n")  # Ruby's clients end with an empty line
# Header lines as all servers read them. Some join names in pieces (`name*0`).
_HEAD = re.compile(rb"(?:\r\n[!#-'*+.0-9A-Z^-z|~-]+:[^\0\r\n]*)+")
_IN_PIECES = re.compile(rb"\bname\*\d", re.IGNORECASE)
_MODEL = re.compile(
    rb'\r\ncontent-disposition:[ \t]*form-data;[ \t]*name=(?:"model"|model)[ \t]*(?=\r\n|$)', re.IGNORECASE
)
_DISPOSITION = b"\r\ncontent-disposition:"


@dataclass(frozen=True, slots=True)
class FormFields:
    """What kvpin needs to know of a form.

    Attributes:
        names: the names of its fields, in every way in which a server may read them.
        model: the first model that it names; None if it names none.
    """

    names: list[str]
    model: NamedModel | None

    def check_one_model(self) -> None:
        """Raises BadRequest if servers may take another model than `model`, or an adapter."""
        found = 0
        for name in self.names:
            read = name.rpartition("'")[2]  # without the character set of an encoded name
            found += read == "model"
            if found > 1 or read in ADAPTER_FIELDS:
                raise BadRequest("with a key for some models, a form names one model, as `model`", param=read)


def read_form(body: bytes, kind: str) -> FormFields:
    """Reads a form. `kind` is its content type. Raises BadRequest if it is none, or an odd one."""
    found = _BOUNDARY.search(kind)
    if found is None or kind.lower().count("boundary") > 1:
        raise BadRequest("the content type of a form needs one boundary")
    if _CHARSET.search(kind) is not None:
        raise BadRequest("a form is read as UTF-8: its content type must name no other character set")
    mark = b"--" + (found[1] or found[2]).encode("latin-1")
    names, model = list[str](), None
    at = 0 if body.startswith(mark) else -1
    for _ in range(_MAX_FIELDS):
        head_at = at + len(mark)
        if at >= 0 and len(body) - head_at <= len(_LAST[-1]) and body[head_at:] in _LAST:
            return FormFields(names, model)
        head_end, after = body.find(_HEAD_END, head_at, head_at + _MAX_HEAD), body.find(mark, head_at)
        start, end = head_end + len(_HEAD_END), after - len(_NEW_LINE)
        head = body[head_at:head_end]
        is_field = at >= 0 and head_end >= 0 and start <= end and body.startswith(_NEW_LINE, end)
        if not is_field or _HEAD.fullmatch(head) is None or _IN_PIECES.search(head):
            raise BadRequest(_UNUSUAL)
        given = {each.replace(b"\\", b"").rstrip() for each in _NAMES.findall(head)}
        names += sorted(unquote(each.decode("latin-1")).strip() for each in given)
        if b"model" in given:
            if _MODEL.search(head) is None or head.lower().count(_DISPOSITION) > 1:
                raise BadRequest(_UNUSUAL, param="model")
            model = _model(body[start:end], start) if model is None and start < end else model
        at = after
    raise BadRequest(f"the form has more than {_MAX_FIELDS} fields")


def _model(value: bytes, start: int) -> NamedModel:
    if len(value) > _MAX_NAME:
        raise BadRequest("the form's model is longer than a name", param="model")
    try:
        return NamedModel(value.decode(), start, start + len(value))
    except UnicodeDecodeError as error:
        raise BadRequest("the form's model is not UTF-8", param="model") from error
