"""Scripts in benchmarks/ import each other by their bare names."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield
    names = ("router_work", "router_client", "router_peers", "router_result", "mock_engine", "harness")
    for name in names:
        sys.modules.pop(name, None)
