"""The exchange between kvpins, as statistics for people."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class PeerStats(msgspec.Struct, kw_only=True):
    """Another kvpin, as this one sees it.

    Attributes:
        name: its machine and process.
        engines: engines of it that are engines here, too.
        in_flight: its requests.
        in_step: all of them are known.
        round_trip_s: what a message to it and back takes; None before that was measured.
        behind: the round trip is too long, so its requests count only after their end.
        silent_s: since it was heard.
        gaps: how often batches of it were lost.
        divergences: how often its requests differed from those known here, without a gap.
    """

    name: str
    engines: int
    in_flight: int
    in_step: bool
    round_trip_s: float | None
    behind: bool
    silent_s: float
    gaps: int
    divergences: int


class ExchangeStats(msgspec.Struct, kw_only=True):
    """The exchange of this kvpin with others.

    Attributes:
        connected: the exchange works.
        peers: the other kvpins.
        dropped: batches that were not sent because a peer had not read enough.
        lost: kvpins that fell silent.
    """

    connected: bool
    peers: list[PeerStats]
    dropped: int
    lost: int


@dataclass(slots=True, eq=False)
class ExchangeCounts:
    """Counts of the exchange so far: messages told and heard, listings asked for, kvpins that fell silent,
    how often one fell behind, and gaps and divergences of kvpins that are gone."""

    told: int = 0
    heard: int = 0
    asked: int = 0
    lost: int = 0
    behind: int = 0
    gaps: int = 0
    divergences: int = 0
