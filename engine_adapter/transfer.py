"""How the KV of a prompt gets from the engine that computed it to the engine that answers.

    first leg     prefill engine   the prompt, and one token     → Handover
    second leg    decode engine    the request and the Handover  → the answer

The first leg ends before the second begins. Either is cancelled by closing its connection. KV that the decode
engine does not fetch stays with the prefill engine until its lease ends. Then it is freed, and other KV may
take its place: whoever reads it after that reads the wrong KV, and no error shows it. So nobody may be told
of a handover that is older than `Transfer.usable_s`, and an answer that begins later must not be used.

An answer that shows too late when it began, or that fetches several times, has a leg of its own between the
two: the decode engine fetches the KV for one token. Then it gets the request, and finds the KV in its cache.

Other engines can only serve half of a request each, and do so at the same time:

    prefill engine   the request ─┐ where      the prompt, and one token
    decode engine    the request ─┘ to meet    → the answer

An engine of that kind answers no request alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_adapter.body import JsonBody
from engine_adapter.types import TokenIds


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

        `asked` is the body of the first leg. Raises EngineGarbled for an answer that cannot be understood.
        """

    def second_leg(self, body: JsonBody, handover: Handover) -> JsonBody:
        """The body for the decode engine, which then fetches the KV."""


class Rendezvous(Protocol):
    """How two engines meet that serve one request at the same time, each half of it. Engines with a
    rendezvous answer no request alone. They meet if their rendezvous have the same name.

    Attributes:
        name: of the way, for people.
        remedy: how to give an engine the other half that it lacks.
    """

    name: str
    remedy: str

    def takes(self, route: str) -> bool:
        """True if requests on that route have two halves. On others, the decode engine answers alone."""

    def meet(self) -> Mapping[str, object]:
        """Fields that both engines get with a request, each time others. Those of the prefill engine's
        rendezvous count."""
