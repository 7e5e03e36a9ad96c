"""Settings of engines that publish KV events over ZMQ, and may have several data-parallel ranks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine_adapter.events.sources import check_address, reachable_endpoint
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.options import EngineOptions
from engine_adapter.types import EngineSpec


class EventOptions(EngineOptions, frozen=True):
    """Options of such engines, and all options of `sglang` engines.

    Attributes:
        events: ZMQ address of its KV events, by default the engine's own.
        replay: ZMQ address that replays missed events, by default the engine's own.
        dp_rank: the data-parallel rank of this engine. Without it, each rank of a server that kvpin did not
            start becomes an engine.
    """

    events: str | None = None
    replay: str | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        check_address("events", self.events)
        check_address("replay", self.replay)

    @property
    def rank(self) -> int | None:
        """See EngineOptions."""
        return self.dp_rank

    def endpoints(
        self, url: str, events: str | None, replay: str | None, topic: str = ""
    ) -> EventEndpoints | None:
        """Where this machine reads an engine's events; None if it does not reach them.

        The operator's addresses override those that the engine itself names.

        Args:
            url: address of the engine's HTTP server.
            events: ZMQ address of its events, None where it names none.
            replay: ZMQ address of its replay socket, None likewise.
            topic: of its events.
        """
        if self.events is not None:
            return EventEndpoints(self.events, self.replay, topic)
        reached = None if events is None else reachable_endpoint(events, url)
        if reached is None:
            return None
        own_replay = None if replay is None else reachable_endpoint(replay, url)
        return EventEndpoints(reached, self.replay or own_replay, topic)


EventSpec = EngineSpec[EventOptions]
