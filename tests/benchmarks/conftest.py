"""Scripts in benchmarks/ import each other by their bare names."""

import importlib
import sys
from pathlib import Path

import pytest

from proxy.replay import rules


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    scripts_dir = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(scripts_dir))
    known = dict(rules.POLICIES)  # some scripts add to them
    yield
    rules.POLICIES.clear()
    rules.POLICIES.update(known)
    for path in scripts_dir.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def script(scripts, request):
    """The script that the test's file is named after."""
    return importlib.import_module(request.module.__name__.rpartition("test_")[2])
