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
        kept: with what `Bus.keep` left, or None, each time the exchange begins to work.
    """

    receive: Callable[[bytes], None]
    joined: Callable[[], None]
    ended: Callable[[int], None] = lambda _kvpin: None
    kept: Callable[[bytes | None], None] = lambda _data: None


class Bus(Protocol):
    """Carries frames to every other kvpin, at most once, in order. Frames may be lost.

    Attributes:
        dropped: frames that were not sent because too much was waiting.
        http_socket: serves HTTP to the other kvpins; None if none can reach it.
        is_private: nobody but this user can read or write frames.
    """

    dropped: int
    is_private: bool
    http_socket: Path | None

    def reaches(self, socket: str) -> bool:
        """True if the HTTP socket that another kvpin announced is its own, on this machine."""

    @property
    def is_connected(self) -> bool:
        """True if frames go out."""

    @property
    def is_alone(self) -> bool:
        """True if it is known that there is no other kvpin."""

    def publish(self, frame: bytes) -> None:
        """Sends a frame soon. Never waits: if the buffer is full, the frame is dropped, which the others
        notice.
        """

    def keep(self, data: bytes) -> None:
        """Leaves data for kvpins that start when all others are gone. Replaces what was left before. Has no
        effect if the exchange keeps nothing."""

    async def run(self, callbacks: BusCallbacks) -> None:
        """Carries frames until it is cancelled. Logs when it stops working and when it works again. Raises
        OSError if it cannot work at all: it is run again a little later."""

    async def aclose(self) -> None:
        """Sends the waiting frames, but not for long."""
