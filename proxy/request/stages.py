"""What an answer passes on its way to its client: its headers, and stages, each a function of whole
events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import ceil
from typing import Any, Protocol, TypeVar

import msgspec

from engine_adapter import (
    EngineSpec,
    HeaderPairs,
    Headers,
    IncomingResponse,
    RawFields,
    WholeEvents,
    base_url,
    decode_object,
)
from engine_adapter.http.sse import END, ENDS, events_in
from proxy.core.quotas import Left
from proxy.headers import CACHED_HEADER, DROPPED_HEADERS, LIMIT_PREFIX, OWN_PREFIX, RETRY_HEADERS

# --- the headers of an engine's answer that its client gets, and the form of those that kvpin adds ------

_DROPPED = frozenset(name.encode() for name in DROPPED_HEADERS)
# Of an answer that has no other address.
_DROPPED_IF_OK = _DROPPED | {b"location"}
_OWN_PREFIX, _LIMIT_PREFIX = OWN_PREFIX.encode(), LIMIT_PREFIX.encode()
_CREATED, _MULTIPLE_CHOICES = 201, 300
_SECOND_MS, _MINUTE_MS = 1000, 60_000
_OF_AN_ERROR = frozenset({*RETRY_HEADERS, "allow"})
# Headers of a stream that do not apply to the JSON answer assembled from it.
_OF_A_STREAM = frozenset({b"content-type", b"content-length", b"cache-control", b"x-accel-buffering"})


def passed_on(response: IncomingResponse, spec: EngineSpec) -> HeaderPairs:
    """The headers of an engine's answer that its client gets."""
    is_redirection = response.status >= _MULTIPLE_CHOICES
    dropped = _DROPPED if is_redirection or response.status == _CREATED else _DROPPED_IF_OK
    kept = [
        pair
        for pair in response.headers.raw
        if pair[0] not in dropped and not pair[0].startswith(_OWN_PREFIX)
    ]
    return [pair for each in kept if (pair := _at_kvpin(each, spec)) is not None] if is_redirection else kept


def of_json(headers: HeaderPairs) -> HeaderPairs:
    """The headers of the JSON answer that was assembled from a stream with these headers."""
    kept = [pair for pair in headers if pair[0] not in _OF_A_STREAM]
    return [*kept, (b"content-type", b"application/json")]


def told_with_error(headers: Headers) -> dict[str, str]:
    """The headers of an engine's error that its client gets: about retries, and the methods of a route."""
    return {
        name: value
        for name, value in headers.items()
        if value.isascii() and (name in _OF_AN_ERROR or name.startswith(LIMIT_PREFIX))
    }


def pairs(headers: Mapping[str, str]) -> HeaderPairs:
    """Headers that kvpin adds, as bytes; names are in lower case."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def with_limits(headers: HeaderPairs, limits: Iterable[Left]) -> HeaderPairs:
    """Headers of an answer to a tenant with these limits, as OpenAI tells them. An engine's own are left out:
    they are about kvpin's key there."""
    kept = [pair for pair in headers if not pair[0].startswith(_LIMIT_PREFIX)]
    for each in limits:
        told = {"limit": each.limit, "remaining": each.remaining, "reset": _duration(each.reset_s)}
        kept += pairs({f"{LIMIT_PREFIX}{name}-{each.what}": str(value) for name, value in told.items()})
    return kept


def _duration(seconds: float) -> str:
    """Seconds as OpenAI writes them, rounded up to milliseconds: `120ms`, `1.5s`, `6m0s`."""
    ms = max(ceil(seconds * 1000), 0)
    if ms < _SECOND_MS:
        return f"{ms}ms"
    minutes, rest = divmod(ms, _MINUTE_MS)
    return f"{minutes}m{rest / _SECOND_MS:g}s" if minutes else f"{rest / _SECOND_MS:g}s"


def of_cached(cached: int | None) -> HeaderPairs:
    """The header that tells a client how many of its prompt's tokens were cached, if that is known."""
    return [] if cached is None else pairs({CACHED_HEADER: str(cached)})


