"""Computes the prompt that several choices share once, before they run.

An engine with slots would compute it for each choice, because a slot that generates cannot be copied. After a
request for one token, it can be saved and restored into other slots, which takes milliseconds.
"""

from __future__ import annotations

from contextlib import suppress

from msgspec.structs import replace

from engine_adapter import Capability, JsonBody
from proxy.flow import Flow
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.error_table import ANSWERED
from proxy.request.records import RequestRecord

# Fewer tokens are computed with each choice. One request more would cost about as much.
LEAST_TOKENS = 256
_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "stream": None, "stream_options": None}


async def compute_once(flow: Flow, call: Call, body: JsonBody) -> int | None:
    """Computes the prompt of a choice on the engine it would go to, if that has to compute much of it and can
    restore it afterwards.

    Returns the tokens that were cached before; None if nothing was computed, or if that failed. The choices
    then find out why.
    """
    limits = _ONE_TOKEN if call.native is None else {**_ONE_TOKEN, "n_predict": 1}
    own = replace(call, request_id=f"{call.request_id}-prompt", body=body.replace(**limits))
    record = RequestRecord.of(own)
    with suppress(*ANSWERED):
        ready = await flow.prepare(own)
        candidates = flow.candidates(ready)
        if ready.prompt is None or not candidates:
            return None
        placement = ready.pool.place(candidates, ready.chain)
        to_compute = len(ready.prompt.token_ids) - placement.predicted_tokens
        can_restore = ready.pool.engines[placement.engine].can(Capability.RESTORE)
        if to_compute >= LEAST_TOKENS and can_restore:
            await flow.run(ready, Reply(Nobody()), record)
    return record.reported_tokens
