"""The base of all adapters: every engine is reached over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.events.subscriber import KvEventSubscriber
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.http.control import ControlClient
from engine_adapter.http.headers import HeaderPairs
from engine_adapter.http.prepare import prepare_request
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.types import EngineSpec, EventPosition, Finding, KvTarget


class HttpAdapter(EngineAdapter):
    """Sends requests to the engine's address; `_control` calls its own routes.

    Attributes:
        _own_headers: headers of every request of a client, in place of the client's own of the same name.
        _findings: what `connect` found, for `findings`.
        _subscriber: follows the engine's events, where these come over ZMQ.
    """

    _own_headers: HeaderPairs = []  # noqa: RUF012 - no adapter changes it
    _findings: tuple[Finding, ...] = ()
    _subscriber: KvEventSubscriber | None = None
    _control: ControlClient

    def __init__(self, spec: EngineSpec[Any]) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        self.spec = spec
        self._control = ControlClient(spec)

    @override
    def findings(self) -> tuple[Finding, ...]:
        return self._findings

    @override
    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        return nullcontext(self._hold(path, body, prompt) if isinstance(body, JsonBody) else Hold(body))

    def _hold(self, path: str, body: JsonBody, prompt: KvTarget | None) -> Hold:  # noqa: ARG002
        """The hold of a request with a JSON body, of an engine that has room for any."""
        return Hold(body)

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        return prepare_request(self.spec, method, path, headers, body, self._own_headers)

    @override
    def on_closed(self, call: Callable[[], None]) -> None:
        self._control.on_closed = call

    @override
    def event_position(self) -> EventPosition | None:
        return self._subscriber.position if self._subscriber is not None else None

    @override
    async def aclose(self) -> None:
        await self._control.aclose()
