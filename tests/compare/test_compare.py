"""kvpin does what it did when `recorded.xz` was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compare.transcripts import differences, masked, read
from tests.compare.world import ROOT

# What several requests at once bring about hangs on how busy the machine is, and so do the lists of them.
BY_CHANCE = (
    *("at once", "list stream", "queue", "client leaves"),
    *("admin: requests", "admin: stats", "admin: usage", "metrics", "without a key"),
)
RECORDED = Path(__file__).with_name("recorded.xz")


@pytest.mark.live
@pytest.mark.timeout(600)
def test_kvpin_does_what_was_recorded(tmp_path):
    record = [sys.executable, "-m", "tests.compare", "--record", str(tmp_path / "now"), str(ROOT)]
    subprocess.run(record, check=True, cwd=ROOT)
    before, now = (
        {name: each for name, each in read(path).items() if not any(word in name for word in BY_CHANCE)}
        for path in (RECORDED, tmp_path / "now")
    )
    assert len(before) > 500
    lines = list(differences(before, now))
    wanted = "wanted? scripts/compare --record tests/compare/recorded.xz ."
    assert not lines, "\n".join([*lines[:200], wanted])


def test_ids_and_salts_are_numbered_and_times_are_left_out():
    salts = [f"kvpin-{digit * 32}" for digit in "ab"]
    before = {"a": {"x": f"{salts[0]} req-{'c' * 32}\nDate: today"}, "b": {"x": salts[1]}}
    after = {"a": {"x": f"{salts[1]} req-{'d' * 32}\ndate: later"}, "b": {"x": salts[0]}}
    assert not list(differences(masked(before, ()), masked(after, ())))
    after["b"]["x"] = salts[1]
    assert list(differences(masked(before, ()), masked(after, ())))[2:] == [
        "@@ -1 +1 @@",
        "-<salt 2>",
        "+<salt 1>",
    ]
