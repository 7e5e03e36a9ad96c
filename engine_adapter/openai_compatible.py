"""Adapter of any engine that speaks OpenAI's API; it uses nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy
from engine_adapter.hold import RequestBody, SelfPlaced
from engine_adapter.http.control import (
    ControlClient,
    max_model_len,
    model_card,
    model_name,
    prepare_request,
)
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.routes import READ, REALTIME, RESPONSES_SOCKET
from engine_adapter.types import (
    MESSAGES_ROUTES,
    RESPONSES_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
)
from engine_adapter.undeclared import Undeclared

_CAPABILITIES: frozenset[Capability] = frozenset()
ROUTES = {REALTIME: READ, RESPONSES_SOCKET: READ}
"""WebSockets that it may take. One that does not says so."""
# Statuses that servers answer on a route that they do not have.
_NO_SUCH_ROUTE = (404, 405, 501)


class OpenAICompatibleAdapter(SelfPlaced, Undeclared):
    """`EngineAdapter` over `/v1/models`, `/health` where there is one, and the OpenAI routes.

    Such an engine does not identify its process, so every connection counts as the same process. Reported
    cached tokens correct what kvpin learned of its cache.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineSpecError for an invalid address."""
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
            served_as_chats=MESSAGES_ROUTES | await self._missing(RESPONSES_ROUTES),
            routes=ROUTES,
            card=model_card(models),
        )

    async def load(self) -> EngineLoad:
        """See `EngineAdapter.load`; such an engine does not report its load, so both counts are 0."""
        if not await self._check_health():
            await self._control.get("/v1/models")
        return EngineLoad(running=0, waiting=0, counted=False)

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """See `EngineAdapter.prepare`."""
        return prepare_request(self.spec, method, path, headers, body)

    async def aclose(self) -> None:
        """See `EngineAdapter.aclose`."""
        await self._control.aclose()

    async def _check_health(self) -> bool:
        """True when `/health` answers 2xx, False where there is no such route.

        Raises:
            EngineUnavailable: the engine is not healthy or not reachable.
        """
        if not self._has_health:
            return False
        try:
            await self._control.fetch("GET", "/health")
        except EngineRejected as error:
            if error.status in (401, 403, 404, 405):
                self._has_health = False
                return False
            raise EngineUnhealthy(f"/health answered {error.status}: {error}") from error
        return True

    async def _missing(self, routes: frozenset[str]) -> frozenset[str]:
        """Those of the routes that the engine has not. It is asked with an empty body, which runs nothing."""
        return frozenset([route for route in routes if await self._lacks(route)])

    async def _lacks(self, route: str) -> bool:
        try:
            await self._control.fetch("POST", route, b"{}")
        except EngineRejected as error:
            return error.status in _NO_SUCH_ROUTE
        except EngineUnavailable as error:
            if not error.dropped:
                raise
            return True  # it breaks such requests off; an engine that died fails its next health check
        return False
