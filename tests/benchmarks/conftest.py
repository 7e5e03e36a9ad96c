"""Scripts in benchmarks/ import each other by their bare names."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield
    for name in ("router_work", "mock_engine", "harness"):
        sys.modules.pop(name, None)
