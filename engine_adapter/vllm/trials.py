"""Learns by requests whether a vLLM server respects cache salts and reports reused tokens.

Each trial request has one token or is refused, so it leaves nothing in the cache. Only an older server, which
leaves out a count of 0, gets a prompt of one block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.http.control import ControlClient
from engine_adapter.vllm.metrics import VllmMetrics

_T = TypeVar("_T")
# Seconds that one trial may take: a busy engine may queue it.
_PATIENCE_S = 3.0
_TOKEN = 1
_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
# One request for each route that takes a salt. A server that respects salts refuses an empty one.
_SALTED: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": [_TOKEN], "max_tokens": 1},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": _CHAT,
}


@dataclass(frozen=True, slots=True)
class Trials:
    """The results of the trials; None for what could not be tried yet.

    Attributes:
        takes_salt: every route of the server respects salts. Always known after `try_out`.
        reports_cached: its answers report the reused tokens.
    """

    takes_salt: bool | None = None
    reports_cached: bool | None = None


async def try_out(
    control: ControlClient, model: str, metrics: VllmMetrics, headers: Mapping[str, str], known: Trials
) -> Trials:
    """Tries what is not known yet, within 3 s.

    `metrics` say how its cache is cut, and `headers` send a request to the engine meant. `known` was found of
    the same process before. Raises EngineUnavailable if no salt trial was answered: an engine must not join
    before this is known, because the requests of tenants would go to it unsalted.
    """
    takes_salt, reports_cached = await asyncio.gather(
        _known(known.takes_salt, lambda: _takes_salt(control, model)),
        _known(known.reports_cached, lambda: _answered(_reports_cached(control, model, metrics, headers))),
    )
    if takes_salt is None:
        raise EngineUnavailable("it is too busy to show whether it respects cache salts")
    return Trials(takes_salt, reports_cached)


async def _known(before: bool | None, find_out: Callable[[], Awaitable[bool | None]]) -> bool | None:
    return await find_out() if before is None else before


async def _takes_salt(control: ControlClient, model: str) -> bool | None:
    """None when no route answers. A salt is refused before anything is queued: while one route answers, a
    silent one ignores it."""
    respected = await asyncio.gather(*(_answered(_respects_salt(control, path, model)) for path in _SALTED))
    return None if all(answer is None for answer in respected) else all(respected)


async def _answered(trial: Awaitable[_T]) -> _T | None:
    """The trial's result, None when it takes too long."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await trial
    except TimeoutError:
        return None


async def _respects_salt(control: ControlClient, path: str, model: str) -> bool:
    body = {**_SALTED[path], "model": model, "cache_salt": ""}
    try:
        await control.call("POST", path, json=body)
    except EngineRejected as error:
        return error.status == HTTPStatus.NOT_FOUND or "cache_salt" in f"{error.param} {error}"
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
