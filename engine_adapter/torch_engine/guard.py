"""Decides which clients the embedded engine answers: those with its key, or without a key all but web pages.

A browser on this machine reaches the engine's port for any page. The routes show and drop KV of all tenants.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_adapter.http.web_pages import page_asking
from engine_adapter.torch_engine.web import ApiError, error_response

_OPEN = "/health"


class Guard:
    """Answers a refused request by itself, and passes all others on. `/health` needs no key."""

    def __init__(self, app: ASGIApp, key: str | None = None) -> None:
        """`key`: what requests must give as `Authorization: Bearer <key>`; None for no key."""
        self._app = app
        self._digest = None if key is None else _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._digest is not None:
            given = Headers(scope=scope).get("authorization", "")
            if scope["path"] == _OPEN or hmac.compare_digest(self._digest, _digest(given.encode("latin-1"))):
                return None
            return ApiError(
                "the engine needs its key: Authorization: Bearer <key>", status=401, code="invalid_api_key"
            )
        page = page_asking(scope["headers"], lambda: scope["scheme"], lambda: scope["server"])
        if page is None:
            return None
        return ApiError(f"the engine answers no web page ({page})", status=403, code="forbidden")


def _digest(text: bytes) -> bytes:
    """Of equal length for all texts: the time of a comparison tells nothing of the key."""
    return hashlib.sha256(text).digest()
