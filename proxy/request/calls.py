"""One client request on its way through the proxy, the conversation it belongs to, and the reply channel
to its client."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import parse_qs, parse_qsl, urlencode

import msgspec

from engine_adapter import (
    NATIVE_ROUTES,
    EngineUnavailable,
    HeaderPairs,
    Headers,
    JsonBody,
    RequestBody,
    route_of,
    websocket,
)
from engine_adapter.causes import Code
from engine_adapter.http.sse import ENDS
from proxy.errors import code_of
from proxy.headers import SESSION_HEADERS
from proxy.request.stages import Stage, Staged, Writer
from proxy.request.translate.wording import OPENAI, Dialect

# --- the conversation a request belongs to, if its client names one. Placement uses it to break ties ----
# Headers and fields are listed best first. Two are left out because they do not identify a conversation:
# `user`, which one application may send with every request, and `x-correlation-id`, which many stacks create
# for each request.

FIELDS = ("session_id", "prompt_cache_key")
_RANKS = {name.encode(): rank for rank, name in enumerate(SESSION_HEADERS)}
MAX_NAME = 256  # a longer name is ignored


class Session(NamedTuple):
    """A conversation: its tenant, and the name its client gave it."""

    tenant: str | None
    name: str

    @property
    def digest(self) -> int:
        """64 bits, by which other kvpins know it. Nobody finds the names from it."""
        parts = (self.name,) if self.tenant is None else (self.tenant, self.name)
        text = "".join(f"{len(part)}:{part}" for part in parts).encode()
        return int.from_bytes(blake2b(text, digest_size=8, person=b"kvpin session").digest(), "little")


def session_of(tenant: str | None, headers: Headers, body: RequestBody) -> Session | None:
    """The conversation that a request names; None if it names none."""
    if not _RANKS.keys().isdisjoint(headers.first):
        named = [(_RANKS[name], value) for name, value in headers.raw if name in _RANKS]
        for _, value in sorted(named, key=itemgetter(0)):
            if 0 < len(value) <= MAX_NAME:
                return Session(tenant, value.decode("latin-1"))
    if isinstance(body, JsonBody) and not body.is_plain:
        for field in FIELDS:
            name = body.hint(field)
            if isinstance(name, str) and 0 < len(name) <= MAX_NAME:
                return Session(tenant, name)
    return None


# --- one client request on its way through the proxy, and the reply channel to its client ---------------

# Routes below `/v1` that go on from a prompt.
PROMPT_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
# OpenAI's SDKs disconnect when they read this, before the engine has closed the stream.
_STREAM_END = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")
# An event's text may end like that, too.
_END_EVENT = tuple(b"\ndata:%b%b" % (space, end) for space in (b" ", b"") for end in _STREAM_END)
_MOST_END = max(map(len, _END_EVENT))
# The blank line after an event of a stream: engines send either.
_EVENT_END, _EVENT_END_CR = b"\n\n", b"\n\r\n"
_OF_JSON = b"}\n\n"  # nearly every event ends so


class Call(msgspec.Struct, frozen=True):
    """A client's request, authenticated and read. What follows from its fields is found out at once."""

    request_id: str  # kvpin's own, unique
    method: str  # as sent
    path: str  # as sent, with its query string
    headers: Headers  # the client's, without those meant for kvpin, such as its key
    body: RequestBody  # a parsed JSON object, an upload that is passed on as it arrives, None if empty
    tenant: str | None = None  # who sends it; None when no keys are set
    # The client's `x-request-id`, if it sent one; for one of several parts, the id of the whole.
    client_id: str | None = None
    session: Session | None = None  # the conversation it belongs to, if it names one
    # What the client sends on the WebSocket that the request asks for; None for a plain request.
    socket: AsyncIterator[bytes] | None = None
    models: frozenset[str] | None = None  # the names that it may have as its model; None for all
    # What was changed in its body when it was read, as the client is told of it.
    changed: tuple[str, ...] = ()
    # Found out:
    route: str = ""  # as engines will understand the path
    native: str | None = None  # if only engines that declare it get the request: beside `/v1`, or a WebSocket
    runs_prompt: bool = False  # an engine computes a prompt for this request
    streams: bool = False  # the client asked for a stream, or for a WebSocket
    model: str | None = None  # that the body names; if it names none, the query may

    def __post_init__(self) -> None:
        route, path, body = route_of(self.path), self.path.partition("?")[0], self.body
        native = path if path in NATIVE_ROUTES else None
        streams, model = False, None
        if isinstance(body, JsonBody):
            streams, model = body.get("stream") is True, body.get("model")
        elif body is not None and body.named is not None:
            model = body.named.model
        if self.socket is not None:
            native, streams = websocket(path), True
        if model is None and "?" in self.path:
            model = next(iter(parse_qs(self.path.partition("?")[2]).get("model", ())), None)
        if (found := NATIVE_ROUTES.get(native or "")) is not None:
            runs = found.runs
        else:
            runs = route in PROMPT_ROUTES and isinstance(body, JsonBody)
        set_field = msgspec.structs.force_setattr
        set_field(self, "route", route)
        set_field(self, "native", native)
        set_field(self, "runs_prompt", runs)
        set_field(self, "streams", streams)
        set_field(self, "model", model if isinstance(model, str) else None)

    def __repr__(self) -> str:
        """Without headers and body, which must not get into logs."""
        return f"Call({self.request_id!r}, {self.method!r}, {self.path!r})"

    @property
    def answer_id(self) -> str:
        """The `x-request-id` of the answer."""
        return self.client_id or self.request_id

    @property
    def models_in_query(self) -> frozenset[str]:
        """All that the query names as a model."""
        return frozenset(parse_qs(self.path.partition("?")[2]).get("model", ()))

    def naming(self, model: str) -> Call:
        """The request with another model in its query, where it has one there."""
        path, _, query = self.path.partition("?")
        fields = parse_qsl(query, keep_blank_values=True)
        if not any(name == "model" for name, _ in fields):
            return self
        named = [(name, model if name == "model" else value) for name, value in fields]
        return msgspec.structs.replace(self, path=f"{path}?{urlencode(named)}")


