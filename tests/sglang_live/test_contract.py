"""Runs the contract suite with real SGLangs instead of the fake ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.live.server_world import ROOT
from tests.sglang_live.sglang_world import SglangOptions, running_sglang

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

OPTIONS = {
    "KVPIN_TEST_SGLANG": SglangOptions(tokens=2048),
    "KVPIN_TEST_SGLANG_RANKS": SglangOptions(tokens=2048, ranks=2),
}


@pytest.mark.parametrize(
    ("variable", "tests", "least"),
    [("KVPIN_TEST_SGLANG", "sglang and not rank", 30), ("KVPIN_TEST_SGLANG_RANKS", "sglang and rank", 4)],
    ids=["one server", "two ranks"],
)
def test_sglang_keeps_the_contract(variable, tests, least, tmp_path, tell):
    command = [sys.executable, "-m", "pytest", "-q", "-k", tests, "tests/contract"]
    with running_sglang(tmp_path / "sglang.log", OPTIONS[variable]) as server:
        server.wait()
        environment = {**os.environ, variable: server.url}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().rpartition("\n")[2]
    tell(summary)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None
    assert int(passed[1]) >= least
