"""What only requests tell of a vLLM server: whether it heeds cache salts, and tells the tokens it reused.

Each is of one token or refused, so that nothing is left in its cache; only an older server, which leaves out
a count of 0, gets a prompt of a block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from engine_adapter.errors import EngineRejected
from engine_adapter.http.control import ControlClient
from engine_adapter.vllm.metrics import VllmMetrics

_NO_SUCH_ROUTE = 404
# A busy engine is not waited for: what could not be tried is left open.
_PATIENCE_S = 3.0
_TOKEN = 1
_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
# A request for each route that takes a salt. Where salts are known, an empty one is refused.
_SALTED: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": [_TOKEN], "max_tokens": 1},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": _CHAT,
}


@dataclass(frozen=True, slots=True)
class Trials:
    """What was found; None for what could not be tried yet.

    Attributes:
        takes_salt: no route it has lets a salt pass that it does not heed.
        reports_cached: its answers tell the reused tokens.
    """

    takes_salt: bool | None = None
    reports_cached: bool | None = None


async def try_out(
    control: ControlClient, model: str, metrics: VllmMetrics, headers: Mapping[str, str], known: Trials
) -> Trials:
    """Tries what is not known yet.

    Args:
        control: to the server.
        model: the name it serves under.
        metrics: how its cache is cut.
        headers: those that send a request to the engine meant.
        known: what was found of the same process before.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            if known.takes_salt is None:
                known = replace(known, takes_salt=await _takes_salt(control, model))
            if known.reports_cached is None:
                known = replace(known, reports_cached=await _reports_cached(control, model, metrics, headers))
    return known


async def _takes_salt(control: ControlClient, model: str) -> bool:
    return all([await _heeds_salt(control, path, model) for path in _SALTED])


async def _heeds_salt(control: ControlClient, path: str, model: str) -> bool:
    body = {**_SALTED[path], "model": model, "cache_salt": ""}
    try:
        await control.call("POST", path, json=body)
    except EngineRejected as error:
        return error.status == _NO_SUCH_ROUTE or "cache_salt" in f"{error.param} {error}"
    return False


async def _reports_cached(
    control: ControlClient, model: str, metrics: VllmMetrics, headers: Mapping[str, str]
) -> bool | None:
    block = metrics.block_size
    lengths = (1, block + 1, block + 1) if block and metrics.caching else (1,)
    try:
        for length in lengths:
            body = {"model": model, "prompt": [_TOKEN] * length, "max_tokens": 1, "temperature": 0}
            if _tells(await control.call("POST", "/v1/completions", json=body, headers=headers)):
                return True
    except EngineRejected:
        return None  # it does not serve completions
    return False


def _tells(answer: object) -> bool:
    match answer:
        case {"usage": {"prompt_tokens_details": {"cached_tokens": int()}}}:
            return True
        case _:
            return False
