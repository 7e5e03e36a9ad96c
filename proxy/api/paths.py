"""The open paths of the data plane: most below `/v1`, and those that adapters declare."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import unquote

from engine_adapter import NATIVE_ROUTES, route_of
from proxy.errors import MethodNotAllowed, NotFound
from proxy.request.known_routes import ALLOW_POST, POST_ONLY

# kvpin does not serve these routes, because they change an engine for all clients.
ENGINE_ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
# Nor these: llama-server's clients could read, find, change and end each other's running answers.
STREAM_ROUTES = ("/v1/stream/", "/v1/streams/", "/v1/chat/completions/control/")
_ROOT = "/v1/"
# A client adds this to a base URL that ends with it already.
_TWICE = "/v1/v1/"


@lru_cache(maxsize=256)
def checked_path(target: bytes) -> str:
    """Path and query of a request for the engine. A native route that equals one of `/v1` becomes that one.

    Raises:
        NotFound: the route is not open, or has dot segments: they could leave `/v1` at the engine.
    """
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
    return whole.removesuffix("?")


def _hint(path: str) -> str:
    """A hint for the error message if the path looks like the result of a wrong base URL."""
    if path in ("/v1", _ROOT):
        return ": OpenAI's API begins here; /v1/models lists the models"
    return ": write /v1 once, as the end of base_url" if path.startswith(_TWICE) else ""


def check_method(method: str, path: str) -> None:
    """Checks the method of a path that is open.

    Raises:
        MethodNotAllowed: the route takes only POST.
        NotFound: only the engine's operator may use the method of a native route.
    """
    asked = path.partition("?")[0]
    if route_of(path) in POST_ONLY and method != "POST":
        raise MethodNotAllowed(f"{asked} takes {ALLOW_POST}, not {method}", allow=ALLOW_POST)
    native = NATIVE_ROUTES.get(asked)
    if native is not None and method != native.method and (method, native.method) != ("HEAD", "GET"):
        raise NotFound(f"there is no route {method} {asked}")
