"""Any engine that speaks OpenAI's API, driven through that alone."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable, NotSupported
from engine_adapter.hold import SelfPlaced
from engine_adapter.http.control import ControlClient, max_model_len, model_name, prepare_request
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.types import Capability, EngineInfo, EngineLoad, EngineSpec
from engine_adapter.undeclared import Undeclared

_CAPABILITIES: frozenset[Capability] = frozenset()
_INSTEAD = {
    Capability.KV_EVENTS: "what it holds is learned from its answers",
    Capability.CACHED_TOKENS: "its answers' usage may say",
    Capability.TOKENIZE: "prompts are tokenised at the proxy with the engine's tokenizer setting",
    Capability.RENDER: "prompts with images are forwarded, and not followed",
    Capability.CACHE_SALT: "serve tenants that must not share KV from engines of their own",
    Capability.EXTRA_IDS: "text alone can be warmed",
    Capability.PROMPT_TABLES: "serve the model with the embedded engine to use prompt tables",
    Capability.FLUSH: "restart the engine, or let eviction take the KV",
    Capability.OFFLOAD: "its own eviction decides what stays",
    Capability.RESTORE: 'warm computes a prefix again by a one-token prefill; "fallback": "warm" does so',
    Capability.PIN: "warm the prefix again when it is needed",
}


class OpenAICompatibleAdapter(SelfPlaced, Undeclared):
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
        return EngineLoad(running=0, waiting=0, counted=False)

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: JsonBody | AsyncIterator[bytes] | None
    ) -> OutgoingRequest:
        """See `EngineAdapter.prepare`."""
        return prepare_request(self.spec, method, path, headers, body)

    def not_supported(self, capability: Capability) -> NotSupported:
        """See `EngineAdapter.not_supported`."""
        return NotSupported(capability.value, engine=self.spec.id, instead=_INSTEAD[capability])

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
