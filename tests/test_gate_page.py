"""The table of the gate names what there is."""

from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.settings.schema import LimitSettings
from scripts.reference.gate import LIMITS

# Memory that requests do not take on their way in.
_ELSEWHERE = {"request_records", "prompt_table_bytes"}


def test_every_setting_of_limits_is_in_the_table():
    named = {each.setting.removeprefix("limits.") for each in LIMITS if each.setting.startswith("limits.")}
    assert named == LimitSettings.model_fields.keys() - _ELSEWHERE


def test_reasons_are_those_of_the_metric():
    (refused,) = (each for each in Metrics(Fleet()).declared if each.name == "kvpin_refused_total")
    assert all(f" {each.reason} (" in refused.text for each in LIMITS if each.reason)