def _at_kvpin(header: tuple[bytes, bytes], spec: EngineSpec) -> tuple[bytes, bytes] | None:
    """A header of a redirection. One to the engine's own address leads to the same path at kvpin; None for
    one to another address, which is no client's business."""
    name, value = header
    if name != b"location":
        return header
    path = value.removeprefix(base_url(spec).encode())
    return (name, path) if path.startswith(b"/") and not path.startswith(b"//") else None


# --- stages: engine → Reply → Staged → values back, translation, diagnostics, … → client ----------------
# An answer is cut into events once, and only where a stage has to look. The JSON of an event is parsed when a
# stage asks for it. An event that no stage changes keeps its bytes.

_T = TypeVar("_T")
ERROR = 400  # the least status of an error
DONE = b"[DONE]"  # the data of the event that ends a stream of OpenAI's
_STREAM = b"text/event-stream"
_DATA = b"data:"


class Event(msgspec.Struct, dict=True, weakref=False):
    """An event of a stream, with its end; or a whole answer, which is all data."""

    raw: bytes
    is_whole: bool = False  # it is a whole answer
    known: dict[Callable[[bytes], Any], Any] = {}  # what was read of it

    @cached_property
    def data(self) -> bytes:
        """Its data; empty for a comment."""
        if self.is_whole:
            return self.raw
        raw = self.raw.strip()
        if raw.startswith(_DATA) and b"\n" not in raw:
            return raw[len(_DATA) :].strip()
        return b"\n".join([line[len(_DATA) :].strip() for line in raw.splitlines() if line.startswith(_DATA)])

    def read(self, decode: Callable[[bytes], _T]) -> _T:
        """What `decode` makes of its data, once for all who read it like that. Raises as `decode` does."""
        if decode not in self.known:
            self.known[decode] = decode(self.data)
        found: _T = self.known[decode]
        return found

    @property
    def fields(self) -> RawFields:
        """Its fields, undecoded. Raises one of `UNREADABLE` if it is no object."""
        return self.read(decode_object)

    def with_data(self, data: bytes) -> Event:
        """The same event with other data."""
        if self.is_whole:
            return Event(data, is_whole=True)
        start, end = self.raw.index(_DATA), len(self.raw.rstrip())
        return Event(b"%bdata: %b%b" % (self.raw[:start], data, self.raw[end:]))


class Stage:
    """Reads or changes an answer."""

    # An event without any of these bytes passes unread; None: each is read. Without marks, the stage has seen
    # enough: nothing more is read.
    marks: Sequence[bytes] | None = None
    # It may change bytes. So a whole answer has to be complete before any of it is sent, and an event that is
    # too long to be collected is an error.
    changes = False
    reads_head = False  # `begin` is called
    status = 200  # that of the answer, once it begins

    def begin(self, headers: HeaderPairs) -> HeaderPairs:
        """The answer begins. Returns the headers for the client."""
        return headers

    def event(self, event: Event) -> Iterable[Event]:
        """What becomes of an event; of a whole answer, another one."""
        return (event,)

    def end(self) -> Iterable[Event]:
        """The stream is over: what follows its last event."""
        return ()


class Writer(Protocol):
    """Where an answer goes."""

    def start(self, status: int, headers: HeaderPairs) -> None:
        """Begins the answer."""

    def write(self, chunk: bytes) -> None:
        """Sends bytes of the body."""

    def finish(self, chunk: bytes) -> None:
        """Sends the last bytes of the body."""


