"""Events for those who watch kvpin: what engines do, and requests as they are placed and end. No prompt text.

    request placed, ended → at most SHOWN_PER_S ┐
    every second: a snapshot of all engines ────┴→ encoded once → each viewer's queue → its client

While nobody watches, nothing is made. A viewer that reads too slowly misses events and is told how many.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from engine_adapter import Tier
from engine_adapter.prompt.forms import Form
from proxy.control.engines import EngineAnswer, describe_engine
from proxy.control.explain import RequestShown, facts_of
from proxy.core.audit import AuditView
from proxy.core.placement.decision import Placement
from proxy.core.reasons import Reason, reason_of, why
from proxy.errors import Overloaded
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics, ReuseCounts, available_tokens, waiting_of
from proxy.prompt import Trusted
from proxy.request.records import RequestRecord
from proxy.runtime import Supervisor, within

# Seconds between two snapshots.
TICK_S = 1.0
# Requests a second that have events of their own: people read no more, and browsers stay quick.
SHOWN_PER_S = 20
# Viewers at a time. Each costs a connection and a copy of the events.
MAX_VIEWERS = 32
# Bytes of events that wait for one viewer.
MAX_WAITING_BYTES = 1 << 20
_ENCODER = msgspec.json.Encoder()


class EngineNow(EngineAnswer, kw_only=True):
    """An engine with what is watched of it.

    Attributes:
        audit: how many predictions were exact, and why others were not checked.
        forms: who makes the tokens of each form of prompt; empty without reuse.
        held_tokens: tokens it is known to hold, by tier; empty until it has connected.
        capacity_tokens: room for them, by tier, where the engine tells.
        reuse: of the model that it serves now.
    """

    audit: AuditView
    forms: dict[Form, Trusted]
    held_tokens: dict[str, int]
    capacity_tokens: dict[str, int]
    reuse: ReuseCounts


class Snapshot(msgspec.Struct, kw_only=True):
    """All of kvpin now.

    Attributes:
        at: Unix time in seconds.
        reuse_on: requests are routed by KV cache.
        requests: requests that have ended since kvpin started.
        unshown: requests since the last snapshot that had no events of their own: there were too many.
        waiting: requests that wait because engines are busy, by model.
        unserved: models and LoRA adapters that no engine takes requests for.
        reuse: all engines together, those that have left included.
    """

    at: float
    reuse_on: bool
    requests: int
    unshown: int
    waiting: dict[str, int]
    unserved: list[str]
    reuse: ReuseCounts
    engines: list[EngineNow]


class RequestNow(RequestShown, kw_only=True):
    """A request when it is placed, and again when it has ended. Nothing in it repeats a prompt: `error`,
    `note`, `prompt_cache_key` and `session` are empty. `model`: the model or LoRA adapter that serves it.

    Attributes:
        available_tokens: the most that any eligible engine held of its prompt; null if that is not known.
        reason: what sent it to its engine, in one word.
        why: the same in a sentence; null if an earlier event of the request had it.
    """

    available_tokens: int | None
    reason: Reason | None
    why: str | None


class Missed(msgspec.Struct):
    """Events that this viewer did not get, because it read too slowly."""

    events: int


class Viewer:
    """The events that one client has yet to get. `snapshots`: snapshots are among them."""

    def __init__(self, *, snapshots: bool = True) -> None:
        self.snapshots = snapshots
        self._waiting = bytearray()
        self._missed = 0
        self._is_over = False
        self._news = asyncio.Event()

    def give(self, event: bytes) -> None:
        """Adds an event, if there is room."""
        if len(self._waiting) + len(event) > MAX_WAITING_BYTES and self._waiting:
            self._missed += 1
        else:
            self._waiting += event
        self._news.set()

    def end(self) -> None:
        """No event follows."""
        self._is_over = True
        self._news.set()

    async def take(self) -> bytes:
        """The next events; empty at the end."""
        while not self._waiting and not self._is_over:
            self._news.clear()
            await self._news.wait()
        return self.taken()

    def taken(self) -> bytes:
        """The events that wait now."""
        taken, self._waiting = self._waiting, bytearray()
        if self._missed:
            taken += _event("missed", Missed(self._missed))
            self._missed = 0
        return bytes(taken)


class Live:
    """The `viewers`, and the events they get."""

    def __init__(
        self, fleet: Fleet, metrics: Metrics, tasks: Supervisor, draining: asyncio.Event, *, reuse: bool
    ) -> None:
        """`draining` is set when kvpin is about to stop: viewers must not hold that up."""
        self._fleet, self._metrics, self._tasks, self._draining = fleet, metrics, tasks, draining
        self._reuse = reuse
        self.viewers: set[Viewer] = set()
        self._shown = self._unshown = 0  # requests since the last snapshot
        self._followed = set[str]()  # requests in flight whose placement was shown

    def join(self, *, snapshots: bool = True) -> Viewer:
        """A new viewer, whose first event is a snapshot; without `snapshots`, it gets the other events, for
        viewers at another worker. `leave` ends it. Raises Overloaded if there are too many."""
        if len(self.viewers) >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} clients watch already: close one of them", retry_after_s=10)
        viewer = Viewer(snapshots=snapshots)
        if snapshots:
            viewer.give(_event("snapshot", self.snapshot()))
        self.viewers.add(viewer)
        if len(self.viewers) == 1:
            self._tasks.start("live", self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The viewer's client has left."""
        self.viewers.discard(viewer)
        if not self.viewers:
            self._tasks.cancel("live")
            self._followed.clear()

    def end(self) -> None:
        """Ends all viewers. Their clients may come again, if they still have the key."""
        for viewer in self.viewers:
            viewer.end()

    def placed(self, record: RequestRecord, _placement: Placement) -> None:
        """A request was placed; again for each further attempt."""
        if self.viewers and self._may_show(record):
            self._followed.add(record.request_id)
            self._publish("placed", self._request(record, explain=True))

    def finished(self, record: RequestRecord) -> None:
        """A request has ended."""
        if self.viewers and self._may_show(record):
            explain = record.request_id not in self._followed
            self._followed.discard(record.request_id)
            self._publish("finished", self._request(record, explain=explain))

    def snapshot(self) -> Snapshot:
        """Everything now."""
        fleet, by_engine = self._fleet, self._metrics.reuse(self._serves_now)
        return Snapshot(
            at=time.time(),
            reuse_on=self._reuse,
            requests=self._metrics.ended,
            unshown=self._unshown,
            waiting=dict(+waiting_of(fleet, self._metrics.others)),
            unserved=fleet.unserved(),
            reuse=self._metrics.total_reuse(),
            engines=[
                self._engine(each, by_engine.get(each.id, ReuseCounts())) for each in fleet.engines.values()
            ],
        )

    def _serves_now(self, model: str, engine_id: str) -> bool:
        """False if the engine serves another model now: its reuse is not shown beside the new one."""
        engine = self._fleet.engines.get(engine_id)
        pool = self._fleet.pool_of(engine) if engine is not None else None
        return engine is None or pool is None or model in (pool.model, *engine.loras)

    async def _run(self) -> None:
        while not self._draining.is_set():
            await within(TICK_S, self._draining.wait())
            if viewers := [viewer for viewer in self.viewers if viewer.snapshots]:
                event = _event("snapshot", self.snapshot())
                for viewer in viewers:
                    viewer.give(event)
            self._shown = self._unshown = 0
        self.end()

    def _may_show(self, record: RequestRecord) -> bool:
        if record.request_id in self._followed:
            return True
        if self._shown >= SHOWN_PER_S:
            self._unshown += 1
            return False
        self._shown += 1
        return True

    def _publish(self, name: str, content: msgspec.Struct) -> None:
        event = _event(name, content)
        for viewer in self.viewers:
            viewer.give(event)

    def _request(self, record: RequestRecord, *, explain: bool) -> RequestNow:
        placement, model = record.placement, record.lora or record.served_as
        of_others = {"model": model, "error": None, "note": "", "prompt_cache_key": None, "session": None}
        return RequestNow(
            **{**facts_of(record), **of_others},
            available_tokens=available_tokens(placement) if placement and record.prompt is not None else None,
            reason=reason_of(placement) if placement is not None else None,
            why=why(placement, is_reusing=self._reuse) if placement is not None and explain else None,
        )

    def _engine(self, engine: Engine, reuse: ReuseCounts) -> EngineNow:
        pool, info = self._fleet.pool_of(engine), engine.info
        size = (info.tokens_per_block if info is not None else None) or 0
        rooms = {Tier.GPU: info.gpu_blocks, Tier.HOST: info.host_blocks} if info is not None and size else {}
        return describe_engine(
            engine,
            pool,
            EngineNow,
            audit=engine.audit.view(),
            forms=pool.prompts.forms.sources if pool is not None and pool.prompts is not None else {},
            held_tokens={
                tier.value: pool.index.held(engine.id, tier) * pool.tokens_per_block for tier in Tier
            }
            if pool is not None
            else {},
            capacity_tokens={
                tier.value: blocks * size for tier, blocks in rooms.items() if blocks is not None
            },
            reuse=reuse,
        )


def _event(name: str, content: msgspec.Struct) -> bytes:
    """One server-sent event: https://html.spec.whatwg.org/multipage/server-sent-events.html."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _ENCODER.encode(content))
