"""Computes the prompt that several choices share once, before they run.

An engine with slots would compute it for each choice, because a slot that generates cannot be copied. After a
request for one token, it can be saved and restored into other slots, which takes milliseconds.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from engine_adapter import Capability, JsonBody
from proxy.errors import ANSWERED, Overloaded
from proxy.flow import Flow
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission

# Fewer tokens are computed with each choice. One request more would cost about as much.
LEAST_TOKENS = 256
_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "stream": None, "stream_options": None}


async def compute_once(flow: Flow, call: Call, body: JsonBody, admitted: Admission) -> int | None:
    """Computes the prompt of a choice on the engine it would go to, if that has to compute much of it and can
    restore it afterwards. It waits for its turn like any request, and its tenant pays for its tokens here and
    not again with the choices.

    Returns the tokens that were cached before; None if nothing was computed, or if that failed. The choices
    then find out why.

    Raises:
        Overloaded: all engines are too busy.
    """
    limits = _ONE_TOKEN if call.native is None else {**_ONE_TOKEN, "n_predict": 1}
    own = replace(
        call,
        request_id=f"{call.request_id}-prompt",
        client_id=call.answer_id,
        body=body.replace(**limits),
    )
    try:
        if not await _is_worth_it(flow, own):
            return None
        with admitted.part(len(body.raw)) as part:
            record = await flow.serve(own, Reply(Nobody()), part)
    except Overloaded:
        raise
    except ANSWERED:
        return None
    admitted.prompt_is_paid = record.error is None
    return record.reported_tokens


async def _is_worth_it(flow: Flow, call: Call) -> bool:
    try:
        async with asyncio.timeout(flow.rules.placed_s):
            ready = await flow.prepare(call)
    except TimeoutError:
        return False
    candidates = flow.candidates(ready)
    if ready.prompt is None or not candidates:
        return False
    placement = ready.pool.place(candidates, ready.chain)
    to_compute = len(ready.prompt.token_ids) - placement.predicted_tokens
    can_restore = ready.pool.engines[placement.engine].can(Capability.RESTORE)
    return to_compute >= LEAST_TOKENS and can_restore
