"""One engine on kvpin's own read and write path: do its events arrive, does it reuse what kvpin predicts?"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

import msgspec

from engine_adapter import (
    Capability,
    EngineAdapter,
    EngineError,
    EngineInfo,
    Headers,
    HttpTransport,
    JsonBody,
    Tier,
)
from proxy.core.audit import Trust
from proxy.errors import ProxyError
from proxy.fleet.engine import TOKENS_PER_BLOCK, EngineState
from proxy.fleet.ingest import has_exact_events
from proxy.prompt import PromptBuilder
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.records import RequestRecord
from proxy.server.app import Proxy
from proxy.settings import Settings

# Seconds to wait for the first view, and for a request's blocks to appear in it; seconds between looks.
VIEW_S, SETTLE_S, LOOK_S = 10.0, 5.0, 0.02
# A probe's prompt: this many of the engine's blocks and one token, of ids that every vocabulary has.
PROBE_BLOCKS = 3
_IDS = range(10, 250)
_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class View:
    """The result of reading an engine's KV events.

    Attributes:
        state: `current`; `late` if they do not arrive; `unfit` if their block size does not fit; `none` if it
            sends none; `unasked` if reading would take them from another reader.
        blocks: kvpin's blocks in the first view, on the GPU.
        complete: False if the engine may hold more.
    """

    state: Literal["current", "late", "unfit", "none", "unasked"]
    detail: str
    blocks: int = 0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The second of two equal requests.

    Attributes:
        n_tokens: tokens of its prompt.
        predicted, reported: cached tokens that kvpin predicted and that the engine reported.
        error: why there is no such request.
    """

    n_tokens: int
    predicted: int = 0
    reported: int | None = None
    error: str | None = None


class ProbedEngine:
    """One engine behind kvpin's own read and write path, without a server."""

    def __init__(self, adapter: EngineAdapter, info: EngineInfo, builder: PromptBuilder) -> None:
        """`info` is the result of the adapter's `connect`."""
        # Not those of the environment: they are for a kvpin that serves.
        settings = Settings.model_construct(reuse=True, retries=0, restore_ahead=False)
        self._proxy = Proxy(settings, HttpTransport())
        fleet = self._proxy.fleet
        self._engine = fleet.add(adapter)
        self._pool = fleet.join(self._engine, info)
        self._pool.render(self._engine, builder)
        self._engine.state = EngineState.READY

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._proxy.tasks.stop()  # and not all of it: the adapter is the caller's
        await self._proxy.transport.aclose()

    async def first_view(self, *, takes_events: bool) -> View:
        """Follows the engine's events until they say what it holds; `takes_events` allows to read events that
        only one reader gets."""
        engine = self._engine
        if not engine.can(Capability.KV_EVENTS):
            return View("none", "it sends none: kvpin learns what it holds from its answers")
        if not has_exact_events(engine, self._pool):
            return View(
                "unfit", f"they are in blocks of {engine.info and engine.info.tokens_per_block} tokens"
            )
        if engine.info is not None and engine.info.events_read_once and not takes_events:
            return View(
                "unasked",
                "reading takes them from other readers: use --probe if no kvpin follows it",
            )
        assert self._proxy.ingest is not None  # noqa: S101 - requests are placed by reuse
        self._proxy.ingest.follow(engine, self._pool)
        if not await _until(lambda: engine.audit.trust is Trust.PRECISE, VIEW_S) or engine.view is None:
            return View("late", f"no view within {VIEW_S:.0f} s: {engine.audit.why}")
        engine.state = EngineState.READY
        view = engine.view
        more = "" if view.complete else "; it may hold more from before"
        held = {tier: self._pool.index.held(engine.id, tier) for tier in Tier}
        lower = "".join(
            f", {count} on {tier}" for tier, count in held.items() if count and tier is not Tier.GPU
        )
        detail = f"the view is current, with {held[Tier.GPU]} blocks{lower}{more}"
        return View("current", detail, held[Tier.GPU], view.complete)

    async def probe(self) -> ProbeResult:
        """Sends the engine a new prompt twice."""
        info, pool = self._engine.info, self._pool
        block = max((info and info.tokens_per_block) or TOKENS_PER_BLOCK, pool.tokens_per_block)
        n_tokens = PROBE_BLOCKS * block + 1
        if info is not None and info.max_model_len is not None:
            n_tokens = max(min(n_tokens, info.max_model_len - 1), 1)
        ids = random.choices(_IDS, k=n_tokens)  # noqa: S311 - only to be new
        first = await self._ask(ids)
        if first.error is not None:
            return ProbeResult(n_tokens, error=first.error)
        await _until(lambda: self._holds(first), SETTLE_S)
        second = await self._ask(ids)
        predicted = second.placement.predicted_tokens if second.placement is not None else 0
        return ProbeResult(n_tokens, predicted, second.reported_tokens, second.error)

    async def _ask(self, ids: list[int]) -> RequestRecord:
        fields = {"model": self._pool.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body = JsonBody(msgspec.json.encode(fields))
        call = Call("doctor", "POST", _PATH, Headers([(b"content-type", b"application/json")]), body)
        self._engine.state = EngineState.READY
        with suppress(EngineError, ProxyError):  # the record says what went wrong
            await self._proxy.flow.serve(call, Reply(Nobody()), Admission.of_kvpin())
        return list(self._proxy.flow.requests)[-1]

    def _holds(self, record: RequestRecord) -> bool:
        """True if the view holds every full block of a request's prompt."""
        chain = self._pool.chain(record.prompt)
        match = self._pool.index.match(chain.hashes).get(self._engine.id) if chain is not None else None
        return chain is None or match is None or match.blocks - match.pending == len(chain.hashes)


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for a condition; False after the time-out."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(LOOK_S)
    return condition()
