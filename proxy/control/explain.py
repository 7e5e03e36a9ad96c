"""One past request: what was predicted, what came, and in one sentence why.

The only place where prompt text comes out of kvpin: a few tokens around the first that differs, decoded
for the admin.
"""

from __future__ import annotations

from array import array
from typing import Any

from proxy.control.context import Control
from proxy.control.routing import describe, describe_cost
from proxy.core.placement.decision import Placement
from proxy.errors import NoEngine, NotFound
from proxy.fleet.engine import TOKENS_PER_BLOCK
from proxy.observe.reasons import first_token_s
from proxy.request.records import Divergence, RequestRecord


def summarize(record: RequestRecord) -> dict[str, Any]:
    """A record without its prompt."""
    placement = record.placement
    return {
        "request_id": record.request_id,
        "client_request_id": record.client_id,
        "started": record.started,
        "route": record.route,
        "model": record.model,
        "tenant": record.tenant,
        "stream": record.stream,
        "prompt_cache_key": record.prompt_cache_key,
        "engine": placement.engine if placement is not None else None,
        "attempts": list(record.attempts),
        "status": record.status,
        "n_tokens": record.n_tokens,
        "predicted_tokens": placement.predicted_tokens if placement is not None else None,
        "reported_tokens": record.reported_tokens,
        "output_tokens": record.output_tokens,
        "expected_first_token_s": _expected_s(record),
        "first_byte_s": record.first_byte_s,
        "duration_s": record.duration_s,
        "error": record.error,
        "note": record.note,
    }


def explain(control: Control, record: RequestRecord) -> dict[str, Any]:
    """A record with where it leaves the request it shares most with, and the reason of its hit or miss."""
    divergence = control.requests.divergence(record)
    block = _tokens_per_block(control, record)
    placement = record.placement
    return {
        **summarize(record),
        "explanation": explanation(record, divergence, block),
        "decision": _decision(control, placement) if placement is not None else None,
        "divergence": _divergence(control, record, divergence) if divergence is not None else None,
    }


def _expected_s(record: RequestRecord) -> float | None:
    """When its first token was expected, where its prompt was known."""
    if record.placement is None or record.prompt is None:
        return None
    return first_token_s(record.placement.chosen)


def _decision(control: Control, placement: Placement) -> dict[str, Any]:
    return {
        **describe(placement, reuse=control.flow.ingest is not None),
        "costs": [describe_cost(cost) for cost in placement.costs],
    }


def explanation(record: RequestRecord, divergence: Divergence | None, tokens_per_block: int) -> str:
    """Why the cache missed or hit, in one sentence."""
    placement = record.placement
    if placement is None:
        return f"it was not placed: {record.error or 'it is still being read'}"
    if record.prompt is None or not record.prompt.whole or record.tokens_agree is False:
        return _of_the_unknown(record, placement)
    predicted, reported, total = placement.predicted_tokens, record.reported_tokens, placement.n_tokens
    engine = placement.engine
    if reported is None:
        return f"{engine} did not report what it reused; {predicted} of {total} tokens were predicted"
    if reported < predicted:
        return (
            f"{engine} reused {reported} of the {predicted} tokens predicted: the others were evicted on "
            f"{engine} before the prompt came up there"
        )
    surplus = f", {reported - predicted} more than predicted" if reported > predicted else ", as predicted"
    reused = f"{reported} of {total} tokens were reused on {engine}{surplus}"
    return f"{reused}; {_of_the_rest(record, placement, divergence, tokens_per_block)}"


def _of_the_unknown(record: RequestRecord, placement: Placement) -> str:
    """What can be said of a prompt that is not known, or not all of it, or wrongly."""
    if record.tokens_agree is False:
        return f"{placement.engine} made other tokens of its prompt than kvpin: no prediction for it counts"
    if record.prompt is None:
        return "its prompt is not known here, so nothing was predicted: reuse is off, or it is no text prompt"
    known = (
        f"of {placement.n_tokens} tokens before its first image, {placement.predicted_tokens} were predicted"
    )
    reported = record.reported_tokens
    reused = "did not say what it reused" if reported is None else f"reused {reported}"
    return f"it is known here only in part: {known}; {placement.engine} {reused}"


def _of_the_rest(
    record: RequestRecord, placement: Placement, divergence: Divergence | None, block: int
) -> str:
    """Why no more than that was reused."""
    reused = record.reported_tokens or 0
    common = divergence.common_tokens if divergence is not None else 0
    elsewhere = max(placement.costs, key=lambda cost: cost.cached_tokens)
    if elsewhere.cached_tokens > reused:
        chosen = placement.chosen
        return (
            f"{elsewhere.engine} held {elsewhere.cached_tokens}, but it was placed elsewhere because "
            f"{chosen.engine} was to cost less, {chosen.total_s * 1000:.1f} ms against "
            f"{elsewhere.total_s * 1000:.1f} ms"
        )
    if reused >= (placement.n_tokens - 1) // block * block:
        return "that is every full block of it but the one of its last token"
    if divergence is None or common == 0:
        return "first time seen: no recent request begins like it"
    shared = common // block * block
    if shared <= reused:
        note = "" if common >= block else f", within the first block of {block}"
        return f"it diverges at token {common} from request {divergence.request_id}{note}"
    return (
        f"it shares {shared} tokens of full blocks with request {divergence.request_id}, evicted or flushed "
        "before this one came"
    )


def _divergence(control: Control, record: RequestRecord, divergence: Divergence) -> dict[str, Any]:
    return {
        "request_id": divergence.request_id,
        "common_tokens": divergence.common_tokens,
        "token_ids": list(divergence.token_ids),
        "other_token_ids": list(divergence.other_token_ids),
        "text": _decode(control, record, divergence.token_ids),
        "other_text": _decode(control, record, divergence.other_token_ids),
    }


def _decode(control: Control, record: RequestRecord, token_ids: tuple[int, ...]) -> str | None:
    try:
        prompts = control.fleet.pool(record.model).prompts
    except (NotFound, NoEngine):
        return None
    return prompts.decode(array("i", token_ids)) if prompts is not None else None


def _tokens_per_block(control: Control, record: RequestRecord) -> int:
    """The block size that bounds reuse on the engine that served it."""
    engine = control.fleet.engines.get(record.placement.engine) if record.placement is not None else None
    own = engine.info.tokens_per_block if engine is not None and engine.info is not None else None
    return own or TOKENS_PER_BLOCK
