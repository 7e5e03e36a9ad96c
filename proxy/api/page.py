"""The page at `/ui/`: fixed files, read once. It holds no data; its scripts ask the admin API, with the key
that the operator types in.

Addresses in it are relative, so that it also works below a path of another server.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
# The page loads only its own files, asks only its own origin, and no page shows it in a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "cache-control": "no-cache",  # asked for again, by its etag
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def text_of(name: str) -> str:
    """One file of the page, as text."""
    return (_FOLDER / name).read_text(encoding="utf-8")


class WebPage:
    """The files of the page."""

    def __init__(self) -> None:
        self._files = {
            path.relative_to(_FOLDER).as_posix(): path.read_bytes()
            for path in _FOLDER.rglob("*")
            if path.suffix in _TYPES
        }

    def routes(self) -> list[Route]:
        """The routes to mount at the root."""
        return [Route("/ui", self.enter), Route("/ui/{name:path}", self.get)]

    async def enter(self, _request: Request) -> Response:
        """Leads to the page. Relative: the client may know kvpin by another name and path."""
        return Response(status_code=307, headers={"location": "ui/"})

    async def get(self, request: Request) -> Response:
        """One file."""
        name = request.path_params["name"] or "index.html"
        content = self._files.get(name)
        if content is None:
            raise HTTPException(404)
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**_HEADERS, "etag": etag}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": _TYPES[Path(name).suffix]})
