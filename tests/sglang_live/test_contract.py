"""Runs the contract suite with real SGLangs instead of the fake ones."""

from __future__ import annotations

import pytest

from tests.live.server_world import passed
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
    with running_sglang(tmp_path / "sglang.log", OPTIONS[variable]) as server:
        server.wait()
        assert passed(tell, "-k", tests, "tests/contract", **{variable: server.url}) >= least
