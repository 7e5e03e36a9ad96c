"""Rooms in which two fake SGLangs meet that serve half of a request each. They run in threads of one process.

As in 0.5.23: a prefill server computes a prompt once a decode server is in its room, and answers one token.
Then the decode server answers. Either waits for ever if the other one does not come, and goes on when its
client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from starlette.requests import Request

LOOK_S = 0.003


class LeftError(Exception):
    """The client left while its request waited in a room."""


@dataclass(slots=True, eq=False)
class Room:
    """One room.

    Attributes:
        has_decoder: a decode server is in it.
        cached: prompt tokens that the prefill server reused; None until it has computed the prompt.
    """

    opened: ClassVar[dict[tuple[str, int, int], Room]] = {}

    has_decoder: bool = False
    cached: int | None = None

    @classmethod
    def of(cls, host: str, port: int, number: int) -> Room:
        """A room of the bootstrap server at that address."""
        return cls.opened.setdefault((host, port, number), cls())


async def until(request: Request, is_so: Callable[[], bool]) -> None:
    """Waits for it. Raises LeftError if the client leaves meanwhile."""
    while not is_so():
        if await request.is_disconnected():
            raise LeftError
        await asyncio.sleep(LOOK_S)
