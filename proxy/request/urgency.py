"""The urgency of a request, in its client's words: its priority, and how long its client waits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from engine_adapter import JsonBody
from proxy.core.admission import MAX_PRIORITY, MIN_PRIORITY
from proxy.errors import BadRequest
from proxy.headers import DEADLINE_HEADERS, PRIORITY_HEADER
from proxy.request.calls import Call

# Tiers of OpenAI's and Anthropic's APIs. All others are usual.
_TIERS = {"priority": -1, "flex": 1}
# Tokens that an answer costs its tenant: USUAL_ANSWER if the request names no limit. If it names one, that
# limit, but at most MOST_ANSWER: few answers come near a high limit.
USUAL_ANSWER, MOST_ANSWER = 256, 1024
# Estimate for a prompt that is not tokenised here.
BYTES_PER_TOKEN = 4


def priority_of(call: Call) -> int:
    """The request's priority: the lowest value goes first, 0 is usual. The header counts more than the body's
    `priority`, and that more than its `service_tier`. Raises what `priority_in` raises."""
    if (given := priority_in(call.headers)) is not None:
        return given
    if not isinstance(call.body, JsonBody):
        return 0
    asked = call.body.hint("priority")
    if isinstance(asked, int) and not isinstance(asked, bool):
        return _within(asked)
    tier = call.body.hint("service_tier")
    return _TIERS.get(tier, 0) if isinstance(tier, str) else 0


def priority_in(headers: Mapping[str, str]) -> int | None:
    """The priority in a request's header; None without one.

    Raises:
        BadRequest: it is no whole number within the limits.
    """
    given = headers.get(PRIORITY_HEADER)
    if given is None:
        return None
    with suppress(ValueError):
        if MIN_PRIORITY <= (priority := int(given)) <= MAX_PRIORITY:
            return priority
    rule = f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}"
    raise BadRequest(f"the header {PRIORITY_HEADER} must be {rule}")


def deadline_of(call: Call) -> float | None:
    """Seconds that the client waits for its answer; None if it does not say."""
    for name in DEADLINE_HEADERS:
        with suppress(ValueError):
            if (seconds := float(call.headers.get(name, ""))) > 0:
                return seconds
    return None


def prompt_tokens_of(call: Call, known: int | None) -> int:
    """Tokens of the prompt; those of one that is not `known` are estimated."""
    if known is not None:
        return known
    return len(call.body.raw) // BYTES_PER_TOKEN if isinstance(call.body, JsonBody) else 0


def tokens_of(call: Call, known: int | None) -> int:
    """About how many tokens a request costs: its prompt, and its answer."""
    prompt_tokens, body = prompt_tokens_of(call, known), call.body
    if not isinstance(body, JsonBody):
        return prompt_tokens + USUAL_ANSWER
    asked = body.hint("max_completion_tokens") or body.hint("max_tokens")
    is_number = isinstance(asked, int) and asked > 0
    return prompt_tokens + (min(asked, MOST_ANSWER) if is_number else USUAL_ANSWER)


def _within(priority: int) -> int:
    return min(max(priority, MIN_PRIORITY), MAX_PRIORITY)
