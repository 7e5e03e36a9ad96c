"""Every optional method of the contract, for engines that lack it: it refuses and says what to do instead.

Adapters inherit them and write only the methods of the capabilities they declare.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from engine_adapter.body import JsonBody
from engine_adapter.errors import NotSupported
from engine_adapter.types import (
    BelowGpu,
    Capability,
    EngineSpec,
    EventPosition,
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

_ANY_ENGINE: Mapping[Capability, str] = MappingProxyType(
    {
        Capability.KV_EVENTS: "kvpin learns what it holds from its answers",
        Capability.CACHED_TOKENS: "the usage in its answers may tell",
        Capability.TOKENIZE: "kvpin tokenises prompts with the engine's tokenizer setting",
        Capability.RENDER: "prompts with images are forwarded but not followed",
        Capability.CACHE_SALT: "serve tenants that must not share KV from engines of their own",
        Capability.EXTRA_IDS: "this engine can only warm text prompts",
        Capability.PROMPT_TABLES: "serve the model with the embedded engine to use prompt tables",
        Capability.FLUSH: "restart the engine, or let eviction take the KV",
        Capability.OFFLOAD: "its own eviction decides what stays",
        Capability.RESTORE: 'warm computes a prefix again by a one-token prefill; "fallback": "warm" does so',
        Capability.PIN: "warm the prefix again when it is needed",
    }
)
_NO_EVENTS: tuple[KvEvent, ...] = ()
_NO_PROGRESS: tuple[KvProgress, ...] = ()


class Undeclared:
    """`EngineAdapter`'s optional methods for an engine that has none of the capabilities.

    Attributes:
        spec: the engine.
        instead: where this kind has other advice than any engine, the advice for that capability.
        one_owner, has_lock: see `EngineAdapter`.
    """

    spec: EngineSpec[Any]
    instead: ClassVar[Mapping[Capability, str]] = MappingProxyType({})
    one_owner: ClassVar[bool] = False
    has_lock = False

    async def leave(self) -> None:
        """Nothing: several kvpins may use it."""

    def not_supported(self, capability: Capability) -> NotSupported:
        """See `EngineAdapter.not_supported`."""
        advice = self.instead.get(capability, _ANY_ENGINE[capability])
        return NotSupported(capability.value, engine=self.spec.id, instead=advice)

    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:  # noqa: ARG002 - part of the contract
        """None: the engine reports it in the answer's usage, if at all."""
        return None

    def findings(self) -> tuple[Finding, ...]:
        """None."""
        return ()

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.TOKENIZE)

    async def render(self, path: str, body: JsonBody) -> RenderedPrompt:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.RENDER)

    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:  # noqa: ARG002
        """Not supported."""
        for event in _NO_EVENTS:  # makes this an async generator, as the contract says
            yield event
        raise self.not_supported(Capability.KV_EVENTS)

    def event_position(self) -> EventPosition | None:
        """None: its events begin with all that it holds, or cannot be had twice."""
        return None

    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:  # noqa: ARG002 - likewise
        """None: its events cover all its tiers."""
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
        """{}: it has none."""
        return {}
