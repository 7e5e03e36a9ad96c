"""What an adapter does for one request beside forwarding it: forecasts, holds, and KV from another engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine_adapter.body import JsonBody, Upload
from engine_adapter.types import TokenIds

# --- forecasts of a request's cost on an engine, and holds on the engine while it runs ------------------
# Most engines manage their cache themselves: their adapters have no forecast, and their holds only change the
# request. For an engine that divides its cache into slots, the adapter does it. `forecast` says what the
# request would cost now. `hold` gives it a slot, restores its KV there, and reads from the answer what it
# leaves behind.

RequestBody = JsonBody | Upload | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of a prompt on an engine now, from the engine's adapter. Times in seconds.

    Attributes:
        cached_tokens: prompt tokens the engine would report as reused.
        firm: False if there may be more.
        wait_s: until there is room.
        restore_s: to restore its KV from a lower tier, and to save what that overwrites.
        prefill_s: to compute the rest.
        interference_s: delay for running requests.
        regret_s: expected time to recompute later what it evicts now.
        idle_s: the total cost in a slot that is idle, where the best one is not; inf if none is idle; None if
            it waits for no slot.
    """

    cached_tokens: int
    firm: bool = True
    wait_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    interference_s: float = 0.0
    regret_s: float = 0.0
    idle_s: float | None = None

    @property
    def at_once_s(self) -> float:
        """What it would cost to begin without a wait for a slot; inf if it cannot."""
        return self.total_s if self.idle_s is None else self.idle_s

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.wait_s + self.restore_s + self.prefill_s + self.interference_s + self.regret_s


class AnswerReader(Protocol):
    """Reads an answer on its way to the client, and may remove what the client did not ask for.

    Attributes:
        assembles: the engine streams although the client wants one JSON answer, which `finish` returns.
        takes_pieces: it gets a stream as it arrives; False: as whole events.
        marks: events without any of these bytes pass unread; None if all are read.
        note: how that differs from what the client wants; known after `finish`.
    """

    assembles: bool = False
    takes_pieces: bool = False
    marks: tuple[bytes, ...] | None = None
    note: str = ""

    @property
    def finish_ms(self) -> float:
        """About how many milliseconds `finish` takes. Above 1 it is called in a thread."""
        return 0.0

    def feed(self, chunk: bytes) -> bytes:
        """Takes the next bytes of a stream, or a whole JSON answer. Returns the bytes for the client; b""
        while they are held back, and always if `assembles`."""

    def finish(self, rest: bytes = b"") -> bytes:
        """Ends the answer. Returns the client's part of `rest`, a last event without an end, or the JSON body
        if `assembles`. Raises EngineUnavailable: the stream broke off, or has an error."""
        return rest

    def cached_tokens(self) -> int | None:
        """Reused prompt tokens, if the engine reported them; call it after `finish`."""
        return None

    def prompt_tokens(self) -> TokenIds[int] | None:
        """The prompt as the engine tokenised it, if it was asked to report it; call it after `finish`."""
        return None


@dataclass(frozen=True, slots=True)
class Resumption:
    """The state from which another engine of the same kind goes on with an answer that broke off.

    Attributes:
        token_ids: the answer's tokens so far, those of the text that the client has.
        fields: the fields to set in the request's body.
    """

    token_ids: TokenIds[int]
    fields: Mapping[str, Any]


@dataclass(slots=True)
class Hold:
    """A request's hold on an engine.

    Attributes:
        cached_tokens: reused tokens that the engine will report; None keeps the placement's prediction.
        firm: False if there may be more.
        answer: reads the answer; None if nothing does.
        told_tokens: the prompt as the engine tokenises it, asked for beside the request; None if it was not.
        told_cached: reused tokens that its client is told; None for those that the engine reports.
        note: how it was served, for people.
        slot: the engine's slot that it runs on; None for an engine without slots.
        retains: the engine retains the KV as the target of the request asks.
        is_lost: tells whether its slot is not its own any more: it must not be sent. None without slots.
        resume: tells how to go on where the answer stands now; None if the engine cannot begin in the middle.
    """

    body: RequestBody
    cached_tokens: int | None = None
    firm: bool = True
    answer: AnswerReader | None = None
    told_tokens: TokenIds[int] | None = None
    told_cached: int | None = None
    note: str = ""
    slot: int | None = None
    retains: bool = False
    is_lost: Callable[[], bool] | None = None
    resume: Callable[[], Resumption] | None = None


