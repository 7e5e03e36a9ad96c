import pytest

from engine_adapter.causes import Code
from proxy import errors


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.NoMemory("m"), "memory"),
        (errors.SlowBody("m"), "slow"),
        (errors.BodyTooLarge("m"), "size"),
        (errors.BadRequest("m", code=Code.TOO_COMPLEX), "shape"),
        (errors.BadRequest("m", code=Code.ARRAY_ABOVE_MAX_LENGTH), "shape"),
        (errors.BadRequest("m"), None),
        (errors.NoEngine("m"), None),
    ],
)
def test_a_refusal_has_the_reason_of_its_limit(error, reason):
    assert error.refusal == reason
