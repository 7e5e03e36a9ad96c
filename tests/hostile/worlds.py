"""A kvpin for each attack: the last one, unless the attack needs another or the last one was damaged."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.hostile.attacker import Attack
from tests.hostile.trial import Innocent
from tests.hostile.world import World, running_world


class Worlds:
    """Starts one world at a time."""

    def __init__(self, checkout: Path | None, faketime: Path | None, more_memory: int) -> None:
        """Args:
        checkout: of the kvpin that is attacked; None for this one.
        faketime: the library that sets kvpin's clock where an attack needs that.
        more_memory: bytes that kvpin and its engine may have more than at their start.
        """
        self._checkout, self._faketime, self._more_memory = checkout, faketime, more_memory
        self._stack = ExitStack()
        self._current: tuple[World, Innocent] | None = None
        self._is_for: tuple[bool, bool] | None = None

    def get(self, attack: Attack) -> tuple[World, Innocent]:
        """A kvpin that the attack fits, and the innocent there."""
        wanted = (attack.has_keys, attack.needs_clock)
        if self._current is None or self._is_for != wanted:
            self.end()
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "world")
            world = self._stack.enter_context(
                running_world(
                    directory,
                    has_keys=attack.has_keys,
                    checkout=self._checkout,
                    faketime=self._faketime if attack.needs_clock else None,
                )
            )
            world.limit(self._more_memory)
            self._current, self._is_for = (world, Innocent(world.place)), wanted
        return self._current

    def end(self) -> str | None:
        """Ends the kvpin. Returns what was wrong then."""
        self._current = None
        try:
            self._stack.close()
        except Exception as error:  # noqa: BLE001 - a kvpin that was attacked may end in any way
            return f"it did not end well: {str(error)[-400:]}"
        return None
