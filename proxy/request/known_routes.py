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
# Lower, and `/v1/video` would mean `/v1/audio`.
_ALIKE = 0.8


def did_you_mean(route: str) -> str:
    """The end of a sentence about a route that does not exist: the known one that it is like, if any."""
    if route in _KNOWN:
        return ""
    nearest = get_close_matches(route, _KNOWN, 1, _ALIKE)
    if not nearest and route.strip("/"):
        nearest = [known for known in _KNOWN if known.startswith(f"{route.rstrip('/')}/")]
    return f"; did you mean {nearest[0]}?" if nearest else ""
