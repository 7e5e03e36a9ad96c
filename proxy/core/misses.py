"""Why a prompt's cached KV was not reused: one word, found by comparing the request with an earlier one.

    how much was reused → all it could           HIT
    tokens that both requests share         → KV that was not found    EVICTED, RESTARTED, ELSEWHERE, …
    tokens that differ                      → the prompt differs       TOOLS, SYSTEM, INPUT, …

`api_diagnostics.py` says it in the words of the APIs.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from proxy.core.differences import Difference, Kind


class Miss(StrEnum):
    """Why no more of a prompt was reused."""

    HIT = "hit"  # all that could be reused was
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
    EVICTED = "evicted"
    RESTARTED = "restarted"  # the engine was restarted or flushed
    ELSEWHERE = "placed_elsewhere"  # another engine holds it; this one cost less
    AWAY = "engine_away"  # the engine that computed it took no requests
    RUNNING = "still_running"  # the earlier request was not finished
    UNKNOWN = "not_followed"  # kvpin does not know the prompt


_OF_KIND = {
    Kind.TOOLS: Miss.TOOLS,
    Kind.SYSTEM: Miss.SYSTEM,
    Kind.INPUT: Miss.INPUT,
    Kind.MEDIA: Miss.MEDIA,
    Kind.OPTION: Miss.OPTION,
}


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier request of the same tenant, beside the one that is explained.

    Attributes:
        request_id: its id.
        n_tokens: tokens of its prompt.
        common_tokens: leading tokens that both share.
        same_model, same_lora: both ran on the same.
        has_fields: the fields of both requests are known.
        difference: the first difference of the fields.
        is_running: it was not finished when the other began.
        engine: where it ran.
        is_candidate: that engine could have taken the other request.
        is_emptied: that engine lost its cache in between.
    """

    request_id: str
    n_tokens: int
    common_tokens: int = 0
    same_model: bool = True
    same_lora: bool = True
    has_fields: bool = False
    difference: Difference | None = None
    is_running: bool = False
    engine: str | None = None
    is_candidate: bool = True
    is_emptied: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a request, from which the reason of a miss follows.

    Attributes:
        n_tokens: tokens of its prompt; None where the prompt is not known.
        is_whole: False where only the tokens before the first image are known.
        reused_tokens: prompt tokens that the engine reused.
        predicted_tokens: prompt tokens that it was expected to reuse.
        holder: the engine that would have reused most of its prompt.
        held_tokens: prompt tokens that `holder` would have reused; 0 if the request was placed there.
        tokens_per_block: the engine's block size in tokens. The engine reuses full blocks.
        compared: the earlier request that it is compared with; None without one.
    """

    n_tokens: int | None
    is_whole: bool = True
    reused_tokens: int = 0
    predicted_tokens: int = 0
    holder: str | None = None
    held_tokens: int = 0
    tokens_per_block: int = 1
    compared: Compared | None = None

    def reusable(self, tokens: int) -> int:
        """Number of the first `tokens` tokens that can be reused: full blocks, and never the last token."""
        block = self.tokens_per_block
        return min(tokens, (self.n_tokens or 1) - 1) // block * block


class Diagnosis(msgspec.Struct, frozen=True):
    """Why no more of a prompt was reused.

    Attributes:
        miss: the reason.
        detail: one sentence.
        request_id: the earlier request that it was compared with.
        at: the first difference.
        common_tokens: leading tokens that both share.
        missed_tokens: tokens of the earlier prompt that could not be reused.
        changed_tokens: tokens of this prompt from the first that differs.
        earlier_tokens: tokens of the earlier prompt.
    """

    miss: Miss
    detail: str
    request_id: str | None = None
    at: Difference | None = None
    common_tokens: int = 0
    missed_tokens: int = 0
    changed_tokens: int = 0
    earlier_tokens: int = 0


def diagnose(facts: Facts) -> Diagnosis:
    """Why no more of a prompt was reused."""
    miss, compared = miss_of(facts), facts.compared
    detail = _detail(miss, facts)
    if compared is None:
        return Diagnosis(miss, detail)
    own, common = facts.n_tokens or 0, compared.common_tokens
    return Diagnosis(
        miss,
        detail,
        compared.request_id,
        compared.difference if miss in _OF_KIND.values() else None,
        common,
        max(min(own, compared.n_tokens) - common, 0),
        max(own - common, 0),
        compared.n_tokens,
    )


def miss_of(facts: Facts) -> Miss:
    """The reason alone."""
    compared, reused = facts.compared, facts.reused_tokens
    if (alone := _without_another(facts)) is not None:
        return alone
    if compared is None and facts.held_tokens > reused:
        return Miss.ELSEWHERE
    if compared is None and reused < facts.predicted_tokens:
        return Miss.EVICTED
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


def _without_another(facts: Facts) -> Miss | None:
    """The miss, if no other request is needed to tell it; else None."""
    if facts.n_tokens is None:
        return Miss.UNKNOWN
    reusable = facts.reusable(facts.n_tokens)
    if facts.is_whole and not reusable:
        return Miss.SHORT
    return Miss.HIT if facts.is_whole and facts.reused_tokens >= reusable else None


def _loss(facts: Facts, compared: Compared) -> Miss:
    """Why KV that was computed was not reused."""
    if compared.is_running:
        return Miss.RUNNING
    if facts.held_tokens > facts.reused_tokens:
        return Miss.ELSEWHERE
    if compared.is_emptied:
        return Miss.RESTARTED
    return Miss.EVICTED if compared.is_candidate else Miss.AWAY


def _change(facts: Facts, compared: Compared) -> Miss:
    """The miss of a prompt that differs from an earlier one. All that both share was reused."""
    if facts.is_whole and facts.reusable(compared.common_tokens) == facts.reusable(compared.n_tokens):
        return Miss.HIT
    if compared.difference is not None:
        return _OF_KIND[compared.difference.kind]
    if not facts.is_whole:
        return Miss.HIT
    return Miss.TEMPLATE if compared.has_fields else Miss.INPUT


def _detail(miss: Miss, facts: Facts) -> str:
    compared, block = facts.compared, facts.tokens_per_block
    has_all = _without_another(facts) is Miss.HIT
    if compared is None:
        said = _COMPUTED_ELSEWHERE if miss is Miss.HIT and not has_all else _ALONE[miss]
        return said.format(block=block, parts=_parts(facts), holder=facts.holder, held=facts.held_tokens)
    difference, common = compared.difference, compared.common_tokens
    beside = None if has_all else _BESIDE.get(miss)
    return (beside or _ALONE.get(miss) or _CHANGED).format(
        block=block,
        parts=_parts(facts),
        holder=facts.holder,
        held=facts.held_tokens,
        other=compared.request_id,
        engine=compared.engine,
        common=common,
        at="" if difference is None else f" at {difference},",
        within=f", within the first block of {block}" if common < block else "",
    )


def _parts(facts: Facts) -> str:
    """Words for what was reused: a llama-server's slot keeps tokens, not whole blocks."""
    return "reusable tokens" if facts.reused_tokens % facts.tokens_per_block else "full blocks"


