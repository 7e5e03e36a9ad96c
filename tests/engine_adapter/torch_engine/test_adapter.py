"""What the contract suite cannot see of the embedded adapter: addresses, and that torch stays out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_adapter import Capability, EngineSpec
from engine_adapter.torch_engine.adapter import EmbeddedAdapter


@pytest.mark.parametrize(
    ("url", "endpoint", "reached"),
    [
        ("http://gpu7:8100", "tcp://0.0.0.0:5557", "tcp://gpu7:5557"),
        ("http://gpu7:8100", "tcp://*:5557", "tcp://gpu7:5557"),
        ("http://[fd00::7]:8100", "tcp://[::]:5557", "tcp://[fd00::7]:5557"),
        ("http://gpu7:8100", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
    ],
)
async def test_a_wildcard_address_becomes_the_engines_host(url, endpoint, reached):
    adapter = EmbeddedAdapter(EngineSpec(kind="embedded", url=url, id="e"))
    assert adapter._reachable(endpoint) == reached
    await adapter.aclose()


def test_it_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from engine_adapter import EngineSpec, make_adapter\n"
        "make_adapter(EngineSpec(kind='embedded', url='http://h:1', id='e'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_without_a_host_tier_it_says_how_to_get_one():
    adapter = EmbeddedAdapter(EngineSpec("embedded", "http://127.0.0.1:1", "e"))
    assert "start it with --host-cache-bytes" in str(adapter.not_supported(Capability.OFFLOAD))
    await adapter.aclose()
