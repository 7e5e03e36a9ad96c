"""Runs the contract suite with real vLLMs instead of the fake ones."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.live.server_world import passed
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
