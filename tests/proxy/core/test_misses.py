from dataclasses import dataclass

import pytest

from engine_adapter.types import Attention
from proxy.core.differences import Difference, Kind
from proxy.core.misses import Compared, Diagnosis, Miss, anthropic_diagnostics, openai_diagnostics


def other(common=0, **fields):
    given = {
        "request_id": "r1",
        "n_tokens": 64,
        "common_tokens": common,
        "repeated_tokens": 40,
        "engine": "a",
    }
    return Compared(**(given | fields))


def differing(kind, common=20, field="messages", **more):
    return other(common, has_fields=True, difference=Difference(kind, field, 1, None, 7), **more)


AT_SYSTEM = Difference(Kind.SYSTEM, "messages", 1, None, 7)


@dataclass
class Case:
    """A way to miss: the reason, in the words of OpenAI's and Anthropic's APIs too, and what leads to it."""

    miss: Miss
    openai: str
    anthropic: str | None
    detail: str
    facts: dict


def diagnosis_of(case):
    return Diagnosis(**({"n_tokens": 64, "tokens_per_block": 16} | case.facts))


NO_WORD = "unavailable"
CASES = [
    Case(Miss.UNKNOWN, NO_WORD, NO_WORD, "did not know the prompt", {"n_tokens": None}),
    Case(Miss.UNKNOWN, NO_WORD, NO_WORD, "did not know the prompt", {"n_tokens": None, "compared": other()}),
    Case(Miss.SHORT, NO_WORD, NO_WORD, "blocks of 16 tokens", {"n_tokens": 16}),
    Case(Miss.HIT, "cache_hit", None, "all its full blocks", {"reused_tokens": 48}),
    Case(Miss.HIT, "cache_hit", None, "all its full", {"reused_tokens": 48, "compared": other(64)}),
    Case(
        Miss.HIT, "cache_hit", None, "full blocks that it shares with request r1",
        {"reused_tokens": 32, "compared": other(35, n_tokens=40)},
    ),
    Case(
        Miss.HIT, "cache_hit", None, "all reusable tokens that it shares with request r1",
        {"reused_tokens": 35, "compared": other(35, n_tokens=40)},
    ),
    Case(Miss.FIRST, NO_WORD, NO_WORD, "no recent request", {}),
    Case(
        Miss.HIT, "cache_hit", None, "came to another kvpin or worker",
        {"predicted_tokens": 32, "reused_tokens": 32},
    ),
    Case(Miss.FIRST, NO_WORD, NO_WORD, "no recent request", {"n_tokens": 400, "reused_tokens": 16}),
    Case(Miss.EVICTED, NO_WORD, NO_WORD, "its beginning was evicted", {"predicted_tokens": 32}),
    Case(Miss.ELSEWHERE, NO_WORD, NO_WORD, "b holds 32 tokens", {"holder": "b", "held_tokens": 32}),
    Case(Miss.MODEL, "model_changed", "model_changed", "another", {"compared": other(same_model=False)}),
    Case(Miss.LORA, "model_changed", "model_changed", "another LoRA", {"compared": other(same_lora=False)}),
    Case(Miss.EVICTED, NO_WORD, NO_WORD, "a evicted or flushed", {"compared": other(40)}),
    Case(
        Miss.EVICTED, NO_WORD, NO_WORD, "a evicted",
        {"compared": other(40), "predicted_tokens": 48, "reused_tokens": 16},
    ),
    Case(Miss.RUNNING, NO_WORD, NO_WORD, "running on a", {"compared": other(40, is_running=True)}),
    Case(
        Miss.ELSEWHERE, NO_WORD, NO_WORD, "b holds 32",
        {"compared": other(40), "holder": "b", "held_tokens": 32},
    ),
    Case(Miss.RESTARTED, NO_WORD, NO_WORD, "a was restarted", {"compared": other(40, is_emptied=True)}),
    Case(Miss.AWAY, NO_WORD, NO_WORD, "which took no requests", {"compared": other(40, is_candidate=False)}),
    Case(
        Miss.TOOLS, "tools_changed", "tools_changed", "at messages[1], character 7, from token 5 on, within",
        {"compared": differing(Kind.TOOLS, 5)},
    ),
    Case(
        Miss.KVPIN, NO_WORD, NO_WORD, "changes (paths, ids) made it differ from request r1 at messages[1]",
        {"compared": differing(Kind.SYSTEM, changes=("paths", "ids")), "rules": ("ids",)},
    ),
    Case(
        Miss.SYSTEM, "input_changed", "system_changed", "r1 at messages[1], character 7, from token 20 on",
        {"compared": differing(Kind.SYSTEM), "reused_tokens": 16},
    ),
    Case(
        Miss.SYSTEM, "input_changed", "system_changed", "from token 20 on",
        {"compared": differing(Kind.SYSTEM)},
    ),
    Case(
        Miss.INPUT, "input_changed", "messages_changed", "from token 20 on",
        {"compared": differing(Kind.INPUT), "reused_tokens": 16},
    ),
    Case(
        Miss.INPUT, "input_changed", "messages_changed", "from request r1 from token 20 on",
        {"compared": other(20), "reused_tokens": 16},
    ),
    Case(
        Miss.SHARED, "input_changed", "messages_changed", "r1; from there on it is new",
        {"compared": other(32, repeated_tokens=6), "reused_tokens": 32},
    ),
    Case(
        Miss.INPUT, "input_changed", "messages_changed", "from token 32 on",
        {"compared": other(32, repeated_tokens=7), "reused_tokens": 32},
    ),
    Case(
        Miss.SYSTEM, "input_changed", "system_changed", "from token 5 on, within",
        {"compared": other(5, has_fields=True, repeated_tokens=0, difference=AT_SYSTEM)},
    ),
    Case(
        Miss.EVICTED, NO_WORD, NO_WORD, "a evicted",
        {"compared": other(48, repeated_tokens=0), "reused_tokens": 16},
    ),
    Case(
        Miss.MEDIA, "input_changed", "messages_changed", "at messages[1]",
        {"compared": differing(Kind.MEDIA), "reused_tokens": 16, "is_whole": False},
    ),
    Case(
        Miss.HIT, "cache_hit", None, "full blocks",
        {"compared": other(20), "reused_tokens": 16, "is_whole": False},
    ),
    Case(
        Miss.TEMPLATE, "input_changed", "messages_changed", "renders earlier messages anew",
        {"compared": other(20, has_fields=True), "reused_tokens": 16},
    ),
    Case(
        Miss.OPTION, "text_format_changed", NO_WORD, "r1 at response_format",
        {"compared": differing(Kind.OPTION, field="response_format"), "reused_tokens": 16},
    ),
    Case(
        Miss.OPTION, NO_WORD, NO_WORD, "at thinking",
        {"compared": differing(Kind.OPTION, field="thinking"), "reused_tokens": 16},
    ),
]  # fmt: skip


