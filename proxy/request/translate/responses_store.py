"""The responses that kvpin keeps for clients: `store`, `previous_response_id`, `GET /v1/responses/{id}`.

They lie in memory. Each tenant has its own, and the same room for them. The one that was used longest ago
goes first, and each goes when it was not used for a day. A response that names the one before it shares its
turns, so that conversation is kept once. A client that sends or references all items stores them again with
each response; one that sends them all needs none kept (`store: false`). Only its own tenant can tell a
response from one that never was.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import RLock

MAX_BYTES = 256 << 20
"""The most that all tenants' responses take."""
MAX_ID = 256
"""The most characters of an id that an engine's response is known by, and of a name that an error repeats."""
IDLE_S = 86_400.0
"""Seconds for which a response is kept that nobody uses."""
# Bytes that an object takes beside its content, its name in two dictionaries and its turns included.
_OVERHEAD = 400


@dataclass(slots=True, eq=False)
class Turn:
    """A request and its answer, in items as JSON.

    Attributes:
        previous: the turn before it; None for the first.
        asked, answered: the items by their ids.
        users: how many responses and later turns keep it.
    """

    previous: Turn | None
    asked: dict[str, bytes]
    answered: dict[str, bytes]
    users: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes by itself."""
        parts = (self.asked, self.answered)
        return sum(sum(map(len, items.values())) + _OVERHEAD * len(items) for items in parts)

    @property
    def n_items(self) -> int:
        """Items of the conversation, up to and including this turn."""
        return sum(len(turn.asked) + len(turn.answered) for turn in self._turns())

    @property
    def total(self) -> int:
        """Bytes that the conversation takes, up to and including this turn."""
        return sum(turn.size for turn in self._turns())

    def conversation(self) -> Iterator[tuple[str, bytes]]:
        """The items of the conversation with their ids, up to and including this turn."""
        for turn in self._turns():
            yield from turn.asked.items()
            yield from turn.answered.items()

    def input(self) -> list[dict[str, bytes]]:
        """The items by their ids that were the input of this turn's answer, in parts."""
        before = self.previous._turns() if self.previous is not None else []  # noqa: SLF001 - likewise
        return [part for turn in before for part in (turn.asked, turn.answered)] + [self.asked]

    def _turns(self) -> list[Turn]:
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


@dataclass(slots=True)
class StoredResponse:
    """A response that is kept. `content`: the response as JSON; `used_at`: when it was used last, by the
    store's clock."""

    content: bytes = field(repr=False)
    turn: Turn = field(repr=False)
    used_at: float


class TenantResponses:
    """The responses of one tenant, of at most `room` bytes. Threads may use it at once: long requests are
    read in some."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.bytes = self.room = 0
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # the one used longest ago first
        # The turns that have an item of this id, in order: a client may send it again in each turn.
        self._items: dict[str, dict[Turn, None]] = {}
        self._lock = RLock()  # no answer waits for long: nothing is done under it but looking up and counting

    def put(self, response_id: str, content: bytes, turn: Turn) -> None:
        """Keeps a response. Others, or this one, go if there is no room for all."""
        with self._lock:
            self._expire()
            self._stored[response_id] = StoredResponse(content, turn, self._clock())
            self.bytes += len(content) + _OVERHEAD
            self._keep(turn)
            while self.bytes > self.room:
                self._drop(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response; None if it is not, or no longer, kept."""
        with self._lock:
            self._expire()
            stored = self._stored.get(response_id)
            if stored is not None:
                stored.used_at = self._clock()
                self._stored.move_to_end(response_id)
            return stored

    def delete(self, response_id: str) -> bool:
        """Forgets a response. Responses that follow it keep what was said. False if it is not kept."""
        with self._lock:
            found = response_id in self._stored
            if found:
                self._drop(response_id)
            return found

    def item(self, item_id: str) -> bytes | None:
        """An item of any response that is kept, as the last one has it."""
        with self._lock:
            turn = next(reversed(self._items.get(item_id, {})), None)
        return None if turn is None else turn.asked.get(item_id) or turn.answered[item_id]

    def _expire(self) -> None:
        idle_since = self._clock() - IDLE_S
        while self._stored and next(iter(self._stored.values())).used_at < idle_since:
            self._drop(next(iter(self._stored)))

    def _drop(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        self.bytes -= len(stored.content) + _OVERHEAD
        self._release(stored.turn)

    def _keep(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.users += 1
            if turn.users > 1:
                return
            self.bytes += turn.size
            for name in (*turn.asked, *turn.answered):
                self._items.setdefault(name, {})[turn] = None
            turn = turn.previous

    def _release(self, turn: Turn | None) -> None:
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self.bytes -= turn.size
            for name in (*turn.asked, *turn.answered):
                self._items[name].pop(turn)
                if not self._items[name]:
                    del self._items[name]
            turn = turn.previous


class ResponseStore:
    """The responses of all tenants."""

    def __init__(
        self,
        tenants: Iterable[str] = (),
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tenants`: see `divide`."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._shelves: dict[str | None, TenantResponses] = {}
        self.divide(tenants)

    def divide(self, tenants: Iterable[str]) -> None:
        """Divides the room among these tenants; none are one without a name. What others had is dropped. A
        tenant that has more than its part loses its oldest responses when it gets its next one."""
        names: set[str | None] = {*tenants} or {None}
        self._shelves = {name: self._shelves.get(name) or TenantResponses(self._clock) for name in names}
        for shelf in self._shelves.values():
            shelf.room = self._max_bytes // len(names)

    def of(self, tenant: str | None) -> TenantResponses:
        """The responses of a tenant. Of one that was removed, none are kept."""
        return self._shelves.get(tenant) or TenantResponses(self._clock)
