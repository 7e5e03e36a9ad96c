"""Every way to miss: the word, the sentence, and the words of OpenAI's and Anthropic's APIs."""

import pytest

from engine_adapter.types import Attention
from proxy.core.differences import Difference, Kind
from proxy.core.misses import Compared, Diagnosis, Miss, detail_of
from proxy.request.diagnostics import anthropic_diagnostics, openai_diagnostics


def other(common=0, **fields):
    given = {"request_id": "r1", "n_tokens": 64, "common_tokens": common, "repeated_tokens": 40}
    return {"compared": Compared(**(given | fields))}


def differing(kind, common=20, field="messages", **more):
    return other(common, has_fields=True, difference=Difference(kind, field, 1, None, 7), **more)


def diagnosis_of(**facts):
    return Diagnosis(**({"n_tokens": 64, "tokens_per_block": 16, "left_on": "a"} | facts))


BY_B, REUSED = {"holder": "b", "held_tokens": 32}, {"reused_tokens": 16}
IN_PART = REUSED | {"is_whole": False}
AT = "r1 at messages[1], character 7, from token"
CASES = [
    (Miss.UNKNOWN, "did not know the prompt", {"n_tokens": None}),
    (Miss.UNKNOWN, "did not know the prompt", other() | {"n_tokens": None}),
    (Miss.SHORT, "blocks of 16 tokens", {"n_tokens": 16}),
    (Miss.SHORT, "blocks of 16 tokens", {"n_tokens": 12, "reused_tokens": 5}),
    (Miss.HIT, "all its reusable tokens", {"n_tokens": 12, "reused_tokens": 11}),  # by a llama-server
    (Miss.HIT, "all its full blocks", {"reused_tokens": 48}),
    (Miss.HIT, "all its full", other(64) | {"reused_tokens": 48}),
    (Miss.HIT, "all full blocks that it shares with request r1",
     other(35, n_tokens=40) | {"reused_tokens": 32}),
    (Miss.HIT, "all reusable tokens that it shares with", other(35, n_tokens=40) | {"reused_tokens": 35}),
    (Miss.HIT, "came to another kvpin or worker", {"predicted_tokens": 32, "reused_tokens": 32}),
    (Miss.HIT, "full blocks", other(20) | IN_PART),
    (Miss.FIRST, "no recent request", {}),
    (Miss.FIRST, "no recent request", {"n_tokens": 400, "reused_tokens": 16}),
    (Miss.EVICTED, "its beginning was evicted", {"predicted_tokens": 32}),
    (Miss.EVICTED, "a evicted or flushed", other(40)),
    (Miss.EVICTED, "a evicted", other(40) | REUSED | {"predicted_tokens": 48}),
    (Miss.EVICTED, "a evicted", other(48, repeated_tokens=0) | REUSED),
    (Miss.WINDOW, "64 more tokens of it, but the blocks of the sliding window",
     {"cut_tokens": 64, "lacks": Attention.WINDOW}),
    (Miss.WINDOW, "sliding window", {"cut_tokens": 64, "lacks": Attention.CHUNK}),
    (Miss.WINDOW, "sliding window", other(60) | {"cut_tokens": 64, "lacks": Attention.WINDOW}),
    (Miss.STATE, "64 more tokens of it, but the state that linear attention",
     {"cut_tokens": 64, "lacks": Attention.STATE}),
    (Miss.ELSEWHERE, "b holds 32 tokens", BY_B),
    (Miss.ELSEWHERE, "b holds 32", other(40) | BY_B),
    (Miss.RUNNING, "running on a", other(40) | {"is_running": True}),
    (Miss.RESTARTED, "a was restarted", other(40) | {"is_emptied": True}),
    (Miss.FLUSHED, "an operator flushed a at 00:01:05 UTC", other(40) | {"flushed_at": 65.0}),
    (Miss.AWAY, "on a, which took no requests", other(40) | {"is_candidate": False}),
    (Miss.MODEL, "another", other(same_model=False)),
    (Miss.LORA, "another LoRA", other(same_lora=False)),
    (Miss.TOOLS, f"{AT} 5 on, within the first block of 16", differing(Kind.TOOLS, 5)),
    (Miss.TOOLS, "messages[1], character 7, the order of its fields", differing(Kind.ORDER)),
    (Miss.KVPIN, "changes (paths, ids) made it differ from request r1 at messages[1]",
     differing(Kind.SYSTEM, changes=("paths", "ids")) | {"rules": ("ids",)}),
    (Miss.SYSTEM, f"{AT} 20 on", differing(Kind.SYSTEM) | REUSED),
    (Miss.SYSTEM, "from token 20 on (the prompt as changed by ids)",
     differing(Kind.SYSTEM) | {"rules": ("ids",)}),
    (Miss.SYSTEM, "from token 5 on, within", differing(Kind.SYSTEM, 5, repeated_tokens=0)),
    (Miss.INPUT, f"{AT} 20 on", differing(Kind.INPUT) | REUSED),
    (Miss.INPUT, "from request r1 from token 20 on", other(20) | REUSED),
    # A tenth of the prompt is repeated, or less.
    (Miss.INPUT, "from token 32 on", other(32, repeated_tokens=7) | {"reused_tokens": 32}),
    (Miss.SHARED, "r1; from there on it is new", other(32, repeated_tokens=6) | {"reused_tokens": 32}),
    (Miss.SHARED, "from there on at messages[1], character 7, it is new",
     differing(Kind.INPUT, 32, repeated_tokens=0) | {"reused_tokens": 32}),
    # The template's words are repeated in short prompts that have nothing to do with each other.
    (Miss.SHARED, "it shares 9 tokens with request r1; from there on at messages[1], character 7, it is new",
     differing(Kind.INPUT, 9, n_tokens=13, repeated_tokens=5) | {"n_tokens": 17}),
    (Miss.INPUT, f"{AT} 9 on", differing(Kind.INPUT, 9, n_tokens=33, repeated_tokens=20) | {"n_tokens": 33}),
    # KV that was moved from behind the difference.
    (Miss.SHARED, "from there on", differing(Kind.INPUT, 8) | {"reused_tokens": 40}),
    (Miss.MEDIA, "at messages[1]", differing(Kind.MEDIA) | IN_PART),
    (Miss.TEMPLATE, "renders earlier messages anew", other(20, has_fields=True) | REUSED),
    (Miss.OPTION, "r1 at response_format", differing(Kind.OPTION, field="response_format") | REUSED),
    (Miss.OPTION, "at thinking", differing(Kind.OPTION, field="thinking") | REUSED),
]  # fmt: skip
# The words of OpenAI's and of Anthropic's API; they have none for the others.
WORDS = {
    Miss.HIT: ("cache_hit", None),
    Miss.MODEL: ("model_changed", "model_changed"),
    Miss.LORA: ("model_changed", "model_changed"),
    Miss.TOOLS: ("tools_changed", "tools_changed"),
    Miss.SYSTEM: ("input_changed", "system_changed"),
    **dict.fromkeys(
        (Miss.INPUT, Miss.SHARED, Miss.MEDIA, Miss.TEMPLATE), ("input_changed", "messages_changed")
    ),
}


