"""What tests of the flow share."""

import pytest

from tests.fakes import FakeEngine


@pytest.fixture
async def engine():
    async with FakeEngine("a") as engine:
        yield engine


@pytest.fixture
async def engines():
    async with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        yield a, b, c
