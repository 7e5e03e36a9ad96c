"""Messages about a kvpin's own requests to its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from engine_adapter.types import Role, Usage
from proxy.core.index.blocks import Chain
from proxy.core.peers.messages import (
    AnswerBegan,
    Begun,
    Heartbeat,
    Message,
    Refined,
    RequestOver,
    packed,
)
from proxy.core.placement.load import Work


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

    def answer_began(self, step: int) -> None:
        """Its answer began, see `AnswerBegan`."""
        self._step = step
        self._own.tell(AnswerBegan(self._begun.id, step))

    def ended(self, computed: int | None, report: Usage | None) -> None:
        """It is over, see `Placer.end`."""
        self._own.forget(self._begun.id)
        self._own.tell(RequestOver(self._begun.id, computed, report))

    def now(self) -> Begun:
        """The request as it is now, for a peer that did not see its earlier steps and so not their times."""
        return replace(self._begun, work=self._work, known=False, step=self._step)


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
        """Adds a message to the next frame."""
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

    def in_flight(self, now: float) -> Iterator[Message]:
        """All requests in flight, for a peer that does not know them, and the heartbeat that names them."""
        for telling in self._in_flight.values():
            yield telling.now()
        yield self.heartbeat(now)

    def heartbeat(self, now: float) -> Heartbeat:
        """The sign of life of this kvpin and of its requests."""
        return Heartbeat(packed(self._in_flight), now)
