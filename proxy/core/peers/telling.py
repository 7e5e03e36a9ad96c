"""Messages about a kvpin's own requests to its peers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from xxhash import xxh3_64_intdigest

from engine_adapter.types import Role, Usage
from proxy.core.index.blocks import Chain
from proxy.core.peers.messages import (
    AnsweredWhole,
    Begun,
    FirstToken,
    Heartbeat,
    Listing,
    Message,
    Refined,
    RequestOver,
    packed,
)
from proxy.core.placement.load import Work


def digest_of(ids: Iterable[int]) -> int:
    """The digest of the ids of requests in flight, in any order."""
    return xxh3_64_intdigest(array("Q", sorted(ids)).tobytes())


class Telling:
    """Tells of one request, from its placement to its end."""

    __slots__ = ("_begun", "_own", "_step", "_work")

    def __init__(self, own: OwnRequests, begun: Begun) -> None:
        self._own, self._begun = own, begun
        self._work, self._step = begun.work, 0

    def refined(self, work: Work) -> None:
        """Its work is another one."""
        self._work = work
        self._own.tell(Refined(self._begun.id, work))

    def first_token(self) -> None:
        """Its stream began."""
        self._step = 1
        self._own.tell(FirstToken(self._begun.id))

    def answered(self) -> None:
        """It was answered whole."""
        self._step = 2
        self._own.tell(AnsweredWhole(self._begun.id))

    def ended(self, computed: int | None, report: Usage | None) -> None:
        """It is over, see `Placer.end`."""
        self._own.forget(self._begun.id)
        self._own.tell(RequestOver(self._begun.id, computed, report))

    def now(self) -> Begun:
        """The request as it is now, for a peer that did not see its earlier steps and so not their times."""
        begun = self._begun
        return Begun(
            begun.id,
            begun.engine,
            begun.hashes,
            begun.n_tokens,
            self._work,
            streams=begun.streams,
            known=False,
            session=begun.session,
            step=self._step,
            part=begun.part,
        )


class OwnRequests:
    """The requests that this kvpin has in flight, and what is still to be told."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to tell, once until that is taken."""
        self._wake = wake
        self._untold: list[Message] = []
        self._in_flight: dict[int, Telling] = {}
        self._last = 0  # id

    def begun(
        self,
        engine: str,
        work: Work,
        chain: Chain | None,
        *,
        streams: bool,
        known: bool,
        session: int | None,
        part: Role = Role.BOTH,
    ) -> Telling:
        """Tells that a request, or a `part` of it, was placed. Returns the object that tells its further
        steps."""
        self._last += 1
        hashes, n_tokens = (packed(chain.hashes), chain.n_tokens) if chain is not None else (None, 0)
        begun = Begun(
            self._last,
            engine,
            hashes,
            n_tokens,
            work,
            streams=streams,
            known=known,
            session=session,
            part=part,
        )
        telling = self._in_flight[begun.id] = Telling(self, begun)
        self.tell(begun)
        return telling

    def tell(self, message: Message) -> None:
        """Adds a message to the next batch."""
        if not self._untold:
            self._wake()
        self._untold.append(message)

    def forget(self, request: int) -> None:
        """A request is over."""
        del self._in_flight[request]

    def take(self) -> list[Message]:
        """Takes the messages that were not sent yet."""
        untold, self._untold = self._untold, []
        return untold

    def listing(self) -> Iterator[Message]:
        """All requests in flight, for a peer that does not know them."""
        yield Listing()
        for telling in self._in_flight.values():
            yield telling.now()
        yield self.heartbeat()

    def heartbeat(self) -> Heartbeat:
        """The sign of life. Peers compare its counts with their own."""
        return Heartbeat(len(self._in_flight), digest_of(self._in_flight))
