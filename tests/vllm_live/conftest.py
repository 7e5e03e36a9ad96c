"""Shared by the live tests on vLLM. `scripts/test-vllm` runs them; they take minutes and are off by
default."""

import pytest

from tests.figures import pytest_terminal_summary, tell

__all__ = ["pytest_terminal_summary", "tell"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the load on pairs is."""
    parser.addoption("--requests", type=int, default=30, help="Requests to pairs of engines.")
    parser.addoption("--pairs", type=int, default=1, help="Engines of each role.")
