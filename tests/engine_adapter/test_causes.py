"""The table of causes."""

import re

import pytest

from engine_adapter import EngineRejected, EngineUnavailable
from proxy.core.life import Cause
from proxy.errors import ProxyError, cause_of
from proxy.settings import Settings


def subclasses(base):
    yield base
    for each in base.__subclasses__():
        yield from subclasses(each)


@pytest.mark.parametrize(
    ("cause", "settings"),
    [
        (Cause.OVERLOADED, ["limits.queue_s"]),
        (Cause.OUR_LIMIT, ["timeouts.total_s", "timeouts.first_byte_s", "limits.queue_s"]),
        (Cause.ENGINE_BUSY, ["timeouts.first_byte_s"]),
        (Cause.ENGINE_LATE, ["timeouts.first_byte_s"]),
        (Cause.ENGINE_SILENT, ["timeouts.idle_s"]),
    ],
)
def test_a_time_limit_names_its_settings(cause, settings):
    named = re.findall(r"`(\w+\.\w+)`", cause.meaning)
    assert named == settings
    for group, _, field in (each.partition(".") for each in named):
        assert hasattr(getattr(Settings(), group), field)


@pytest.mark.parametrize(
    "error", [*subclasses(EngineUnavailable), *subclasses(ProxyError)], ids=lambda e: e.__name__
)
def test_each_error_has_one(error):
    assert cause_of(error.__new__(error)) is not Cause.BUG


def test_what_is_not_expected_is_a_bug():
    assert cause_of(ValueError()) is Cause.BUG
    assert cause_of(EngineRejected("no", status=500)) is Cause.INVALID  # an attempt looks at the status
