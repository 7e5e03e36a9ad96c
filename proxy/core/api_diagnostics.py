"""Why a prompt's cached KV was not reused, in the words of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.core.misses import Diagnosis, Miss

_OPENAI = {
    Miss.MODEL: "model_changed",
    Miss.LORA: "model_changed",
    Miss.TOOLS: "tools_changed",
    Miss.SYSTEM: "input_changed",
    Miss.INPUT: "input_changed",
    Miss.MEDIA: "input_changed",
    Miss.TEMPLATE: "input_changed",
}
# Options that OpenAI's API has a reason for.
_OPENAI_OPTIONS = {
    "text": "text_format_changed",
    "response_format": "text_format_changed",
    "reasoning": "reasoning_effort_changed",
    "reasoning_effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
}
_ANTHROPIC = {
    Miss.MODEL: "model_changed",
    Miss.LORA: "model_changed",
    Miss.TOOLS: "tools_changed",
    Miss.SYSTEM: "system_changed",
    Miss.INPUT: "messages_changed",
    Miss.MEDIA: "messages_changed",
    Miss.TEMPLATE: "messages_changed",
}


def openai_diagnostics(diagnosis: Diagnosis | None) -> dict[str, Any]:
    """The `prompt_cache_diagnostics` of a response; None: the compared response is not known.

    `unavailable` stands for reasons that the API has no word for; the field `kvpin` then names the reason.
    """
    if diagnosis is None:
        return {"type": "comparison_response_not_found"}
    miss, at = diagnosis.miss, diagnosis.at
    if miss is Miss.HIT:
        return {"type": "cache_hit"}
    option = _OPENAI_OPTIONS.get(at.field) if at is not None and miss is Miss.OPTION else None
    reason = option or _OPENAI.get(miss)
    if reason is None:
        return {"type": "unavailable", "kvpin": _own_words(diagnosis)}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": diagnosis.changed_tokens,
        "comparison_reusable_tokens": diagnosis.earlier_tokens,
        "kvpin": _own_words(diagnosis),
    }


def anthropic_diagnostics(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    """The `diagnostics` of a message. The argument is None if the earlier message is not known. The result
    is None if the prompt does not diverge, as in Anthropic's API."""
    if diagnosis is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if diagnosis.miss is Miss.HIT:
        return None
    kind = _ANTHROPIC.get(diagnosis.miss)
    reason: dict[str, Any] = {"type": kind or "unavailable"}
    if kind is not None:
        reason["cache_missed_input_tokens"] = diagnosis.missed_tokens
    return {"cache_miss_reason": {**reason, "kvpin": _own_words(diagnosis)}}


def _own_words(diagnosis: Diagnosis) -> dict[str, Any]:
    """The reason and the detail in kvpin's own words, for which the APIs have no field."""
    words: dict[str, Any] = {"reason": diagnosis.miss.value, "detail": diagnosis.detail}
    if diagnosis.at is not None:
        words["at"] = msgspec.to_builtins(diagnosis.at)
    return words
