"""Adapter of any engine that speaks OpenAI's API; it uses nothing else."""

from __future__ import annotations

import uuid

from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.errors import EngineDied, EngineGarbled, EngineUnavailable, EngineUnhealthy
from engine_adapter.http.adapter import HealthRoute, read_models
from engine_adapter.http.control import NO_SUCH_ROUTE
from engine_adapter.options import READ, REALTIME, RESPONSES_SOCKET
from engine_adapter.types import (
    MESSAGES_ROUTES,
    RESPONSES_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
)

# Statuses at `/health` of servers that have no such route, or keep it for themselves.
_NO_HEALTH = (401, 403, 405)
ROUTES = {REALTIME: READ, RESPONSES_SOCKET: READ}
"""WebSockets that it may take. One that does not says so."""


class OpenAICompatibleAdapter(EngineAdapter):
    """`EngineAdapter` over `/v1/models`, `/health` where there is one, and the OpenAI routes.

    Such an engine does not identify its process, so every connection counts as the same process, unless the
    model has changed. Reported cached tokens correct what kvpin learned of its cache."""

    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._instance = uuid.uuid4().hex
        self._health = HealthRoute(self._control, "/health", *_NO_HEALTH)
        self._model = spec.model  # the name that it serves

    @override
    async def connect(self) -> EngineInfo:
        self._health = HealthRoute(self._control, "/health", *_NO_HEALTH)
        await self._health.check()
        listed = await self._control.get("/v1/models")
        model = read_models(listed, self.spec.model)
        if model.name != self.spec.model:
            model = read_models(listed, self._model)
        self._model = model.name
        return EngineInfo(
            model=self.spec.model or model.name,
            instance=self._instance,
            names_process=False,
            rendering=f"model {model.name}",
            capabilities=self.capabilities,
            max_model_len=model.max_model_len,
            tokenizer=self.spec.tokenizer,
            served_as_chats=MESSAGES_ROUTES
            | {route for route in RESPONSES_ROUTES if await self._lacks(route)},
            routes=ROUTES,
            card=model.card,
        )

    @override
    async def load(self) -> EngineLoad:
        """Such an engine does not report its load, so both counts are 0."""
        await self._health.check()
        listed = await self._control.get("/v1/models")
        try:
            model = read_models(listed, self._model)
        except EngineUnavailable as error:
            raise EngineUnhealthy(str(error)) from error
        return EngineLoad(running=0, waiting=0, counted=False, outdated=model.name != self._model)

    async def _lacks(self, route: str) -> bool:
        """True if the engine lacks a route. It is asked with an empty body, which runs nothing."""
        try:
            return await self._control.status("POST", route, json={}) in NO_SUCH_ROUTE
        except (EngineDied, EngineGarbled):
            return True  # it breaks such requests off; an engine that died fails its next health check
