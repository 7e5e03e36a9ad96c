"""What kvpin knows of routes that it passes on: which take only POST, and which one a wrong path means."""

from __future__ import annotations

from difflib import get_close_matches

from proxy.request.stored import COLLECTIONS, STATELESS

_CHATS = "/v1/chat/completions"
# A GET of chats lists those that an engine keeps.
POST_ONLY = frozenset(STATELESS["POST"]) - {_CHATS}
"""Routes that take no other method."""
_KNOWN = (*STATELESS["POST"], *STATELESS["GET"], *COLLECTIONS.values(), "/v1/models")
ALLOW_POST = "POST, OPTIONS"
"""The methods of such a route: kvpin itself answers OPTIONS."""
# The 404 of llama-server and of FastAPI for a path that they do not have.
_NOTHING_THERE = frozenset({"file not found", "not found"})
# Characters of a client's path that an error repeats.
_SHOWN = 100
# Lower, and `/v1/video` would mean `/v1/audio`.
_ALIKE = 0.8


def of_lacking(route: str, message: str) -> str:
    """The end of an engine's 404 `message`: that it is about the route, where the engine only says that there
    is nothing, and the route that may be meant."""
    is_lacking = message.strip().rstrip(".").lower() in _NOTHING_THERE
    lacks = f": no engine that was asked has the route {route[:_SHOWN]}" if is_lacking else ""
    return lacks + did_you_mean(route)


def did_you_mean(route: str) -> str:
    """The end of a sentence about a route that does not exist: the known one that it is like, if any."""
    if route in _KNOWN:
        return ""
    nearest = get_close_matches(route, _KNOWN, 1, _ALIKE)
    if not nearest and route.strip("/"):
        nearest = [known for known in _KNOWN if known.startswith(f"{route.rstrip('/')}/")]
    return f"; did you mean {nearest[0]}?" if nearest else ""
