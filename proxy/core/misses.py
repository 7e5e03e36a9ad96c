"""Why a prompt's cached KV was not reused: one word, found by comparing the request with an earlier one.

    how much was reused → all it could           HIT
    tokens that both requests share         → KV that was not found    EVICTED, RESTARTED, ELSEWHERE, …
    tokens that differ  → hardly any repeated    SHARED
                        → the same text follows the difference         TOOLS, SYSTEM, INPUT, …

Only tokens that could have been reused and were not make a miss. Another question about the same document is
none. A date at the beginning of a system prompt is one: all that follows it could have been reused.

The last two functions say it in the words of OpenAI's and Anthropic's APIs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from engine_adapter.types import Attention
from proxy.core.differences import Difference, Kind


class Miss(StrEnum):
    """Why no more of a prompt was reused."""

    HIT = "hit"  # all that could be reused was
    SHARED = "shared_prefix"  # all that both prompts share was reused; the rest is new
    SHORT = "too_short"  # it has no full block, and engines reuse only those
    FIRST = "first_seen"  # no request of this tenant that is known began like it
    MODEL = "model_changed"
    LORA = "lora_changed"
    TOOLS = "tools_changed"
    SYSTEM = "system_changed"
    INPUT = "input_changed"
    MEDIA = "media_changed"
    OPTION = "option_changed"  # another field that goes into the prompt
    TEMPLATE = "template_changed"  # the fields agree; the template renders earlier messages in another way
    KVPIN = "changed_by_kvpin"  # a rule or a repair made it differ, where the client did not
    EVICTED = "evicted"
    WINDOW = "window_gone"  # full attention holds it, the blocks of a sliding window are gone
    STATE = "state_gone"  # full attention holds it, the state of linear attention is gone
    RESTARTED = "restarted"  # the engine was restarted or flushed
    ELSEWHERE = "placed_elsewhere"  # another engine holds it; this one cost less
    AWAY = "engine_away"  # the engine that computed it took no requests
    RUNNING = "still_running"  # the earlier request was not finished
    UNKNOWN = "not_followed"  # kvpin does not know the prompt

    @property
    def is_miss(self) -> bool:
        """True if tokens could have been reused and were not."""
        return self not in (Miss.HIT, Miss.SHARED, Miss.SHORT, Miss.FIRST, Miss.UNKNOWN)


# Tokens behind a difference count if they are at least this share of the prompt: every chat repeats some of
# its template's words.
_REPEATED = 0.1
_OF_KIND = {
    Kind.TOOLS: Miss.TOOLS,
    Kind.ORDER: Miss.TOOLS,
    Kind.SYSTEM: Miss.SYSTEM,
    Kind.INPUT: Miss.INPUT,
    Kind.MEDIA: Miss.MEDIA,
    Kind.OPTION: Miss.OPTION,
}


REMEDIES: Mapping[Miss, str] = {
    Miss.SYSTEM: "put what changes at the end of the prompt, or choose rules: `kvpin advise` says which",
    Miss.TOOLS: "send tools in a fixed order, or choose the rules tools_sorted and schemas_sorted",
    Miss.INPUT: "only append messages",
    Miss.OPTION: "keep this field for a conversation",
    Miss.TEMPLATE: "where the client leaves reasoning out, the rule reasoning_kept puts it back",
    Miss.KVPIN: "leave out the rule or repair that `kvpin requests ID` names",
    Miss.EVICTED: "more memory, a host tier, retention or a pin",
    Miss.WINDOW: "more memory",
    Miss.STATE: "more memory",
}
"""What a person can do about a miss."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier request of the same tenant, beside the one that is explained.

    Attributes:
        common_tokens: leading tokens that both share.
        repeated_tokens: tokens behind the first difference that both have. They could have been reused if the
            difference stood at the end.
        same_model, same_lora: both ran on the same.
        has_fields: the fields of both requests are known.
        difference: the first difference of the fields.
        changes: the rules and repairs of kvpin's that alone made this difference.
        is_running: it was not finished when the other began.
        engine: the engine that it left its KV on.
        is_candidate: the engine could have taken the other request.
        is_emptied: the engine lost its cache in between.
    """

    request_id: str
    n_tokens: int
    common_tokens: int = 0
    repeated_tokens: int = 0
    same_model: bool = True
    same_lora: bool = True
    has_fields: bool = False
    difference: Difference | None = None
    changes: tuple[str, ...] = ()
    is_running: bool = False
    engine: str | None = None
    is_candidate: bool = True
    is_emptied: bool = False


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt reused, and what it could have: facts. The reason is put into words for who asks.

    Attributes:
        n_tokens: tokens of its prompt; None where the prompt is not known.
        is_whole: False where only the tokens before the first image are known.
        reused_tokens: prompt tokens that the engine reused.
        predicted_tokens: prompt tokens that it was expected to reuse.
        holder: the engine that would have reused most of its prompt.
        held_tokens: prompt tokens that `holder` would have reused; 0 if the request was placed there.
        tokens_per_block: the engine's block size in tokens. The engine reuses full blocks.
        compared: the earlier request that it is compared with; None without one.
        rules: the rules that changed its prompt.
        cut_tokens: tokens that full attention held, and that could not be reused because another kind of
            attention lacked its part.
        lacks: that kind of attention.
    """

    n_tokens: int | None
    is_whole: bool = True
    reused_tokens: int = 0
    predicted_tokens: int = 0
    holder: str | None = None
    held_tokens: int = 0
    tokens_per_block: int = 1
    compared: Compared | None = None
    rules: tuple[str, ...] = ()
    cut_tokens: int = 0
    lacks: Attention | None = None

    def reusable(self, tokens: int) -> int:
        """Number of the first `tokens` tokens that can be reused: full blocks, and never the last token."""
        block = self.tokens_per_block
        return min(tokens, (self.n_tokens or 1) - 1) // block * block

    @property
    def miss(self) -> Miss:
        """Why no more of the prompt was reused."""
        return _miss_of(self)

    @property
    def at(self) -> Difference | None:
        """The first difference from the earlier request, where that is the reason."""
        is_reason = self.miss in (*_OF_KIND.values(), Miss.KVPIN, Miss.SHARED)
        return self.compared.difference if self.compared is not None and is_reason else None

    @property
    def detail(self) -> str:
        """The reason, in a sentence."""
        miss = self.miss
        rules = self.rules if miss is not Miss.KVPIN else ()
        return _detail(miss, self) + (f" (the prompt as changed by {', '.join(rules)})" if rules else "")


