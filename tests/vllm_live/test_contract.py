"""Runs the contract suite with real vLLMs instead of the fake ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.live.server_world import ROOT
from tests.vllm_live.pair_world import with_connector
from tests.vllm_live.vllm_world import VllmOptions, running_vllm

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_vllm_keeps_the_contract(tmp_path, tell):
    options = VllmOptions(flags=("--enable-scale-out",))
    with running_vllm(tmp_path / "vllm.log", options) as server:
        server.wait()
        assert passed(tell, "-k", "vllm and not pairs", "tests/contract", KVPIN_TEST_VLLM=server.url) > 10


def test_a_pair_keeps_the_contract(tmp_path, tell):
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_vllm(tmp_path / f"{name}.log", with_connector(name))) for name in "pd"
        ]
        for server in servers:
            server.wait()
        addresses = " ".join(server.url for server in servers)
        assert passed(tell, "tests/contract/test_pairs.py", KVPIN_TEST_PAIR=addresses) > 10


def passed(tell, *tests: str, **environment: str) -> int:
    """Runs tests of the suite with these real servers; returns how many passed: all."""
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().rpartition("\n")[2]
    tell(summary)
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", summary)
    assert found is not None
    return int(found[1])
