"""Every example runs, and shows what it says it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.conftest import ENGINE, running_kvpin

pytestmark = pytest.mark.live

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name, *options):
    command = [sys.executable, str(EXAMPLES / name), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_every_example_is_run_here():
    source = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source] == []


def test_openai_chat(kvpin):
    counts = re.findall(r"of them cached (\d+)", run("openai_chat.py", "--base-url", kvpin.base_url))
    assert counts[0] == "0"
    assert int(counts[1]) > 0


def test_ttft_demo(kvpin):
    shown = run("ttft_demo.py", "--base-url", kvpin.base_url, "--seed", "5")
    (first, of_first), (second, _), (repeated, of_repeated) = re.findall(
        r"(\d+) of (\d+) prompt tokens", shown
    )
    assert int(of_first) >= 2000
    assert int(first) < 32 < int(second)
    assert int(repeated) >= int(of_repeated) - 16
    assert "faster" in shown


def test_p_tuning(kvpin):
    shown = run("p_tuning.py", "--url", kvpin.url)
    assert re.findall(r"cached +(\d+) of", shown) == ["0", "0", "32"]


def test_offload_restore(kvpin):
    shown = run("offload_restore.py", "--url", kvpin.url)
    assert shown.endswith("same answer\n")
    moved = re.findall(r"(?:offload|restore) +embedded-\d: (\d+) blocks", shown)
    assert moved[0] == moved[1] != "0"


def test_two_tenants(tmp_path):
    keys = ("--api-key", "alice-key", "--api-key", "bob-key")
    with running_kvpin(tmp_path / "log", "--managed", ENGINE, *keys) as kvpin:
        shown = run("two_tenants.py", "--base-url", kvpin.base_url)
        assert "alice-key" not in kvpin.log.read_text()
    counts = [int(count) for count in re.findall(r"(\d+) of \d+ prompt tokens", shown)]
    assert counts[0] == counts[2] == 0
    assert min(counts[1], counts[3]) > 300