def test_only_what_could_have_been_reused_and_was_not_is_a_miss():
    hits = {Miss.HIT, Miss.SHARED, Miss.SHORT, Miss.FIRST, Miss.UNKNOWN}
    assert {miss for miss in Miss if not miss.is_miss} == hits


def test_the_question_that_is_new_is_named():
    compared = other(32, has_fields=True, repeated_tokens=0, difference=Difference(Kind.INPUT, "messages", 1))
    diagnosis = diagnosis_of(Case(Miss.SHARED, "", "", "", {"compared": compared, "reused_tokens": 32}))
    assert (str(diagnosis.at), diagnosis.miss) == ("messages[1]", Miss.SHARED)
    assert diagnosis.detail == "it shares 32 tokens with request r1; from there on at messages[1], it is new"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.miss}")
def test_each_way_to_miss_in_the_words_of_each_api(case):
    diagnosis = diagnosis_of(case)
    assert diagnosis.miss is case.miss
    assert case.detail in diagnosis.detail
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


def test_how_many_tokens_the_apis_say_were_missed():
    before = other(20, n_tokens=100, has_fields=True, difference=Difference(Kind.INPUT, "input"))
    diagnosis = Diagnosis(n_tokens=64, reused_tokens=16, tokens_per_block=16, compared=before)
    assert openai_diagnostics(diagnosis)["cache_missed_tokens"] == 44
    assert openai_diagnostics(diagnosis)["comparison_reusable_tokens"] == 100
    assert anthropic_diagnostics(diagnosis)["cache_miss_reason"]["cache_missed_input_tokens"] == 44


def test_an_answer_that_is_not_known():
    assert openai_diagnostics(None) == {"type": "comparison_response_not_found"}
    assert anthropic_diagnostics(None) == {"cache_miss_reason": {"type": "previous_message_not_found"}}


class TestSeveralKindsOfAttention:
    """Full attention holds a prefix that another kind cannot use any more."""

    @pytest.mark.parametrize(
        ("lacks", "miss", "word"),
        [
            (Attention.WINDOW, Miss.WINDOW, "sliding window"),
            (Attention.CHUNK, Miss.WINDOW, "sliding window"),
            (Attention.STATE, Miss.STATE, "linear attention"),
        ],
    )
    def test_it_is_named(self, lacks, miss, word):
        diagnosis = Diagnosis(n_tokens=100, tokens_per_block=16, cut_tokens=64, lacks=lacks)
        assert diagnosis.miss is miss
        assert word in diagnosis.detail
        assert "64 more tokens" in diagnosis.detail
        assert diagnosis.miss.is_miss

    def test_beside_an_earlier_request(self):
        compared = Compared(request_id="r", n_tokens=100, common_tokens=90, engine="a")
        diagnosis = Diagnosis(
            n_tokens=100, tokens_per_block=16, cut_tokens=64, lacks=Attention.WINDOW, compared=compared
        )
        assert diagnosis.miss is Miss.WINDOW
