"""On PYTHONPATH, Python imports this before the server: it logs which requests come with token ids."""

from __future__ import annotations

import sys
from typing import Any

from starlette.applications import Starlette

_MARK = b'"input_ids"'
_serve = Starlette.__call__


async def _serve_and_tell(self: Starlette, scope: Any, receive: Any, send: Any) -> None:
    async def read() -> Any:
        message = await receive()
        if _MARK in message.get("body", b""):
            sys.stderr.write("a chat with token ids\n")
        return message

    await _serve(self, scope, read, send)


Starlette.__call__ = _serve_and_tell  # type: ignore[method-assign]
