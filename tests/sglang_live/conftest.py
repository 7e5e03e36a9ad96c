"""Shared by the live tests on SGLang. `scripts/test-sglang` runs them; they take minutes and are off by
default."""

from tests.figures import pytest_terminal_summary, tell

__all__ = ["pytest_terminal_summary", "tell"]
