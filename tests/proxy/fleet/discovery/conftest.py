import pytest
import trustme

from tests.kubernetes_api import kubernetes


@pytest.fixture
async def cluster(tmp_path):
    """An API server, and the cluster as a pod sees it."""
    async with kubernetes(tmp_path, trustme.CA()) as both:
        yield both
