"""Runs the contract suite with a real vLLM instead of the fake one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.live.server_world import ROOT
from tests.vllm_live.vllm_world import VllmOptions, running_vllm

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_vllm_keeps_the_contract(tmp_path, tell):
    command = [sys.executable, "-m", "pytest", "-q", "-k", "vllm", "tests/contract"]
    options = VllmOptions(flags=("--enable-scale-out",))
    with running_vllm(tmp_path / "vllm.log", options) as server:
        server.wait()
        environment = {**os.environ, "KVPIN_TEST_VLLM": server.url}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().rpartition("\n")[2]
    tell(summary)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None
    assert int(passed[1]) > 10
