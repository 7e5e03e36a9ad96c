"""Engines as finders find them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from proxy.settings import EngineSettings


class SourceError(Exception):
    """A source of engines cannot be asked, or its answer cannot be used. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine of a source. `is_ready`: False if its source says that it should get no new requests."""

    entry: EngineSettings
    is_ready: bool = True


FoundEngines = tuple[FoundEngine, ...]


class Finder(Protocol):
    """Asks one source."""

    def found(self) -> AsyncIterator[FoundEngines]:
        """The whole set of its engines, now and whenever it may have changed. Never ends. Raises SourceError:
        the source fails. Call again later."""


@dataclass(slots=True)
class Source:
    """A source as it is now.

    Attributes:
        found: its engines by its last usable answer.
        error: why `found` may be old; None if its last answer could be used.
    """

    name: str
    finder: Finder
    found: FoundEngines = ()
    error: str | None = "not asked yet"
