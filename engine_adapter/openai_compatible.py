"""Any engine that speaks OpenAI's API, driven through that alone."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable, NotSupported
from engine_adapter.hold import SelfPlaced
from engine_adapter.http import OutgoingRequest
from engine_adapter.openai_http import ControlClient, max_model_len, model_name, prepare_request
from engine_adapter.types import (
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
    PromptTable,
    TokenIds,
)

_CAPABILITIES: frozenset[Capability] = frozenset()
_NO_EVENTS: tuple[KvEvent, ...] = ()
_NO_PROGRESS: tuple[KvProgress, ...] = ()
_INSTEAD = {
    Capability.KV_EVENTS: "what it holds is learned from its answers",
    Capability.CACHED_TOKENS: "its answers' usage may say",
    Capability.TOKENIZE: "prompts are tokenised at the proxy with the engine's tokenizer setting",
    Capability.CACHE_SALT: "serve tenants that must not share KV from engines of their own",
    Capability.EXTRA_IDS: "text alone can be warmed",
    Capability.PROMPT_TABLES: "serve the model with the embedded engine to use prompt tables",
    Capability.FLUSH: "restart the engine, or let eviction take the KV",
    Capability.OFFLOAD: "its own eviction decides what stays",
    Capability.RESTORE: 'warm computes a prefix again by a one-token prefill; "fallback": "warm" does so',
    Capability.PIN: "warm the prefix again when it is needed",
}


class OpenAICompatibleAdapter(SelfPlaced):
    """`EngineAdapter` over `/v1/models`, `/health` where there is one, and the OpenAI routes.

    The identity of the process is not told by such an engine: each connection counts as the same one, and
    what was learned of its cache is put right by the cached tokens it reports.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineSpecError for an address that is none."""
        self.spec = spec
        self._control = ControlClient(spec)
        self._instance = uuid.uuid4().hex
        self._has_health = True

    async def connect(self) -> EngineInfo:
        """See `EngineAdapter.connect`."""
        await self._check_health()
        models = await self._control.get("/v1/models")
        return EngineInfo(
            model=self.spec.model or model_name(models),
            instance=self._instance,
            capabilities=_CAPABILITIES,
            max_model_len=max_model_len(models),
            tokenizer=self.spec.tokenizer,
        )

    async def load(self) -> EngineLoad:
        """See `EngineAdapter.load`; such an engine does not say how busy it is, so both counts are 0."""
        if not await self._check_health():
            await self._control.get("/v1/models")
        return EngineLoad(running=0, waiting=0)

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: JsonBody | AsyncIterator[bytes] | None
    ) -> OutgoingRequest:
        """See `EngineAdapter.prepare`."""
        return prepare_request(self.spec, method, path, headers, body)

    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:  # noqa: ARG002 - part of the contract
        """None: OpenAI's API reports cached tokens in the body's usage."""
        return None

    def not_supported(self, capability: Capability) -> NotSupported:
        """See `EngineAdapter.not_supported`."""
        return NotSupported(capability.value, engine=self.spec.id, instead=_INSTEAD[capability])

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:  # noqa: ARG002 - likewise
        """Not supported."""
        raise self.not_supported(Capability.TOKENIZE)

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """Not supported."""
        self._require(Capability.KV_EVENTS)
        for event in _NO_EVENTS:  # makes this an async generator, as the contract has it
            yield event

    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:  # noqa: ARG002
        """Not supported."""
        self._require(Capability(verb.value))
        for progress in _NO_PROGRESS:  # likewise
            yield progress

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

    async def aclose(self) -> None:
        """See `EngineAdapter.aclose`."""
        await self._control.aclose()

    async def _check_health(self) -> bool:
        """True when `/health` says the engine is well, False where there is no such route.

        Raises:
            EngineUnavailable: it is not well, or not there.
        """
        if not self._has_health:
            return False
        try:
            await self._control.fetch("GET", "/health")
        except EngineRejected as error:
            if error.status in (401, 403, 404, 405):
                self._has_health = False
                return False
            raise EngineUnavailable(f"/health answered {error.status}: {error}") from error
        return True

    def _require(self, capability: Capability) -> None:
        """Raises NotSupported for what was not declared, which here is everything."""
        if capability not in _CAPABILITIES:
            raise self.not_supported(capability)
