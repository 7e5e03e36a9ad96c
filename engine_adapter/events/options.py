"""Settings of engines that publish KV events over ZMQ and may have several data-parallel ranks, and the
addresses of their sockets, as this machine reaches them."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.web_pages import is_loopback
from engine_adapter.options import EngineOptions
from engine_adapter.types import EngineSpec

RANKS = "name it in the settings or in a source of engines, and kvpin uses each rank as an engine of its own"
"""How a server with several data-parallel ranks is used fully."""

WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - nothing is bound here
_ADDRESS = re.compile(r"tcp://(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):\d{1,5}|ipc://\S+", re.ASCII)


class EventAddresses(EngineOptions, frozen=True):
    """Options of engines that publish KV events over ZMQ, and all options of `tensorrt_llm` engines.

    Attributes:
        events: ZMQ address of its KV events, by default the engine's own.
        replay: ZMQ address that replays missed events, by default the engine's own.
    """

    events: str | None = None
    replay: str | None = None

    def __post_init__(self) -> None:
        check_address("events", self.events)
        check_address("replay", self.replay)

    def endpoints(
        self, url: str, events: str | None, replay: str | None, topic: str = ""
    ) -> EventEndpoints | None:
        """The addresses at which this machine reads an engine's events; None if it does not reach them.

        The operator's addresses override `events` and `replay`, which the engine itself names. `url` is that
        of its HTTP server."""
        if self.events is not None:
            return EventEndpoints(self.events, self.replay, topic)
        reached = None if events is None else reachable_endpoint(events, url)
        if reached is None:
            return None
        own_replay = None if replay is None else reachable_endpoint(replay, url)
        return EventEndpoints(reached, self.replay or own_replay, topic)


class EventOptions(EventAddresses, frozen=True):
    """Options of engines that may also have several ranks, and all options of `sglang` engines.

    Attributes:
        dp_rank: the data-parallel rank of this engine. Without it, each rank of a server that kvpin did not
            start becomes an engine.
    """

    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    @override
    def rank(self) -> int | None:
        return self.dp_rank


EventSpec = EngineSpec[EventOptions]


def check_address(name: str, address: str | None) -> None:
    """Raises ValueError if the setting `name` is no ZMQ address that can be connected to."""
    if address is not None and not _ADDRESS.fullmatch(address):
        raise ValueError(f"{name}: {address!r} is no address to connect to, such as tcp://HOST:PORT")


def reachable_endpoint(endpoint: str, engine_url: str) -> str | None:
    """Turns a socket's bind address into one to connect to; None if it is no ZMQ address, or if only the
    engine's machine can reach it. A wildcard becomes the host of `engine_url`."""
    host = urlsplit(engine_url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    scheme, _, address = endpoint.partition("://")
    bound, _, port = address.rpartition(":")
    if scheme == "tcp" and bound in WILDCARDS:
        endpoint, bound = f"tcp://{host}:{port}", host
    is_local = scheme == "ipc" or is_loopback(bound)
    if not _ADDRESS.fullmatch(endpoint) or (is_local and not is_loopback(host)):
        return None
    return endpoint


def address_of_rank(address: str, rank: int) -> str:
    """The address of a data-parallel rank, where `address` is that of rank 0: each has the next port."""
    start, _, port = address.rpartition(":")
    return f"{start}:{int(port) + rank}" if port.isdecimal() else address
