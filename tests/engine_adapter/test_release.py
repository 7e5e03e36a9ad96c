import pytest

from engine_adapter.release import release_of


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.32.0", (0, 32, 0)), ("0.32.0+cpu", (0, 32, 0)), ("0.27rc1", (0, 27)), ("", ()), ("v1", ())],
)
def test_a_version_begins_with_numbers(version, release):
    assert release_of(version) == release
