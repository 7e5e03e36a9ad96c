"""Which engine made a response, for engines that serve OpenAI's Responses API themselves.

Such an engine keeps its responses in its own process, so a request that names one must go to the same engine.
It knows no tenants: kvpin lets a tenant name only the responses that it got. Names are few and short; the
oldest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from typing_extensions import override

from engine_adapter import UNREADABLE, HeaderPairs, JsonBody
from proxy.request.calls import Call, Client, Through
from proxy.request.translate.responses_api import INPUT_TOKENS_PATH, RESPONSES_PATH
from proxy.request.translate.sse import Events

MAX_NAMES = 10_000
"""The most responses of a tenant whose engines are known."""
_BELOW = f"{RESPONSES_PATH}/"
# Paths below the route's own that name no response.
CONTINUING = frozenset({RESPONSES_PATH, INPUT_TOKENS_PATH})
"""Routes whose body may name a response to go on from."""
_NO_NAMES = frozenset({INPUT_TOKENS_PATH, f"{_BELOW}compact"})


class ResponseHome(NamedTuple):
    """The process that made a response: an engine's id, and its `EngineInfo.instance`."""

    engine: str
    instance: str | None


class ResponseHomes:
    """Response → engine, of each tenant."""

    def __init__(self) -> None:
        self._homes: dict[str | None, OrderedDict[str, ResponseHome]] = {}

    def keep(self, tenant: str | None, response_id: str, home: ResponseHome) -> None:
        """A tenant got a response from an engine."""
        homes = self._homes.setdefault(tenant, OrderedDict())
        homes[response_id] = home
        if len(homes) > MAX_NAMES:
            homes.popitem(last=False)

    def find(self, tenant: str | None, response_id: str) -> ResponseHome | None:
        """The engine that made a tenant's response; None if that is not known."""
        homes = self._homes.get(tenant)
        return None if homes is None else homes.get(response_id)


def response_named(call: Call) -> str | None:
    """The id of the response that a request is about, or that it continues; None if there is none."""
    route = call.route
    if route.startswith(_BELOW) and route not in _NO_NAMES:
        return unquote(route.removeprefix(_BELOW).partition("/")[0]) or None
    if route not in CONTINUING or not isinstance(call.body, JsonBody):
        return None
    name = call.body.get("previous_response_id")
    return name if isinstance(name, str) and name else None


class _Named(msgspec.Struct):
    """A response, or an event of its stream."""

    id: str | None = None
    response: _Named | None = None


_decode = msgspec.json.Decoder(_Named).decode


class ResponseNoter(Through):
    """A client whose answer passes unchanged; the name of the response in it is noted."""

    def __init__(self, client: Client, note: Callable[[str], None]) -> None:
        super().__init__(client)
        self._note: Callable[[str], None] | None = note
        self._events: Events | None = None  # those of a stream

    @override
    def start(self, status: int, headers: HeaderPairs) -> None:
        if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
            self._events = Events()
        self._client.start(status, headers)

    @override
    def write(self, chunk: bytes) -> None:
        self._look(chunk)
        self._client.write(chunk)

    @override
    def finish(self, chunk: bytes) -> None:
        self._look(chunk)
        self._client.finish(chunk)

    def _look(self, chunk: bytes) -> None:
        """Looks for the name in a whole answer, or in the first event of a stream."""
        if self._note is None:
            return
        contents = [chunk] if self._events is None else self._events.feed(chunk)
        if contents:
            name = _name_in(contents[0])
            if name is not None:
                self._note(name)
            self._note = None


def _name_in(content: bytes) -> str | None:
    try:
        named = _decode(content)
    except UNREADABLE:
        return None
    return (named.response or named).id