_ALONE = {
    Miss.UNKNOWN: "the prompt is not known here: reuse is off, or it is not text",
    Miss.SHORT: "the prompt is too short: engines reuse blocks of {block} tokens, and never the last token",
    Miss.HIT: "these are all its {parts}; the last token is always computed",
    Miss.FIRST: "no recent request begins like it",
    Miss.ELSEWHERE: "{holder} holds {held} tokens of it, but would have cost more",
    Miss.EVICTED: "its beginning was evicted before the engine computed the prompt",
}
_COMPUTED_ELSEWHERE = (
    "the request that computed them is not known here: "
    "it came to another kvpin or worker, or was too long ago"
)
_BESIDE = {
    Miss.HIT: "these are all {parts} that it shares with request {other}",
    Miss.MODEL: "request {other} ran on another model",
    Miss.LORA: "request {other} ran with another LoRA adapter, or none",
    Miss.EVICTED: (
        "it shares {common} tokens with request {other}, but {engine} evicted or flushed them before it "
        "computed this prompt"
    ),
    Miss.RESTARTED: "request {other} left {common} tokens of it, but {engine} was restarted or flushed since",
    Miss.AWAY: "request {other} left {common} tokens of it on {engine}, which took no requests",
    Miss.RUNNING: "it shares {common} tokens with request {other}, which was still running on {engine}",
    Miss.TEMPLATE: (
        "it only continues request {other}, but the chat template renders earlier messages anew from token "
        "{common} on"
    ),
}
_CHANGED = "it differs from request {other}{at} from token {common} on{within}"
