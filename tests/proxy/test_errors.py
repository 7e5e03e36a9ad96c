import pytest

from engine_adapter import EngineRejected
from engine_adapter.causes import Code
from proxy import errors
from proxy.errors import code_of, status_of


def test_a_subclass_answers_like_its_nearest_base():
    class Special(errors.NoEngine):
        pass

    assert code_of(Special("x")) is Code.NO_ENGINE


def test_the_status_is_the_classs_or_the_engines_own():
    assert status_of(errors.NotFound("m")) == 404
    assert status_of(EngineRejected("m", status=429)) == 429


def test_a_code_of_its_own_comes_before_its_classs():
    error = errors.NotFound("m", code=Code.MODEL_NOT_FOUND)
    assert (code_of(error), status_of(error)) == (Code.MODEL_NOT_FOUND, 404)


def test_a_bug_is_a_500():
    assert (code_of(KeyError()), status_of(KeyError())) == (Code.INTERNAL_ERROR, 500)


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