def _miss_of(facts: Diagnosis) -> Miss:
    compared, reused = facts.compared, facts.reused_tokens
    if (alone := _without_another(facts)) is not None:
        return alone
    if compared is None and facts.held_tokens > reused:
        return Miss.ELSEWHERE
    if compared is None and (reused < facts.predicted_tokens or facts.cut_tokens):
        return _evicted(facts)
    if compared is None:
        # An unknown request began the same way, unless only the template's first words were reused.
        return Miss.HIT if 4 * reused > (facts.n_tokens or 0) else Miss.FIRST
    if not (compared.same_model and compared.same_lora):
        return Miss.LORA if compared.same_model else Miss.MODEL
    shared = facts.reusable(compared.common_tokens)
    lost = max(shared, facts.predicted_tokens) - reused
    # If both apply, the reason that cost more tokens counts.
    is_lost = lost > max(facts.reusable(compared.n_tokens) - shared, 0)
    return _loss(facts, compared) if is_lost else _change(facts, compared)


def _without_another(facts: Diagnosis) -> Miss | None:
    """The miss, if no other request is needed to tell it; else None."""
    if facts.n_tokens is None:
        return Miss.UNKNOWN
    reusable = facts.reusable(facts.n_tokens)
    if facts.is_whole and not reusable:
        return Miss.SHORT
    return Miss.HIT if facts.is_whole and facts.reused_tokens >= reusable else None


def _loss(facts: Diagnosis, compared: Compared) -> Miss:
    """Why KV that was computed was not reused."""
    if compared.is_running:
        return Miss.RUNNING
    if facts.held_tokens > facts.reused_tokens:
        return Miss.ELSEWHERE
    if compared.is_emptied:
        return Miss.RESTARTED
    return _evicted(facts) if compared.is_candidate else Miss.AWAY


def _evicted(facts: Diagnosis) -> Miss:
    """What was evicted: all, or only what a kind of attention beside full attention needs."""
    if not facts.cut_tokens:
        return Miss.EVICTED
    return Miss.STATE if facts.lacks is Attention.STATE else Miss.WINDOW


def _change(facts: Diagnosis, compared: Compared) -> Miss:
    """The miss of a prompt that differs from an earlier one. All that both share was reused."""
    if facts.is_whole and facts.reusable(compared.common_tokens) == facts.reusable(compared.n_tokens):
        return Miss.HIT
    is_new = facts.is_whole and compared.repeated_tokens < _REPEATED * (facts.n_tokens or 0)
    if is_new and facts.reused_tokens:
        return Miss.SHARED
    if compared.changes:
        return Miss.KVPIN
    if compared.difference is not None:
        return _OF_KIND[compared.difference.kind]
    if not facts.is_whole:
        return Miss.HIT
    return Miss.TEMPLATE if compared.has_fields else Miss.INPUT


def _detail(miss: Miss, facts: Diagnosis) -> str:
    compared, block, has_all = facts.compared, facts.tokens_per_block, _without_another(facts) is Miss.HIT
    if compared is None:
        said = _COMPUTED_ELSEWHERE if miss is Miss.HIT and not has_all else _ALONE[miss]
        beside = {}
    else:
        said = (not has_all and _BESIDE.get(miss)) or _ALONE.get(miss) or _CHANGED
        beside = {
            "other": compared.request_id,
            "engine": compared.engine,
            "common": compared.common_tokens,
            "changes": ", ".join(compared.changes),
            "at": "" if compared.difference is None else f" at {compared.difference},",
            "within": f", within the first block of {block}" if compared.common_tokens < block else "",
        }
    return said.format(
        block=block,
        parts=_parts(facts),
        holder=facts.holder,
        held=facts.held_tokens,
        cut=facts.cut_tokens,
        **beside,
    )


