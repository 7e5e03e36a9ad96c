"""Decides whether a stream can go on on another engine when its own dies in mid-answer, and how.

the engine tells its tokens  → another engine of its kind takes them, and computes only what follows
greedy decoding              → another engine of its kind runs the request again; what was sent is left out
anything else                → the stream ends with an error event

The second way takes longer, but needs nothing of the engine. It is checked: a different text ends the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine_adapter import Hold, JsonBody, Resumption
from proxy.request.calls import Call
from proxy.request.splice import Splice
from proxy.request.transcript import Transcript

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_BODIES = 256 << 20
"""Bytes of bodies that running streams keep together. Beyond it, streams end with their engines."""


class Room:
    """Memory for the bodies of running streams.

    Attributes:
        used: bytes taken.
    """

    def __init__(self, size: int = MAX_BODIES) -> None:
        self.used = 0
        self._size = size

    def take(self, size: int) -> bool:
        """Takes bytes; False if there are not so many left."""
        fits = self.used + size <= self._size
        self.used += size if fits else 0
        return fits

    def give_back(self, size: int) -> None:
        """Gives bytes back."""
        self.used -= size


class Continuation(msgspec.Struct, frozen=True):
    """The continuation of a stream on another engine.

    Attributes:
        call: the request for the next engine.
        kind: the kind of the engines that can serve it.
        resumption: what that engine need not compute again; None if it runs the request from its beginning.
    """

    call: Call
    kind: str
    resumption: Resumption | None


@dataclass(slots=True)
class Migration:
    """One request's way to another engine in mid-answer.

    Attributes:
        room: where its body is kept.
        is_on: another engine may be tried at all.
    """

    room: Room
    is_on: bool
    _call: Call | None = None
    _kind: str = ""
    _size: int = 0
    _sent: Transcript | None = None
    _splice: Splice | None = None
    _resume: Callable[[], Resumption] | None = field(default=None, repr=False)

    @property
    def keeps_body(self) -> bool:
        """Whether the request's body must not be freed yet."""
        return self._size > 0

    def passage(self, call: Call, hold: Hold, kind: str) -> Transcript | Splice | None:
        """The stage that the stream passes on its way to the client; None if it ends with its engine.

        Args:
            call: the request.
            hold: its hold on an engine.
            kind: the engine's kind.
        """
        self.close()
        if self._splice is not None:
            return self._splice
        if not (self.is_on and call.streams and call.route in ROUTES and isinstance(call.body, JsonBody)):
            return None
        size = len(call.body.raw)
        if (hold.resume is None and not _is_greedy(call.body)) or not self.room.take(size):
            return None
        self._call, self._kind, self._size, self._resume = call, kind, size, hold.resume
        self._sent = Transcript(keeps_text=hold.resume is None)
        return self._sent

    def go_on(self, cached_tokens: int | None) -> Continuation | None:
        """The continuation of the stream after its engine died; None if it cannot go on.

        `cached_tokens`: prompt tokens that the engine reused, if it told.
        """
        call, sent = self._call, self._sent
        if call is None or sent is None or self._splice is not None or not isinstance(call.body, JsonBody):
            return None
        sent.read()
        if not sent.is_plain:
            return None
        resumption = self._resume() if self._resume is not None else None
        if resumption is not None and resumption.token_ids:
            call = msgspec.structs.replace(call, body=call.body.replace(**resumption.fields))
        self._splice = Splice(sent, again=resumption is None, cached_tokens=cached_tokens)
        return Continuation(call, self._kind, resumption)

    def close(self) -> None:
        """The request is over, or another engine begins its answer."""
        self.room.give_back(self._size)
        self._size, self._call, self._sent, self._resume = 0, None, None, None


NEVER = Migration(Room(0), is_on=False)
"""For a request whose stream ends with its engine."""


def _is_greedy(body: JsonBody) -> bool:
    """Whether the same prompt always gives the same answer."""
    return bool(body.hint("temperature") == 0)
