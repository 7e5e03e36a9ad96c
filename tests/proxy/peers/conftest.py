"""Exchanges between proxies."""

import pytest

from proxy.peers.bus import UnixBus


@pytest.fixture
def wires():
    return []


@pytest.fixture
def unix(tmp_path):
    directory = tmp_path / "bus"
    return lambda owner: UnixBus(directory, owner)
