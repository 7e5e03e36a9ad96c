"""Scripts in benchmarks/ import each other by their bare names."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    scripts_dir = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(scripts_dir))
    yield
    for path in scripts_dir.glob("*.py"):
        sys.modules.pop(path.stem, None)
