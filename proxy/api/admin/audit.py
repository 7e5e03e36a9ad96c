"""The audit log of the admin API: one line for each action, done or refused. It repeats nothing of bodies."""

from __future__ import annotations

import structlog
from starlette.requests import HTTPConnection
from starlette.types import Message, Send

log = structlog.get_logger(__name__)

_REFUSED = (401, 403)
# Characters of a path that a line repeats.
_MOST = 200


def audited(connection: HTTPConnection, send: Send, right: str) -> Send:
    """`send`, which also logs who asked for what, by which right, and the status of the answer."""

    async def send_and_log(message: Message) -> None:
        if message["type"] == "http.response.start":
            log.info(
                "admin action",
                method=connection.scope["method"],
                path=_path(connection),
                status=int(message["status"]),
                peer=connection.client.host if connection.client is not None else None,
                by=right if message["status"] not in _REFUSED else None,
            )
        await send(message)

    return send_and_log


def _path(connection: HTTPConnection) -> str:
    """The path as it was sent, in ASCII: a decoded one could hold control characters."""
    raw: bytes = connection.scope["raw_path"]
    return raw[:_MOST].decode("ascii", "backslashreplace")
