from tests.virtual_time import virtual_time  # noqa: F401 - a fixture
