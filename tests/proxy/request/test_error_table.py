from engine_adapter import EngineRejected
from proxy import errors
from proxy.request.error_table import TABLE, row_of, status_of


def test_a_subclass_answers_like_its_nearest_base():
    class Special(errors.NoEngine):
        pass

    assert row_of(Special("x")) is TABLE[errors.NoEngine]


def test_the_status_is_the_classs_or_the_engines_own():
    assert status_of(errors.NotFound("m")) == 404
    assert status_of(EngineRejected("m", status=429)) == 429


def test_a_bug_has_no_row_and_is_a_500():
    assert (row_of(KeyError()), status_of(KeyError())) == (None, 500)
