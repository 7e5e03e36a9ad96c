import pytest

from proxy.core.api_diagnostics import anthropic_diagnostics, openai_diagnostics
from proxy.core.differences import Difference, Kind
from proxy.core.misses import Facts, diagnose
from tests.proxy.core.test_misses import CASES, diagnosis_of, other


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.miss}")
def test_each_way_to_miss_in_the_words_of_each_api(case):
    diagnosis = diagnosis_of(case)
    ours = {"reason": str(case.miss), "detail": diagnosis.detail}
    if diagnosis.at is not None:
        at = diagnosis.at
        ours["at"] = {"kind": at.kind, "field": at.field, "item": 1, "part": None, "offset": 7}
    openai = openai_diagnostics(diagnosis)
    assert case.openai in (openai["type"], openai.get("reason"))
    assert openai.get("kvpin", ours) == ours
    anthropic = anthropic_diagnostics(diagnosis)
    if case.anthropic is None:
        assert anthropic is None
    else:
        assert anthropic["cache_miss_reason"]["type"] == case.anthropic
        assert anthropic["cache_miss_reason"]["kvpin"] == ours


def test_how_many_tokens_were_missed():
    before = other(20, n_tokens=100, has_fields=True, difference=Difference(Kind.INPUT, "input"))
    diagnosis = diagnose(Facts(n_tokens=64, reused_tokens=16, tokens_per_block=16, compared=before))
    assert openai_diagnostics(diagnosis)["cache_missed_tokens"] == 44
    assert openai_diagnostics(diagnosis)["comparison_reusable_tokens"] == 100
    assert anthropic_diagnostics(diagnosis)["cache_miss_reason"]["cache_missed_input_tokens"] == 44


def test_an_answer_that_is_not_known():
    assert openai_diagnostics(None) == {"type": "comparison_response_not_found"}
    assert anthropic_diagnostics(None) == {"cache_miss_reason": {"type": "previous_message_not_found"}}
