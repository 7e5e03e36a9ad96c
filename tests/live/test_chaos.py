"""A small chaos run: three mocks, some clients, a fault every second."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]


def test_nothing_is_lost_wrong_or_left_behind():
    command = [sys.executable, ROOT / "benchmarks" / "chaos.py", "--busy"]
    command += ["--clients", "10", "--minutes", "0.08", "--fault-every", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| tiny | equal |" in done.stdout
