"""The bar on a terminal while `kvpin serve` waits: how many engines are ready, and for what it waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet

_NAMED = 3  # engines; more are counted
_USABLE = (EngineState.READY, EngineState.DRAINING)


@contextmanager
def waiting_bar(fleet: Fleet, has_joined: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Yields what draws the bar as it is now. Draws nothing unless both outputs are terminals: lines that are
    written meanwhile, to either, appear above the bar."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(), transient=True, refresh_per_second=2) as progress:
        ready, text = summary(fleet, has_joined=has_joined())
        bar = progress.add_task(text, completed=ready, total=len(fleet.engines) or None)

        def draw() -> None:
            ready, text = summary(fleet, has_joined=has_joined())
            progress.update(bar, completed=ready, total=len(fleet.engines) or None, description=text)

        yield draw


def summary(fleet: Fleet, *, has_joined: bool) -> tuple[int, str]:
    """The number of engines that are ready; then the others with their states, and what else is awaited."""
    others = [engine for engine in fleet.engines.values() if engine.state not in _USABLE]
    named = [f"{engine.id} {engine.state.value}" for engine in others[:_NAMED]]
    if len(others) > _NAMED:
        named.append(f"{len(others) - _NAMED} more")
    if fleet.is_ready() and not has_joined:
        named.append("asking other kvpins what they know")
    return len(fleet.engines) - len(others), ", ".join(["engines ready", *named])