class Staged(msgspec.Struct, dict=True):
    """A client whose answer passes stages. A stream that breaks off is not finished: its last events do not
    come, so the client notices."""

    client: Writer  # gets what is left
    stages: list[Stage]  # the one that gets the engine's bytes comes first
    changes: bool = False  # one of them may change bytes
    events: WholeEvents | None = None  # cuts a stream
    # Of a whole answer, until it is complete; None where nothing is held back.
    head: tuple[int, HeaderPairs] | None = None
    pieces: list[bytes] = []  # of such an answer

    def start(self, status: int, headers: HeaderPairs) -> None:
        """Begins the answer. Of a whole one that may be changed, nothing is sent yet: it can still fail."""
        for stage in self.stages:
            stage.status = status
            if stage.reads_head:
                headers = stage.begin(headers)
            self.changes = self.changes or stage.changes
        if self.changes:
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        for name, value in headers:
            if name == b"content-type" and value.lower().startswith(_STREAM):
                self.events = WholeEvents()
        if self.changes and self.events is None:
            self.head = status, headers
        else:
            self.client.start(status, headers)

    def write(self, chunk: bytes) -> None:
        """Passes bytes of the body on. Raises EngineGarbled for an event that is too long to be changed."""
        events = self.events
        if self.head is not None:
            self.pieces.append(chunk)
            return
        if events is None:  # neither JSON nor events: one look is enough
            for stage in self.stages:
                stage.event(Event(chunk, is_whole=True))
            self.stages = []
            self.client.write(chunk)
        elif self.changes or events.may_hold(chunk):
            whole = chunk if events.is_between and chunk.endswith(ENDS) else events.joined(chunk)
            if whole and (left := self._passed(whole)):
                self.client.write(left)
        else:
            self.stages = []
            self.client.write(events.take_rest() + chunk)
        if not self.stages and (events is None or events.is_between):
            self.write = self.client.write  # type: ignore[method-assign]  # nothing more is read

    def finish(self, chunk: bytes) -> None:
        """Ends the answer. Raises EngineFailed for one that cannot be translated."""
        if (events := self.events) is None:
            whole = Event(b"".join([*self.pieces, chunk]) if self.pieces else chunk, is_whole=True)
            for stage in self.stages:
                (whole,) = stage.event(whole)
            if self.head is not None:
                self.client.start(*self.head)
            self.client.finish(whole.raw)
        elif self.stages:
            self.client.finish(self._passed(events.joined(chunk), events.take_rest(), ends=True))
        else:
            self.client.finish(events.take_rest() + chunk)

    def _passed(self, whole: bytes, rest: bytes = b"", *, ends: bool = False) -> bytes:
        """What is left of whole events. They are not even cut if no stage has to look. `rest`: the last one,
        which may lack its blank line. `ends`: they are the last."""
        if not self.changes:
            self._read(whole, rest, ends=ends)
            return whole + rest
        events: list[Event] | None = None
        for stage in self.stages:
            marks = stage.marks
            if events is None:
                if not ends and not _has_mark(whole, marks):
                    continue
                end = END.search(whole)  # mostly, there is one event
                is_one = end is not None and end.end() == len(whole) and not rest
                events = [Event(raw) for raw in ([whole] if is_one else [*events_in(whole), rest]) if raw]
            left: list[Event] = []
            for event in events:
                if marks is None or _has_mark(event.raw, marks):
                    left += stage.event(event)
                else:
                    left.append(event)
            events = [*left, *stage.end()] if ends else left
            if stage.marks == ():
                self.stages = [each for each in self.stages if each is not stage]
        if events is None:
            return whole
        return events[0].raw if len(events) == 1 else b"".join([event.raw for event in events])

    def _read(self, whole: bytes, rest: bytes, *, ends: bool) -> None:
        """Lets stages read events that none of them changes: no more of them than they need."""
        at = 0 if ends or any(_has_mark(whole, stage.marks) for stage in self.stages) else len(whole)
        while self.stages and (at < len(whole) or rest):
            end = END.search(whole, at)
            raw = whole[at : end.end()] if end is not None else whole[at:] + rest
            at, rest = (end.end(), rest) if end is not None else (len(whole), b"")
            event = Event(raw)
            for stage in self.stages:
                if _has_mark(raw, stage.marks):
                    stage.event(event)
            self.stages = [stage for stage in self.stages if stage.marks != ()]
        for stage in self.stages if ends else ():
            stage.end()


def _has_mark(raw: bytes, marks: Sequence[bytes] | None) -> bool:
    if marks is None:
        return True
    for mark in marks:  # noqa: SIM110 - a generator takes several times as long
        if raw.rfind(mark) >= 0:  # three times as fast as `in` where it is not there
            return True
    return False
