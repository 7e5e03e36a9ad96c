"""Hands over what a worker counts, and its events, to the worker that speaks for all.

A second's counts are one message of a few kilobytes, however many requests there were. What is handed over
counts there alone. A message is sent again until it was answered, and counts once.
"""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic, time

import msgspec

from engine_adapter import HttpTransport
from proxy.api.workers.siblings import Siblings, ask
from proxy.control.handed import Counts, add, take
from proxy.core.engine_book import decode_marks, encode_marks
from proxy.fleet.fleet import Fleet
from proxy.observe.gauges import WorkerNow, tasks, waiting_of
from proxy.observe.live import Live, Viewer
from proxy.observe.metrics import Metrics

HAND_OVER_PATH = "/workers/hand_over"
# Between two messages: usually, and while somebody watches.
USUAL_S = 1.0
WATCHED_S = 0.2
# One that does not answer within that time gets the message again.
_WITHIN_S = 5.0
# A worker that was silent for that long says nothing of now.
_SILENT_S = 3.0


class Handed(msgspec.Struct, array_like=True, frozen=True):
    """A message to the worker that speaks for all.

    Attributes:
        worker: from 1.
        run: a number that this process of the worker drew.
        number: of the message, from 1.
        events: for viewers.
    """

    worker: int
    run: int
    number: int
    counts: Counts
    now: WorkerNow
    events: bytes


class Told(msgspec.Struct, array_like=True, frozen=True):
    """The answer: whether somebody watches, and what operators have ordered about engines."""

    is_watched: bool
    marks: bytes


class HandOver:
    """One worker's part in it: it hands over, or speaks for all."""

    def __init__(
        self,
        siblings: Siblings,
        transport: HttpTransport,
        fleet: Fleet,
        metrics: Metrics,
        live: Live,
        *,
        is_shared: bool,
    ) -> None:
        """`is_shared`: the exchange tells the workers each other's requests in flight."""
        self._siblings, self._transport, self._is_shared = siblings, transport, is_shared
        self._fleet, self._metrics, self._live = fleet, metrics, live
        self._run, self._number = secrets.randbits(63), 0
        self._unanswered: Handed | None = None
        self._viewer: Viewer | None = None  # collects events for those who watch another worker
        self._last = dict[int, tuple[int, int]]()  # run and number of each other worker's last message
        self._heard = dict[int, tuple[float, WorkerNow]]()

    async def run(self) -> None:
        """Hands over now and then, until cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(USUAL_S if self._viewer is None else WATCHED_S)

    async def once(self) -> None:
        """Hands over what there is, unless this worker speaks for all."""
        if self._siblings.speaks():
            self._watch(is_watched=False)
            if (unanswered := self._unanswered) is not None:
                self._unanswered = None
                self._add(unanswered)
            self._look()
            return
        handed = self._unanswered = self._unanswered or self._take()
        body = msgspec.msgpack.encode(handed)
        to = self._transport, [self._siblings.speaker], "POST", HAND_OVER_PATH
        for answer in await ask(*to, body=body, within_s=_WITHIN_S):
            if answer.is_good:
                self._unanswered = None
                told = msgspec.msgpack.decode(answer.body, type=Told)
                self._fleet.book.merge(decode_marks(told.marks), now=time())
                self._watch(is_watched=told.is_watched)

    async def receive(self, body: bytes) -> bytes:
        """Takes another worker's message, and answers it."""
        handed = msgspec.msgpack.decode(body, type=Handed)
        if self._last.get(handed.worker) != (handed.run, handed.number):
            self._last[handed.worker] = handed.run, handed.number
            self._add(handed)
        self._heard[handed.worker] = monotonic(), handed.now
        self._look()
        return msgspec.msgpack.encode(Told(bool(self._live.viewers), encode_marks(self._fleet.book.marks())))

    def _take(self) -> Handed:
        self._number += 1
        engines = () if self._is_shared else self._fleet.engines.values()
        in_flight = {engine.id: engine.ledger.in_flight for engine in engines}
        now = WorkerNow(in_flight, dict(+waiting_of(self._fleet)), self._metrics.bodies.used, tasks())
        events = self._viewer.taken() if self._viewer is not None else b""
        counts = take(self._fleet, self._metrics)
        return Handed(self._siblings.number, self._run, self._number, counts, now, events)

    def _add(self, handed: Handed) -> None:
        add(self._fleet, self._metrics, handed.counts)
        for viewer in self._live.viewers if handed.events else ():
            viewer.give(handed.events)

    def _look(self) -> None:
        """Notes what goes on in the other workers that were heard lately."""
        late = monotonic() - _SILENT_S
        others = self._metrics.others = [now for heard, now in self._heard.values() if heard > late]
        for engine in self._fleet.engines.values():
            engine.at_others = sum(each.in_flight.get(engine.id, 0) for each in others)

    def _watch(self, *, is_watched: bool) -> None:
        if is_watched and self._viewer is None:
            self._viewer = self._live.join(snapshots=False)
        elif not is_watched and self._viewer is not None:
            self._live.leave(self._viewer)
            self._viewer = None
