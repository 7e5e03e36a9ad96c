"""Messages about a kvpin's own requests to its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from engine_adapter.types import Role, Usage
from proxy.core.index.blocks import Chain
from proxy.core.peers.messages import Heartbeat, Message, Placing, RequestState, Step, packed
from proxy.core.placement.load import Work


class Telling:
    """Tells of one request, from its placement to its end."""

    __slots__ = ("_own", "_placing", "_state")

    def __init__(self, own: OwnRequests, state: RequestState, placing: Placing) -> None:
        self._own, self._state = own, state
        self._placing = replace(placing, known=False)  # who hears of it later does not know its times
        own.tell(replace(state, placing=placing))

    def refined(self, work: Work) -> None:
        """Its work is another one."""
        self._tell(work=work)

    def answer_began(self, step: Step) -> None:
        """Its answer began, see `Step`."""
        self._tell(step=step)

    def ended(self, computed: int | None, usage: Usage | None) -> None:
        """It is over, see `Placer.end`."""
        self._own.forget(self._state.id)
        self._tell(step=Step.OVER, computed=computed, usage=usage)

    def _tell(self, **changes: Any) -> None:  # noqa: ANN401 - fields of a state
        self._state = replace(self._state, **changes)
        self._own.tell(self._state)

    def now(self) -> RequestState:
        """The request as it is now, for a peer that does not know it."""
        return replace(self._state, placing=self._placing)


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
        placing = Placing(engine, hashes, n_tokens, streams, known, session, part)
        telling = self._in_flight[self._last] = Telling(self, RequestState(self._last, work), placing)
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
