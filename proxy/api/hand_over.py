"""What a worker counts, and its events, handed over to the worker that speaks for all."""

from __future__ import annotations

import asyncio
import secrets
from time import monotonic, time

import msgspec

from engine_adapter import HttpTransport
from engine_adapter.off_loop import THREADS, What
from proxy.api.siblings import Siblings, ask
from proxy.control.live import Live, Viewer
from proxy.core.audit import AuditCounts, Unchecked
from proxy.core.books import decode_marks, encode_marks
from proxy.core.placement.tiering import AheadCounts
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.observe.metric_families import Taken
from proxy.observe.metrics import Metrics, ReuseCounts, WorkerNow, summed, tasks, waiting_of
from proxy.prompt import PromptBuilder

# --- handed ---------------------------------------------------------------------------------------------
# What a worker counts, handed over to the worker that speaks for all: from then on it counts there alone.


class EngineCounts(msgspec.Struct, array_like=True, frozen=True):
    """The counts of the requests of one engine."""

    served: int
    prefilled: int
    failed: int
    audit: AuditCounts
    unchecked: dict[Unchecked, int]
    ahead: AheadCounts


class WorkerCounts(msgspec.Struct, array_like=True, frozen=True):
    """The counts of one worker since it handed over last.

    Attributes:
        ended: requests.
        series: those of the page, by name and labels.
        left_reuse: see `Metrics`.
        engines: by engine.
        cpu_s: by tenant and kind of work, see `FairThreads.spent`.
        prompts: those whose tokens agreed with the engine's and differed, by model.
        passed_on: see `Fleet.passed_on`.
    """

    ended: int
    series: list[tuple[str, tuple[str, ...], Taken]]
    left_reuse: ReuseCounts
    cpu_s: list[tuple[str | None, What, float]]
    engines: dict[str, EngineCounts]
    prompts: dict[str, tuple[int, int]]
    passed_on: dict[str, int]


def take(fleet: Fleet, metrics: Metrics) -> WorkerCounts:
    """The counts, which begin anew here."""
    cpu_s = [(*key, seconds) for key, seconds in THREADS.spent.items() if seconds]
    for tenant, what, seconds in cpu_s:
        THREADS.on_loop[tenant, what] -= seconds
    taken = WorkerCounts(
        metrics.ended,
        [
            (name, labels, taken)
            for name, family in metrics.families.items()
            for labels, each in family.items()
            if (taken := each.take()) is not None
        ],
        metrics.left_reuse,
        cpu_s,
        {engine.id: _take(engine) for engine in fleet.engines.values()},
        {model: (builder.agreed, builder.differed) for model, builder in _builders(fleet)},
        dict(fleet.passed_on),
    )
    metrics.ended, metrics.left_reuse = 0, ReuseCounts()
    fleet.passed_on.clear()
    for _, builder in _builders(fleet):
        builder.agreed = builder.differed = 0
    return taken


def _builders(fleet: Fleet) -> list[tuple[str, PromptBuilder]]:
    return [(pool.model, pool.prompts) for pool in fleet.pools.values() if pool.prompts is not None]


def _take(engine: Engine) -> EngineCounts:
    ended, audit, ahead = (engine.served, engine.prefilled, engine.failed), engine.audit, engine.ahead
    counts = EngineCounts(*ended, audit.counts, dict(audit.unchecked), ahead)
    engine.served = engine.prefilled = engine.failed = 0
    audit.counts, engine.ahead = AuditCounts(), AheadCounts()
    audit.unchecked.clear()
    return counts


def add(fleet: Fleet, metrics: Metrics, counts: WorkerCounts) -> None:
    """Counts what another worker has handed over."""
    metrics.ended += counts.ended
    own = {"engine": metrics.label, "prefiller": metrics.label, "tenant": metrics.tenant_label}
    for name, labels, taken in counts.series:
        family = metrics.families[name]
        pairs = zip(family.family.labels, labels, strict=True)
        named = tuple(own[each](value) if value and each in own else value for each, value in pairs)
        family[named].give(taken)
    metrics.left_reuse = summed(metrics.left_reuse, counts.left_reuse)
    for tenant, what, seconds in counts.cpu_s:
        THREADS.on_loop[tenant, what] += seconds
    for engine_id, more in counts.engines.items():
        if (engine := fleet.engines.get(engine_id)) is not None:
            _add(engine, more)
    for model, builder in _builders(fleet):
        agreed, differed = counts.prompts.get(model, (0, 0))
        builder.agreed, builder.differed = builder.agreed + agreed, builder.differed + differed
    fleet.passed_on.update(counts.passed_on)


def _add(engine: Engine, counts: EngineCounts) -> None:
    engine.served += counts.served
    engine.prefilled += counts.prefilled
    engine.failed += counts.failed
    engine.audit.counts = summed(engine.audit.counts, counts.audit)
    engine.audit.unchecked.update(counts.unchecked)
    engine.ahead = summed(engine.ahead, counts.ahead)


# --- hands over what a worker counts, and its events, to the worker that speaks for all -----------------
# A second's counts are one message of a few kilobytes, however many requests there were. What is handed over
# counts there alone. A message is sent again until it was answered, and counts once.

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
    counts: WorkerCounts
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
