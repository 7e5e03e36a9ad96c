"""Exchanges between proxies."""

import pytest

from proxy.peers import peers
from proxy.peers.bus import UnixBus
from tests.virtual_time import virtual_time  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(peers, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(peers, "_JOIN_POLL_S", 0.01)


@pytest.fixture
def wires():
    return []


@pytest.fixture
def unix(tmp_path):
    directory = tmp_path / "bus"
    return lambda owner: UnixBus(directory, owner)
