"""A request body that is passed on as it arrives: a form with files, or a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Named:
    """The model that a form names, and the bytes of the form that hold this name."""

    model: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A body that is passed on as it arrives.

    Attributes:
        chunks: its bytes; they can be read once.
        length: its number of bytes; None if its client did not say.
        named: the model it names; None if it names none, or if nobody has looked.
    """

    chunks: AsyncIterator[bytes]
    length: int | None = None
    named: Named | None = None

    def renamed(self, model: str) -> Upload:
        """The body with another name of its model. All other bytes stay as they are."""
        named = self.named
        if named is None:
            return self
        name = model.encode()
        now = Named(model, named.start, named.start + len(name))
        length = None if self.length is None else self.length + now.end - named.end
        return Upload(_replaced(self.chunks, named, name), length, now)


async def _replaced(chunks: AsyncIterator[bytes], named: Named, name: bytes) -> AsyncIterator[bytes]:
    """The chunks with `name` in place of the old name."""
    at = 0
    async for chunk in chunks:
        before, after = chunk[: max(named.start - at, 0)], chunk[max(named.end - at, 0) :]
        begins = 0 <= named.start - at < len(chunk)
        yield before + (name if begins else b"") + after
        at += len(chunk)
