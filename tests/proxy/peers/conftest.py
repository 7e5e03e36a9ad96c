"""Exchanges between proxies."""

import pytest

from proxy.peers.unix_sockets import UnixExchange


@pytest.fixture
def wires():
    return []


@pytest.fixture
def unix(tmp_path):
    directory = tmp_path / "bus"
    return lambda owner: UnixExchange(directory, owner)
