"""What the legs of a request on a second engine have in common: what an attempt asks of them, and how they
are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from engine_adapter import (
    EngineLost,
    EngineRejected,
    HttpTransport,
    IncomingResponse,
    JsonBody,
    read_error,
)
from proxy.fleet.engine import Engine
from proxy.steps.preparation import Ready

_T = TypeVar("_T")


class OtherLeg(Protocol):
    """The part of a request that another engine than the one that answers does.

    Attributes:
        is_fetched: the engine that answers had the KV before it got the request.
        is_checked: the engine that answers may refuse the other's KV with any error.
    """

    is_fetched: bool
    is_checked: bool

    @property
    def may_be_evicted(self) -> bool:
        """True if requests in flight may evict what the other engine was to reuse."""

    @property
    def source(self) -> str:
        """The other engine."""

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that it reused; None if it did not tell."""

    def moves_since(self, sent: float) -> float:
        """When the KV began to move, if the request was `sent` then."""

    def begins(self) -> None:
        """The answer begins. Raises EngineLate: too late."""

    async def in_time(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """The answer, as long as it may be used. Raises EngineError."""


async def send_leg(
    transport: HttpTransport, engine: Engine, ready: Ready, path: str, body: JsonBody
) -> IncomingResponse:
    """Sends a leg of a request to an engine: with that engine's name of the model and salt, and with the id
    that the request has on the other one. Raises EngineUnavailable."""
    if ready.rendering is not None and engine.prompts is not ready.rendering:
        raise EngineLost("the engine makes other tokens of the prompt now")
    call, own = ready.call, ready.body_for(engine)
    if isinstance(own, JsonBody):
        body = body.replace(model=own.get("model"), cache_salt=own.get("cache_salt"))
    sent = engine.adapter.prepare("POST", path, call.headers, body)
    named = [pair for pair in sent.headers if pair[0] != b"x-request-id"]
    sent = replace(sent, headers=[*named, (b"x-request-id", call.request_id.encode())])
    return await transport.send(sent, partial(engine.confirm, engine.connections))


async def read_leg(response: IncomingResponse) -> bytes:
    """The whole answer. Raises EngineUnavailable; EngineRejected for an error."""
    async with response:
        content = await response.read()
        if response.status >= 400:  # noqa: PLR2004 - HTTP
            raise EngineRejected(read_error(content).message, status=response.status)
        return content


def end_now(limit: asyncio.Timeout) -> None:
    """Ends what the limit is for, unless that was done before."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
