"""The contract every engine adapter keeps. `tests/contract` holds each of them to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from engine_adapter.body import JsonBody
from engine_adapter.errors import NotSupported
from engine_adapter.hold import Forecast, Hold, RequestBody
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.types import (
    BelowGpu,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
    PromptTable,
    RenderedPrompt,
    TokenIds,
)


class EngineAdapter(Protocol):
    """One engine, whatever its framework.

    Every method that talks to the engine raises EngineUnavailable when it cannot be reached and
    EngineRejected when it answers an error. A method whose capability is not in
    `EngineInfo.capabilities` raises NotSupported.
    """

    @property
    def spec(self) -> EngineSpec:
        """The engine as the operator described it."""

    async def connect(self) -> EngineInfo:
        """Asks the engine what it is; called again after each outage. What requests get is not changed by
        it, though an idle engine may be tried out on a prompt or two when it is met for the first time."""

    async def load(self) -> EngineLoad:
        """Requests running and waiting; also the health check: EngineUnavailable when the engine is not
        well, or is another process than the one `connect` met, whose KV is then gone."""

    def findings(self) -> tuple[Finding, ...]:
        """What keeps kvpin from using the engine fully, as of the last `connect`."""

    def forecast(self, prompt: KvTarget) -> Forecast | None:
        """What the prompt would cost now, where the adapter follows the engine's cache itself; None where
        the index and the learned rates say. No I/O, changes nothing."""

    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        """Makes room for a request before it is sent, and keeps it until its answer is over.

        Args:
            path: the request's route.
            body: its body.
            prompt: its tokens, with how long its KV is to be kept; None where they are not known.
        """

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """The client's request as this engine wants it: its address, its credentials, the client's
        headers less those that end at a proxy. A JSON body goes on byte for byte unless a field was
        changed with `JsonBody.replace`; a body that is an iterator is streamed through unread; None is
        a request without one."""

    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:
        """Reused prompt tokens, where the engine says so in its response headers; else None."""

    def not_supported(self, capability: Capability) -> NotSupported:
        """The error for a capability the engine lacks; it says what there is in its place."""

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        """Token ids of a request exactly as the engine would serve it [Capability.TOKENIZE]. `path` is the
        request's own: EngineRejected, too, for one whose prompts the engine does not tell. Those of
        `/v1/chat/completions` and `/v1/completions` it always does."""

    async def render(self, path: str, body: JsonBody) -> RenderedPrompt:
        """Token ids of a request that holds images, and where each lies [Capability.RENDER].
        EngineRejected for one that the engine would not serve."""

    def events(self) -> AsyncIterator[KvEvent]:
        """What the engine stores and removes, for as long as the caller iterates
        [Capability.KV_EVENTS]. Starts with ViewLost, then what it holds already as far as that can be
        learned, then ViewCurrent, then changes; after a gap that cannot be filled it starts over in
        the same way. Raises EngineUnavailable when the engine goes away."""

    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:
        """What the tiers below the GPU hold of a prompt now, for engines with `EngineInfo.tokens_per_chunk`;
        None where they do not say in good time. Never raises."""

    def operate(self, verb: KvVerb, target: KvTarget) -> AsyncIterator[KvProgress]:
        """Flushes, offloads or restores; yields progress until done, the last item being the result.
        Running requests keep their blocks and their speed: the work is done in slices."""

    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        """Protects the blocks of a prefix from eviction for `ttl_s` seconds [Capability.PIN]."""

    async def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False when there was none of that id [Capability.PIN]."""

    async def put_prompt_table(self, table: PromptTable) -> None:
        """Makes a p-tuning table known [Capability.PROMPT_TABLES]; the same one twice is fine."""

    async def delete_prompt_table(self, table_id: str) -> None:
        """Forgets a table [Capability.PROMPT_TABLES]; an unknown one is fine."""

    async def stats(self) -> dict[str, Any]:
        """The engine's own KV statistics for people: blocks per tier, pins, hits; {} where unknown."""

    async def aclose(self) -> None:
        """Closes connections; the engine itself goes on."""
