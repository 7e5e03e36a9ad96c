"""Passes a request on to another kvpin of this machine.

The request goes there unchanged, with the client's key, and the answer comes back unchanged. A request is
passed on only once.
"""

from __future__ import annotations

import asyncio
from math import inf

from engine_adapter import EngineUnavailable, HeaderPairs, HttpTransport, JsonBody, OutgoingRequest, Upload
from proxy.api.workers.siblings import HOST
from proxy.errors import TimeLimit
from proxy.headers import CHANGED_HEADER
from proxy.http.exchange import Exchange
from proxy.request.calls import Call, Reply

# Headers that end at each server, and those that the transport writes itself.
_OF_ONE_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Headers of an answer that this kvpin writes itself.
_OWN = frozenset({b"connection", b"date", b"keep-alive", b"trailer", b"transfer-encoding", b"upgrade"})
_CORS = b"access-control-"
_CHANGED = CHANGED_HEADER.encode()
_EVENTS = "text/event-stream"


async def pass_on(
    transport: HttpTransport, socket: str, call: Call, exchange: Exchange, reply: Reply, silent_s: float
) -> None:
    """Lets the kvpin that serves HTTP at `socket` answer a request.

    Args:
        transport: sends the request.
        socket: the other kvpin's.
        call: the request.
        exchange: the same, as its client sent it.
        reply: the way to the client.
        silent_s: how long the other kvpin may be silent. It has its own limits: this is for one that hangs.

    Raises:
        EngineUnavailable: it went away before its answer began.
        TimeLimit: it was silent for too long before that.
    """
    if call.socket is not None:
        silent_s = inf
    clock = asyncio.get_running_loop().time
    try:
        async with (
            asyncio.timeout_at(clock() + silent_s) as limit,
            # Nothing here keeps the request: its body may be long.
            await transport.send(_request(socket, call, exchange)) as response,
        ):
            if isinstance(call.body, JsonBody):
                call.body.forget()
            is_stream = response.headers.get("content-type", "").startswith(_EVENTS)
            await reply.start(response.status, _kept(response.headers.raw, call), is_events=is_stream)
            if call.socket is not None:
                await reply.write(b"")  # the client waits for the head before it sends
            while chunk := await response.receive():
                await reply.write(chunk)
                limit.reschedule(clock() + silent_s)
    except (EngineUnavailable, TimeoutError) as failed:
        text = (
            f"the kvpin that got the request was silent for {silent_s:g} s, the time of all attempts "
            "(timeouts.first_byte_s, limits.queue_s, retries)"
        )
        error = TimeLimit(text) if isinstance(failed, TimeoutError) else failed
        if not reply.started:
            raise error from failed
        reply.break_off(error, call.answer_id)
        return  # without an end, on purpose: clients take that for a whole answer
    await reply.finish()


def headers_of(exchange: Exchange) -> HeaderPairs:
    """The client's headers, as far as they are not those of its connection or its body's length."""
    return [pair for pair in exchange.headers.raw if pair[0] not in _OF_ONE_HOP]


def _request(socket: str, call: Call, exchange: Exchange) -> OutgoingRequest:
    """The client's request, for the other kvpin."""
    headers = headers_of(exchange)
    body = call.body.raw if isinstance(call.body, JsonBody) else None
    chunks = call.body.chunks if isinstance(call.body, Upload) else None
    if isinstance(call.body, Upload) and call.body.length is not None:
        headers.append((b"content-length", b"%d" % call.body.length))
    url = f"{HOST}{exchange.target.decode('latin-1')}"
    return OutgoingRequest(exchange.method, url, headers, chunks or body, socket=call.socket, unix=socket)


def _kept(headers: HeaderPairs, call: Call) -> HeaderPairs:
    """The headers of the other kvpin's answer, and what was changed in the body before it was passed on."""
    kept = [pair for pair in headers if pair[0] not in _OWN and not pair[0].startswith(_CORS)]
    return [*kept, (_CHANGED, ",".join(call.changed).encode())] if call.changed else kept
