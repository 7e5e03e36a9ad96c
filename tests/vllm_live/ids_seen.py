"""A middleware for vLLM that logs which chats come with token ids."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("vllm.ids_seen")
_MARK = b'"prompt_token_ids"'


class IdsSeen:
    """Logs a line for each."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def read() -> Any:
            message = await receive()
            if _MARK in message.get("body", b""):
                log.warning("a chat with token ids")
            return message

        await self._app(scope, read, send)
