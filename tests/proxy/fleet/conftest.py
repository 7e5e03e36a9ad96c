import pytest

from proxy.fleet.fleet import Fleet
from tests.virtual_time import virtual_time  # noqa: F401 - a fixture


@pytest.fixture
def fleet():
    return Fleet()
