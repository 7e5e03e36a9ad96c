"""What an engine reports of an answer, compared with what was expected of it: cached tokens and token ids."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog
from msgspec.structs import replace

from engine_adapter import EngineError, Hold, JsonBody
from proxy.core.audit import Unchecked
from proxy.fleet.engine import Engine
from proxy.fleet.ingest import Ingest
from proxy.fleet.lease import Lease
from proxy.prompt import Prompt, audit_tokens
from proxy.prompt.tokenizer import ANSWER_S
from proxy.request.records import RequestRecord
from proxy.steps.preparation import Ready

log = structlog.get_logger(__name__)


def check_prediction(
    ingest: Ingest | None,
    engine: Engine,
    ready: Ready,
    lease: Lease,
    record: RequestRecord | None,
    reported: int | None,
) -> Unchecked | None:
    """Compares a firm prediction of cached tokens with what the engine reported. Returns why it did not.

    `ingest` audits; it is None when reuse is off. `reported`: None if the engine did not tell. `record`: of
    the answer that was checked; None for the leg of a request that another engine answers.
    """
    placement = lease.placement
    engine.audit.reported(reported or 0)
    if ingest is None or reported is None:
        unchecked = Unchecked.REUSE_OFF if ingest is None else Unchecked.NOT_REPORTED
    elif ready.prompt is None:
        unchecked = Unchecked.PROMPT_UNKNOWN
    elif record is not None and record.tokens_agree is False:
        unchecked = Unchecked.TOKENS_DIFFER
    elif lease.placed.may_be_evicted and placement.predicted_tokens:
        unchecked = Unchecked.MAY_BE_EVICTED
        if record is not None and record.placement is not None:
            record.placement = replace(record.placement, firm=False)
    elif not placement.firm:
        unchecked = Unchecked.NOT_FIRM
    else:
        predicted = placement.predicted_tokens
        ingest.audit(engine, predicted, reported, evicted_since=lease.evicted_since)
        return None
    if record is not None and record.error is not None:
        return Unchecked.FAILED
    return unchecked if record is None or record.runs_prompt else Unchecked.NO_PROMPT


def is_audited(engine: Engine, prompt: Prompt) -> bool:
    """True if the engine is to make its own ids of this prompt, which is about to be served there."""
    builder = engine.prompts
    if builder is None or not prompt.whole or not prompt.forms:
        return False
    return not builder.info.renders_alike and engine.audits.sample(prompt.forms)


async def ask_tokens(engine: Engine, hold: Hold, path: str, raw: bytes) -> None:
    """Asks the engine how it tokenises a body that it has served, if its answer did not tell."""
    if hold.answer is not None and hold.answer.prompt_tokens() is not None:
        return
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            hold.told_tokens = await engine.adapter.tokenize_if_loaded(path, JsonBody(raw))


def check_tokens(ready: Ready, engine: Engine, hold: Hold, record: RequestRecord) -> None:
    """Compares our token ids of the prompt with the engine's, if the engine told them."""
    theirs = hold.answer.prompt_tokens() if hold.answer is not None else None
    theirs = hold.told_tokens if theirs is None else theirs
    if theirs is None or record.prompt is None or not record.prompt.whole or engine.prompts is None:
        return
    if ready.rendering is not engine.prompts:
        return  # the engine has changed meanwhile
    record.tokens_agree = record.prompt.token_ids == theirs
    if not record.tokens_agree:
        ready.pool.part(engine)
        engine.lost_forms()
    if (difference := audit_tokens(engine.prompts, record.prompt, theirs)) is not None:
        log.warning(
            "the engine's tokens of a prompt differ from kvpin's: its prediction is not used",
            engine=engine.id,
            request=record.request_id,
            difference=difference,
        )
