"""Operators' requests at one of several kvpins of a machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive

from engine_adapter import (
    EngineDied,
    EngineGarbled,
    EngineUnavailable,
    HeaderPairs,
    HttpTransport,
    IncomingResponse,
    OutgoingRequest,
)
from engine_adapter.off_loop import JSON_BYTES_PER_MS, off_loop
from proxy.api.admin.endpoint import Endpoint, read_bytes
from proxy.api.auth import is_from_peer
from proxy.api.siblings import ASK_S, HOST, PeerAnswer, Siblings, ask
from proxy.errors import NoEngine, NotFound

# Where a worker is told what operators have ordered about engines.
ORDERS_PATH = "/workers/orders"
_Here = Callable[[Request], Awaitable[Response]]
# Headers that others need to understand the request.
_PASSED_ON = (b"accept", b"content-type", b"x-request-id")
# Another worker passes the request on, to be answered for all.
_FOR_ALL = "x-kvpin-for-all"
# Headers of an answer that this kvpin writes itself.
_OWN = (b"connection", b"content-length", b"date", b"keep-alive", b"transfer-encoding")
_SAFE = ("GET", "HEAD")
# What these ask for may be done twice.
_REPEATED = (*_SAFE, "DELETE")
# How long a request that changes nothing, or an order about engines, may take at the worker that speaks for
# all. Prometheus waits 10 s for a page.
_SHOW_S = 8.0
# How long another worker may take to follow an order about engines.
_FOLLOW_S = 4.0
# How long a request waits while another worker takes over to speak for all, and between two tries.
_TAKE_OVER_S = 5.0
_AGAIN_S = 0.05
_LATE = f"a worker has not answered for {_FOLLOW_S:g} s: it follows when it does, or when it is started again"
_HANGS = (
    f"the worker that answers for all has been silent for {_SHOW_S:g} s; if it hangs, kvpin starts it again: "
    "try again in half a minute"
)


@dataclass(frozen=True, slots=True)
class Together:
    """Answers with the other kvpins of the machine.

    Attributes:
        transport: asks them.
        siblings: the other workers; None for a single kvpin.
        nearby: what all others listen on, those of the exchange included.
        orders: what operators have ordered about engines, encoded.
    """

    transport: HttpTransport | None = None
    siblings: Siblings | None = None
    nearby: Callable[[], Sequence[str]] = tuple
    orders: Callable[[], bytes] = bytes

    async def serve(self, endpoint: Endpoint, request: Request) -> Response:
        """Serves a request of the admin API. Raises what its handler raises, and NoEngine if no worker speaks
        for all now."""

        async def here(request: Request) -> Response:
            is_alone = is_from_peer(request) and _FOR_ALL not in request.headers
            if is_alone or endpoint.others is None or self.transport is None:
                return await endpoint.handler(request)
            return await self._with_others(self.transport, endpoint, request)

        return await self.by_speaker(request, here, is_quick=endpoint.others == "follow")

    async def by_speaker(self, request: Request, here: _Here, *, is_quick: bool = False) -> Response:
        """The answer of the worker that speaks for all: by `here` in this one, or passed on. A request that
        `is_quick` takes no longer than one that changes nothing. Raises NoEngine: no worker speaks for all
        now, or it was lost while it carried the request out."""
        siblings = self.siblings
        if siblings is None or self.transport is None or is_from_peer(request) or siblings.speaks():
            return await here(request)
        body, clock = await read_bytes(request), asyncio.get_running_loop().time
        headers = [*_passed_on(request), (_FOR_ALL.encode(), b"1")]
        until, show_until = clock() + _TAKE_OVER_S, clock() + _SHOW_S
        is_quick = is_quick or request.method in _SAFE
        while not siblings.speaks():
            to = OutgoingRequest(
                request.method, f"{HOST}{_target(request)}", headers, body or None, unix=siblings.speaker
            )
            try:
                async with asyncio.timeout_at(show_until if is_quick else clock() + ASK_S):
                    answer = await self.transport.send(to)
            except (EngineUnavailable, TimeoutError) as error:
                is_perhaps_done = isinstance(error, (EngineDied, EngineGarbled, TimeoutError))
                if is_quick and clock() >= show_until:
                    raise NoEngine(_HANGS) from error
                if is_perhaps_done and request.method not in _REPEATED:
                    raise NoEngine("the worker that did this was lost: look whether it is done") from error
                if clock() > until:
                    raise NoEngine("no worker answers for all now; try again shortly") from error
            else:
                response = StreamingResponse(_pieces(answer), answer.status)
                response.raw_headers = _kept(answer.headers.raw)
                return response
            await asyncio.sleep(_AGAIN_S)
        return await here(_again(request, body))

    async def _with_others(self, transport: HttpTransport, endpoint: Endpoint, request: Request) -> Response:
        body, workers = await read_bytes(request), self.siblings.sockets if self.siblings is not None else ()

        async def others() -> list[PeerAnswer]:
            sockets = workers if endpoint.join is not None else self.nearby()
            return await ask(transport, sockets, request.method, _target(request), _passed_on(request), body)

        own = _again(request, body)
        try:
            answered = await endpoint.handler(own)
        except NotFound:
            if endpoint.others == "follow":
                raise
            known = [each for each in await others() if each.status != HTTPStatus.NOT_FOUND]
            if not known:
                raise
            first = next((each for each in known if each.is_good), known[0])
            response = Response(first.body, first.status)
            response.raw_headers = [*_kept(first.headers), (b"content-length", b"%d" % len(first.body))]
            return response
        if endpoint.others == "follow":
            clock = asyncio.get_running_loop().time
            began = clock()
            await ask(transport, workers, "POST", ORDERS_PATH, body=self.orders(), within_s=_FOLLOW_S)
            if clock() < began + _FOLLOW_S:
                return answered
            said = msgspec.json.decode(bytes(answered.body))
            said["warning"] = f"{said['warning']}; {_LATE}" if said.get("warning") else _LATE
            return Response(msgspec.json.encode(said), answered.status_code, media_type="application/json")
        if endpoint.others == "know" or answered.status_code >= HTTPStatus.MULTIPLE_CHOICES:
            return answered
        bodies = [bytes(answered.body), *(each.body for each in await others() if each.is_good)]
        if (join := endpoint.join) is None or len(bodies) == 1:
            return answered

        def joined() -> bytes:
            return msgspec.json.encode(join(own, [msgspec.json.decode(each) for each in bodies]))

        content = await off_loop(joined, ms=sum(map(len, bodies)) / JSON_BYTES_PER_MS)
        return Response(content, media_type="application/json")


def _target(request: Request) -> str:
    query: bytes = request.scope["query_string"]
    target: bytes = request.scope["raw_path"] + (b"?" + query if query else b"")
    return target.decode("latin-1")


def _passed_on(request: Request) -> HeaderPairs:
    return [pair for pair in request.headers.raw if pair[0] in _PASSED_ON]


def _again(request: Request, body: bytes) -> Request:
    """The request, whose body was read."""
    left, is_read = request.receive, False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            return await left()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    taken: Receive = receive
    return Request(request.scope, taken)


async def _pieces(answer: IncomingResponse) -> AsyncIterator[bytes]:
    async with answer:
        while piece := await answer.receive():
            yield piece


def _kept(headers: HeaderPairs) -> HeaderPairs:
    return [pair for pair in headers if pair[0] not in _OWN]


def peer_routes(told: dict[str, Callable[[bytes], Awaitable[bytes]]]) -> list[Route]:
    """Routes that only other workers may ask: `told` answers each path, with the request's body."""

    def route(path: str, tell: Callable[[bytes], Awaitable[bytes]]) -> Route:
        async def serve(request: Request) -> Response:
            if not is_from_peer(request):
                raise HTTPException(HTTPStatus.NOT_FOUND)
            return Response(await tell(await read_bytes(request)))

        return Route(path, serve, methods=["GET", "POST"])

    return [route(path, tell) for path, tell in told.items()]