# Bytes of a stream that are read from its engine while its client takes no more: about 4,000 tokens.
READ_AHEAD = 1 << 20


class Client(Writer, Protocol):
    """Where an answer goes in the end."""

    @property
    def is_full(self) -> bool:
        """True if its socket takes no more bytes for now."""

    async def drain(self) -> None:
        """Waits until the socket takes more bytes."""


class Nobody:
    """The client of kvpin's own requests. It drops the answer: only the effect on the engine matters."""

    is_full = False

    async def drain(self) -> None:
        """Returns at once: nothing is kept."""

    def start(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - whatever it is
        """Drops it."""

    write = finish = start


class Reply:
    """An answer on its way to the client. `write` returns when the client's socket has room again, or less
    than READ_AHEAD bytes wait for that: so a slow client slows its engine down, but does not hold it after
    the end of a usual answer. `finish` does not wait: the engine is done."""

    __slots__ = (
        "_ahead", "_client", "_is_over", "_reads_ahead", "_tail", "_writer", "before", "complete",
        "completed", "dialect", "events", "has_written", "is_events", "on_begin", "on_end", "on_start",
        "recorded", "stages", "started", "status", "waits",
    )  # fmt: skip

    def __init__(self, client: Client, dialect: Dialect = OPENAI, *, reads_ahead: bool = True) -> None:
        """`reads_ahead`: bytes may wait for the client. False where `drain` is what sends them."""
        self._client, self._writer = client, cast("Writer", client)
        self.dialect = dialect  # how the client's API words errors
        # What the answer passes, from its beginning on; the first one gets the engine's bytes.
        self.stages: list[Stage] = []
        self.before: Callable[[], Awaitable[None]] | None = None  # awaited once, before the answer begins
        self.on_begin: Callable[[], None] | None = None  # called once, when the answer begins
        # Called once, when the client has the whole answer. Its engine may still be busy with it.
        self.on_end: Callable[[], None] | None = None
        # Called when the answer of an engine begins. From then on no other engine can be tried.
        self.on_start: Callable[[], None] | None = None
        # Status and headers were sent; bytes of the body were.
        self.started = self.has_written = self._is_over = False
        self.status: int | None = None
        # The client has the whole answer, and a disconnect from now on is no cancellation; the flow keeps a
        # record of the request, or of its parts; it is a stream; a write waits until the client takes more.
        self.complete = self.recorded = self.is_events = self.waits = False
        self.completed: float | None = None  # when the client got its end, in monotonic seconds
        self.events = 0
        self._reads_ahead, self._ahead = reads_ahead, 0  # bytes written since the client's socket was full
        self._tail = b"\n"  # the last bytes of the body

    async def start(self, status: int, headers: HeaderPairs, *, is_events: bool = False) -> None:
        """Sends status and headers; names are in lower case. If another engine goes on with the answer, its
        status and headers are dropped."""
        if not self.started:
            if self.before is not None:
                await self.before()
            if self.stages:
                self._writer = Staged(self._client, self.stages)
            self._writer.start(status, headers)
            self.status = status
            if self.on_begin is not None:
                self.on_begin()
        self.started, self.is_events = True, is_events
        if self.on_start is not None:
            self.on_start()

    async def write(self, chunk: bytes) -> None:
        """Sends body bytes."""
        if not self.put(chunk):
            await self.drain()

    def put(self, chunk: bytes) -> bool:
        """Sends body bytes. Returns False if the client has to take some before it gets more."""
        self.has_written = True
        if self.is_events:
            is_usual = chunk[-3:] == _OF_JSON
            if not (is_usual and self._tail == b"\n") and not self.complete:
                self._look_for_end(chunk)
            if is_usual and chunk.find(b"\n") == len(chunk) - 2:  # one: counting takes three times as long
                self.events += 1
            else:
                self.events += chunk.count(_EVENT_END) or chunk.count(_EVENT_END_CR)
        self._writer.write(chunk)
        if not self._client.is_full:
            self._ahead = 0
            return True
        self._ahead += len(chunk)
        return self._ahead <= READ_AHEAD and self._reads_ahead

    def _look_for_end(self, chunk: bytes) -> None:
        """Notes the end of the stream. It may come in several pieces, and may be followed by a comment."""
        is_rest = self._tail != b"\n" and len(chunk) < _MOST_END
        if is_rest or not chunk.endswith(ENDS) or chunk.endswith(_STREAM_END):
            self._tail = (self._tail + chunk[-_MOST_END:])[-_MOST_END:]
            if self._tail.endswith(_END_EVENT):
                self._note_end()
        else:
            self._tail = b"\n"

    async def finish(self, chunk: bytes = b"") -> None:
        """Sends the last body bytes."""
        self.end(chunk)
        if not self._reads_ahead and self._client.is_full:
            await self.drain()

    def end(self, chunk: bytes = b"") -> None:
        """Ends the answer without waiting for the client. An answer that has ended stays as it is."""
        if not self._is_over:
            self._writer.finish(chunk)  # it may fail: then nothing of a whole answer was sent
            self._is_over, self.has_written = True, self.has_written or bool(chunk)
        if not self.complete:
            self._note_end()

    def break_off(self, error: Exception, request_id: str) -> None:
        """Tells the client that its stream broke off, without waiting for it. Leaves out the end of the body:
        clients would take a clean end for a complete answer."""
        if self.is_events and not self.complete:
            code = Code.ENGINE_FAILED if isinstance(error, EngineUnavailable) else code_of(error)
            body = self.dialect.error(
                code.status, str(error), kind="server_error", code=code, request_id=request_id
            )
            self._writer.write(b"\n\n" + self.dialect.error_event(body))

    def _note_end(self) -> None:
        self.complete, self.completed = True, time.monotonic()
        if self.on_end is not None:
            self.on_end()

    async def drain(self) -> None:
        """Waits until the client takes more."""
        self.waits = True
        try:
            await self._client.drain()
        finally:
            self.waits = False  # the engine that goes on with an interrupted stream may be silent, too
