"""The base of all adapters: every engine is reached over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_adapter.base import EngineAdapter
from engine_adapter.hold import RequestBody
from engine_adapter.http.control import ControlClient
from engine_adapter.http.prepare import prepare_request
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.types import EngineSpec


class HttpAdapter(EngineAdapter):
    """Sends requests to the engine's address; `_control` calls its own routes."""

    def __init__(self, spec: EngineSpec[Any]) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        self.spec = spec
        self._control = ControlClient(spec)

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """See `EngineAdapter.prepare`."""
        return prepare_request(self.spec, method, path, headers, body)

    async def aclose(self) -> None:
        """See `EngineAdapter.aclose`."""
        await self._control.aclose()
