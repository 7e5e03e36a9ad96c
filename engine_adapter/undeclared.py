"""What an engine can not do: every optional method of the contract, refusing with the adapter's own words.

Adapters inherit these and write those of the capabilities they declare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from engine_adapter.body import JsonBody
from engine_adapter.errors import NotSupported
from engine_adapter.types import (
    BelowGpu,
    Capability,
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

_NO_EVENTS: tuple[KvEvent, ...] = ()
_NO_PROGRESS: tuple[KvProgress, ...] = ()


class Undeclared(ABC):
    """`EngineAdapter`'s optional methods for an engine that has nothing of them."""

    @abstractmethod
    def not_supported(self, capability: Capability) -> NotSupported:
        """See `EngineAdapter.not_supported`."""

    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:  # noqa: ARG002 - part of the contract
        """None: such an engine says it in its answer's usage, if at all."""
        return None

    def findings(self) -> tuple[Finding, ...]:
        """None known."""
        return ()

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.TOKENIZE)

    async def render(self, path: str, body: JsonBody) -> RenderedPrompt:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.RENDER)

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """Not supported."""
        for event in _NO_EVENTS:  # makes this an async generator, as the contract has it
            yield event
        raise self.not_supported(Capability.KV_EVENTS)

    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:  # noqa: ARG002 - likewise
        """None: its events tell of all its tiers."""
        return None

    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:  # noqa: ARG002
        """Not supported."""
        for progress in _NO_PROGRESS:  # likewise
            yield progress
        raise self.not_supported(Capability(verb.value))

    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.PIN)

    async def unpin(self, pin_id: str) -> bool:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.PIN)

    async def put_prompt_table(self, table: PromptTable) -> None:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.PROMPT_TABLES)

    async def delete_prompt_table(self, table_id: str) -> None:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.PROMPT_TABLES)

    async def stats(self) -> dict[str, Any]:
        """{}: not known."""
        return {}