def test_only_what_could_have_been_reused_and_was_not_is_a_miss():
    hits = {Miss.HIT, Miss.SHARED, Miss.SHORT, Miss.FIRST, Miss.UNKNOWN}
    assert {miss for miss in Miss if not miss.is_miss} == hits


@pytest.mark.parametrize(("miss", "detail", "facts"), CASES, ids=lambda each: str(each)[:40])
def test_each_way_to_miss_in_the_words_of_each_api(miss, detail, facts):
    diagnosis = diagnosis_of(**facts)
    assert diagnosis.miss is miss
    assert detail in detail_of(diagnosis)
    ours = {"reason": str(miss), "detail": detail_of(diagnosis)}
    if (at := diagnosis.at) is not None:
        ours["at"] = {"kind": at.kind, "field": at.field, "item": 1, "part": None, "offset": 7}
    first, second = WORDS.get(miss, ("unavailable", "unavailable"))
    if "response_format" in detail:
        first = "text_format_changed"
    openai, anthropic = openai_diagnostics(diagnosis), anthropic_diagnostics(diagnosis)
    assert first in (openai["type"], openai.get("reason"))
    assert openai.get("kvpin", ours) == ours
    assert anthropic is second is None or (
        anthropic["cache_miss_reason"]["type"] == second and anthropic["cache_miss_reason"]["kvpin"] == ours
    )


def test_how_many_tokens_the_apis_say_were_missed():
    diagnosis = diagnosis_of(**differing(Kind.INPUT, n_tokens=100), **REUSED)
    assert openai_diagnostics(diagnosis)["cache_missed_tokens"] == 44
    assert openai_diagnostics(diagnosis)["comparison_reusable_tokens"] == 100
    assert anthropic_diagnostics(diagnosis)["cache_miss_reason"]["cache_missed_input_tokens"] == 44


def test_an_answer_that_is_not_known():
    assert openai_diagnostics(None) == {"type": "comparison_response_not_found"}
    assert anthropic_diagnostics(None) == {"cache_miss_reason": {"type": "previous_message_not_found"}}