# --- how the KV of a prompt gets from the engine that computed it to the engine that answers ------------
#     first leg     prefill engine   the prompt, and one token     → Handover
#     second leg    decode engine    the request and the Handover  → the answer
#
# The first leg ends before the second begins. Either is cancelled by closing its connection. KV that the
# decode engine does not fetch stays with the prefill engine until its lease ends. Then it is freed, and
# other KV may take its place: whoever reads it after that reads the wrong KV, and no error shows it. So
# nobody may be told of a handover that is older than `Transfer.usable_s`, and an answer that begins later
# must not be used.
#
# An answer that shows too late when it began, or that fetches several times, has a leg of its own between
# the two: the decode engine fetches the KV for one token. Then it gets the request, and finds the KV in its
# cache.
#
# Other engines can only serve half of a request each, and do so at the same time:
#
#     prefill engine   the request ─┐ where      the prompt, and one token
#     decode engine    the request ─┘ to meet    → the answer
#
# An engine of that kind answers no request alone.


@dataclass(frozen=True, slots=True)
class Handover:
    """The KV that a prefill engine keeps for a decode engine.

    Attributes:
        fields: where it lies, for the decode engine; empty if none is kept, because the answer ended with its
            first token.
        cached_tokens: prompt tokens that the prefill engine reused; None if it did not tell.
    """

    fields: Mapping[str, msgspec.Raw]
    cached_tokens: int | None


class Transfer(Protocol):
    """One way to move KV. Engines move it between each other if their transfers have the same name.

    Attributes:
        name: of the way, for people.
        usable_s: seconds from the end of a prefill in which the KV is certainly still there.
        remedy: what to do with an engine that keeps no KV for others.
        checks_all: the first leg has all fields of the request, so that its engine refuses what is wrong with
            them. What the decode engine refuses then is the KV.
    """

    name: str
    usable_s: float
    remedy: str
    checks_all: bool

    def takes(self, route: str, body: JsonBody) -> bool:
        """True if a request can be served in two legs."""

    def fetch(self, route: str, body: JsonBody, token_ids: TokenIds[int]) -> tuple[str, JsonBody] | None:
        """The route and body of a request for one token of that prompt, by which the decode engine fetches
        the KV before it gets the request itself. Both legs are then made of it. None where the request's own
        answer shows in time that the KV was fetched."""

    def first_leg(self, body: JsonBody) -> JsonBody:
        """The body for the prefill engine, from that for the decode engine."""

    def handover(self, answer: bytes, asked: JsonBody) -> Handover | None:
        """What the prefill engine's answer says about the KV; None if it keeps nothing for another engine.

        `asked` is the body of the first leg. Raises EngineGarbled for an answer that cannot be understood."""

    def second_leg(self, body: JsonBody, handover: Handover) -> JsonBody:
        """The body for the decode engine, which then fetches the KV."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How two engines meet that serve one request at the same time, each half of it. Engines with a
    rendezvous answer no request alone. They meet if their rendezvous have the same name.

    Attributes:
        name: of the way, for people.
        remedy: how to give an engine the other half that it lacks.
        routes: requests on these have two halves. On others, the decode engine answers alone.
        meet: fields that both engines get with a request, each time others. Those of the prefill engine's
            rendezvous count.
    """

    name: str
    remedy: str
    routes: frozenset[str]
    meet: Callable[[], Mapping[str, object]]