def _parts(facts: Diagnosis) -> str:
    """Words for what was reused: a llama-server's slot keeps tokens, not whole blocks."""
    return "reusable tokens" if facts.reused_tokens % facts.tokens_per_block else "full blocks"


_ALONE = {
    Miss.UNKNOWN: (
        "kvpin did not know the prompt when it placed it: reuse was off, its model was not in memory, "
        "or only the engine can read it"
    ),
    Miss.SHORT: "the prompt is too short: engines reuse blocks of {block} tokens, and never the last token",
    Miss.HIT: "these are all its {parts}; the last token is always computed",
    Miss.FIRST: "no recent request begins like it",
    Miss.ELSEWHERE: "{holder} holds {held} tokens of it, but would have cost more",
    Miss.EVICTED: "its beginning was evicted before the engine computed the prompt",
    Miss.WINDOW: (
        "full attention still holds {cut} more tokens of it, but the blocks of the sliding window that "
        "would be needed there were evicted"
    ),
    Miss.STATE: (
        "full attention still holds {cut} more tokens of it, but the state that linear attention would need "
        "there was evicted, or never kept"
    ),
}
_COMPUTED_ELSEWHERE = (
    "the request that computed them is not known here: "
    "it came to another kvpin or worker, or was too long ago"
)
_BESIDE = {
    Miss.HIT: "these are all {parts} that it shares with request {other}",
    Miss.SHARED: "it shares {common} tokens with request {other}; from there on{at} it is new",
    Miss.MODEL: "request {other} ran on another model",
    Miss.LORA: "request {other} ran with another LoRA adapter, or none",
    Miss.EVICTED: (
        "it shares {common} tokens with request {other}, but {engine} evicted or flushed them before it "
        "computed this prompt"
    ),
    Miss.RESTARTED: "request {other} left {common} tokens of it, but {engine} was restarted or flushed since",
    Miss.AWAY: "request {other} left {common} tokens of it on {engine}, which took no requests",
    Miss.RUNNING: "it shares {common} tokens with request {other}, which was still running on {engine}",
    Miss.KVPIN: (
        "kvpin's own changes ({changes}) made it differ from request {other}{at} from token {common} "
        "on{within}; as their clients sent them, both are equal there"
    ),
    Miss.TEMPLATE: (
        "it only continues request {other}, but the chat template renders earlier messages anew from token "
        "{common} on"
    ),
}
_CHANGED = "it differs from request {other}{at} from token {common} on{within}"


# Miss → the words of OpenAI's and of Anthropic's API for it.
_WORDS = {
    Miss.MODEL: ("model_changed", "model_changed"),
    Miss.LORA: ("model_changed", "model_changed"),
    Miss.TOOLS: ("tools_changed", "tools_changed"),
    Miss.SYSTEM: ("input_changed", "system_changed"),
    **dict.fromkeys(
        (Miss.SHARED, Miss.INPUT, Miss.MEDIA, Miss.TEMPLATE), ("input_changed", "messages_changed")
    ),
}
# Options that OpenAI's API has a reason for.
_OPENAI_OPTIONS = {
    "text": "text_format_changed",
    "response_format": "text_format_changed",
    "reasoning": "reasoning_effort_changed",
    "reasoning_effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
}
_NO_WORDS = None, None


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
    reason, compared = option or _WORDS.get(miss, _NO_WORDS)[0], diagnosis.compared
    if reason is None or compared is None:
        return {"type": "unavailable", "kvpin": _own_words(diagnosis)}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": max((diagnosis.n_tokens or 0) - compared.common_tokens, 0),
        "comparison_reusable_tokens": compared.n_tokens,
        "kvpin": _own_words(diagnosis),
    }


def anthropic_diagnostics(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    """The `diagnostics` of a message. The argument is None if the earlier message is not known. The result
    is None if the prompt does not diverge, as in Anthropic's API."""
    if diagnosis is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    if diagnosis.miss is Miss.HIT:
        return None
    _, kind = _WORDS.get(diagnosis.miss, _NO_WORDS)
    reason, compared = dict[str, Any](type=kind or "unavailable"), diagnosis.compared
    if kind is not None and compared is not None:
        shorter = min(diagnosis.n_tokens or 0, compared.n_tokens)
        reason["cache_missed_input_tokens"] = max(shorter - compared.common_tokens, 0)
    return {"cache_miss_reason": {**reason, "kvpin": _own_words(diagnosis)}}


def _own_words(diagnosis: Diagnosis) -> dict[str, Any]:
    """The reason and the detail in kvpin's own words, for which the APIs have no field."""
    words: dict[str, Any] = {"reason": diagnosis.miss.value, "detail": diagnosis.detail}
    if diagnosis.at is not None:
        words["at"] = msgspec.to_builtins(diagnosis.at)
    return words
