"""Shared by the live tests on SGLang. `scripts/test-sglang` runs them; they take minutes and are off by
default."""

import pytest

from tests.figures import pytest_terminal_summary, tell

__all__ = ["pytest_terminal_summary", "tell"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the mixed loads are."""
    parser.addoption("--requests", type=int, default=260, help="Requests of each mixed load.")
    parser.addoption("--churn", type=float, default=2, help="Minutes of flushes and kills under load.")
