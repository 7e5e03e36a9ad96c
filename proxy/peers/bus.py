"""The seam between a kvpin and how frames reach the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BusCallbacks:
    """The callbacks of an exchange.

    Attributes:
        receive: with each frame that comes, in the order in which its sender published them.
        joined: when there is somebody new, or the exchange works again.
        ended: with the number of a kvpin whose process is known to have ended.
    """

    receive: Callable[[bytes], None]
    joined: Callable[[], None]
    ended: Callable[[int], None] = lambda _kvpin: None


class Bus(Protocol):
    """Carries frames to every other kvpin, at most once, in order. Frames may be lost.

    Attributes:
        dropped: frames that were not sent because too much was waiting.
        http_socket: where this kvpin serves HTTP to the others; None if none can reach its sockets.
    """

    dropped: int
    http_socket: Path | None

    def reaches(self, socket: str) -> bool:
        """Whether the HTTP socket that another kvpin announced is its own, on this machine."""

    @property
    def is_connected(self) -> bool:
        """Whether frames go out."""

    @property
    def is_alone(self) -> bool:
        """Whether it is known that there is no other kvpin."""

    def publish(self, frame: bytes) -> None:
        """Sends a frame soon. Never waits: if the buffer is full, the frame is dropped, which the others
        notice.
        """

    async def run(self, callbacks: BusCallbacks) -> None:
        """Carries frames until it is cancelled. Logs when it stops working and when it works again.

        Raises:
            OSError: it cannot work at all. It is run again a little later.
        """

    async def aclose(self) -> None:
        """Sends the waiting frames, but not for long."""
