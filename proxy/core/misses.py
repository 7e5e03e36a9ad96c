"""Why a prompt's cached KV was not reused: one word, found by comparing the request with an earlier one.

    how much was reused → all it could           HIT
    tokens that both requests share         → KV that was not found    EVICTED, RESTARTED, ELSEWHERE, …
    tokens that differ  → hardly any repeated    SHARED
                        → the same text follows the difference         TOOLS, SYSTEM, INPUT, …

Only tokens that could have been reused and were not make a miss. Another question about the same document is
none. A date at the beginning of a system prompt is one: all that follows it could have been reused.

`detail_of` makes the sentence.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from engine_adapter.types import Attention
from proxy.core.differences import Difference, Kind


class Miss(StrEnum):
    """Why no more of a prompt was reused."""

    HIT = "hit"  # all that could be reused was
    SHARED = "shared_prefix"  # all that both prompts share was reused, or they are short; the rest is new
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
    FLUSHED = "flushed"  # an operator had this kvpin flush it
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
REPEATED = 0.1
_OF_KIND = {kind: Miss.TOOLS if kind is Kind.ORDER else Miss(f"{kind}_changed") for kind in Kind}


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier request of the same tenant, beside the one that is explained."""

    request_id: str
    n_tokens: int
    common_tokens: int = 0  # leading tokens that both share
    # Tokens behind the first difference that both have: reused if the difference stood at the end.
    repeated_tokens: int = 0
    same_model: bool = True  # both ran on the same
    same_lora: bool = True  # likewise
    has_fields: bool = False  # the fields of both requests are known
    difference: Difference | None = None  # the first difference of the fields
    changes: tuple[str, ...] = ()  # the rules and repairs of kvpin's that alone made this difference


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt reused, and what it could have: facts."""

    n_tokens: int | None  # tokens of its prompt; None where the prompt is not known
    is_whole: bool = True  # False where only the tokens before the first image are known
    reused_tokens: int = 0  # prompt tokens that the engine reused
    predicted_tokens: int = 0  # prompt tokens that it was expected to reuse
    holder: str | None = None  # the engine that would have reused most of its prompt
    held_tokens: int = 0  # prompt tokens that `holder` would have reused; 0 if the request was placed there
    tokens_per_block: int = 1  # The engine's block size in tokens. The engine reuses full blocks.
    compared: Compared | None = None  # the earlier request that it is compared with; None without one
    rules: tuple[str, ...] = ()  # the rules that changed its prompt
    # Tokens that full attention held, and that could not be reused because another kind of attention lacked
    # its part.
    cut_tokens: int = 0
    lacks: Attention | None = None  # that kind of attention
    is_running: bool = False  # the earlier request was not finished when this one began
    left_on: str | None = None  # the engine that the earlier request left its KV on
    is_candidate: bool = True  # that engine could have taken this request
    is_emptied: bool = False  # it lost its cache in between
    # When this kvpin flushed it there in between, in Unix time; None if it did not.
    flushed_at: float | None = None

    def reusable(self, tokens: int) -> int:
        """Number of the first `tokens` tokens that can be reused: full blocks, and never the last token."""
        block = self.tokens_per_block
        return min(tokens, (self.n_tokens or 1) - 1) // block * block

    @property
    def has_all(self) -> bool:
        """True if all that could be reused was, whatever other requests left."""
        n_tokens = self.n_tokens or 1
        most = self.reusable(n_tokens) or n_tokens - 1  # a llama-server reuses less than a block, too
        return self.is_whole and self.reused_tokens >= most > 0

    @property
    def miss(self) -> Miss:
        """Why no more of the prompt was reused."""
        reused, n_tokens = self.reused_tokens, self.n_tokens
        if n_tokens is None:
            return Miss.UNKNOWN
        if self.has_all:
            return Miss.HIT
        if self.is_whole and not self.reusable(n_tokens):
            return Miss.SHORT
        if self.compared is not None:
            return self._beside(self.compared, n_tokens)
        if max(self.held_tokens, self.predicted_tokens) > reused or self.cut_tokens:
            return self._loss
        # An unknown request began the same way, unless only the template's first words were reused.
        return Miss.HIT if 4 * reused > n_tokens else Miss.FIRST

    @property
    def at(self) -> Difference | None:
        """The first difference from the earlier request, where that is the reason."""
        is_reason = self.miss in (*_OF_KIND.values(), Miss.KVPIN, Miss.SHARED)
        return self.compared.difference if self.compared is not None and is_reason else None

    def _beside(self, compared: Compared, n_tokens: int) -> Miss:
        if not (compared.same_model and compared.same_lora):
            return Miss.LORA if compared.same_model else Miss.MODEL
        shared = self.reusable(compared.common_tokens)
        lost = max(shared, self.predicted_tokens) - self.reused_tokens
        # If both apply, the reason that cost more tokens counts.
        is_lost = lost > max(self.reusable(compared.n_tokens) - shared, 0)
        return self._loss if is_lost else self._change(compared, n_tokens)

    @property
    def _loss(self) -> Miss:
        """Why KV that was computed was not reused."""
        if self.is_running:
            return Miss.RUNNING
        if self.held_tokens > self.reused_tokens:
            return Miss.ELSEWHERE
        if self.flushed_at is not None or self.is_emptied:
            return Miss.RESTARTED if self.flushed_at is None else Miss.FLUSHED
        if not self.is_candidate:
            return Miss.AWAY
        if not self.cut_tokens:
            return Miss.EVICTED
        return Miss.STATE if self.lacks is Attention.STATE else Miss.WINDOW

    def _change(self, compared: Compared, n_tokens: int) -> Miss:
        """The miss of a prompt that differs; what both share was reused. Templates make short ones alike."""
        shared = self.reusable(compared.common_tokens)
        if self.is_whole and shared == self.reusable(compared.n_tokens) > 0:
            return Miss.HIT
        is_new = self.is_whole and compared.repeated_tokens < REPEATED * n_tokens
        # More than both share: KV was moved from behind the difference.
        is_moved = self.reused_tokens >= compared.common_tokens + REPEATED * n_tokens
        is_short = self.is_whole and not shared and self.reusable(n_tokens) <= self.tokens_per_block
        if (is_new and self.reused_tokens) or is_moved or is_short:
            return Miss.SHARED
        if compared.changes:
            return Miss.KVPIN
        if compared.difference is not None:
            return _OF_KIND[compared.difference.kind]
        if not self.is_whole:
            return Miss.HIT
        return Miss.TEMPLATE if compared.has_fields else Miss.INPUT


# --- the sentence -------------------------------------------------------------------------------------------


def detail_of(facts: Diagnosis) -> str:
    """What is behind its `miss`, in a sentence; the rules that changed its prompt."""
    miss, compared, block = facts.miss, facts.compared, facts.tokens_per_block
    if compared is None:
        said = _COMPUTED_ELSEWHERE if miss is Miss.HIT and not facts.has_all else _ALONE[miss]
        beside = {}
    else:
        said = (not facts.has_all and _BESIDE.get(miss)) or _ALONE.get(miss, _CHANGED)
        beside = {
            "other": compared.request_id,
            "common": compared.common_tokens,
            "changes": ", ".join(compared.changes),
            "at": "" if compared.difference is None else f" at {compared.difference},",
            "within": f", within the first block of {block}" if compared.common_tokens < block else "",
        }
    said = said.format(
        block=block,
        # A llama-server's slot keeps tokens, not whole blocks.
        parts="reusable tokens" if facts.reused_tokens % block else "full blocks",
        engine=facts.left_on,
        holder=facts.holder,
        held=facts.held_tokens,
        cut=facts.cut_tokens,
        flushed=f"{datetime.fromtimestamp(facts.flushed_at or 0, UTC):%H:%M:%S} UTC",
        **beside,
    )
    rules = facts.rules if miss is not Miss.KVPIN else ()
    return f"{said} (the prompt as changed by {', '.join(rules)})" if rules else said


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
    Miss.FLUSHED: "request {other} left {common} tokens of it, but an operator flushed {engine} at {flushed}",
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
