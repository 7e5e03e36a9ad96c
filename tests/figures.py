"""Figures that tests tell at the end of the run. A `conftest.py` imports both functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds lines to the summary at the end of the run."""

    def tell(*lines: str) -> None:
        request.config.stash.setdefault(_FIGURES, []).extend((f"{request.node.name}:", *lines, ""))

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints them."""
    figures = terminalreporter.config.stash.get(_FIGURES, [])
    if figures:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(figures) + "\n")
