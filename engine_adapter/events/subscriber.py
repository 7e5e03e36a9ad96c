"""Follows an engine's KV events over ZMQ. It misses none, or reports that the view is lost.

    start    subscribe → snapshot, if the engine has one → replay what came after it → ViewCurrent
    resume   subscribe → replay what came after a given position → ViewCurrent
    follow   next number: yield · gap: replay from the last known batch · number falls: start over
    idle     ask the replay socket for newer batches, to notice if the last ones were lost;
             if it answered before and is silent for long, losses would go unnoticed: start over

A replay begins with the last known batch, which must come back unchanged. If it differs, another process
answers at this address. A view is complete if the engine held nothing before it began, or a snapshot said
what it held.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field

import xxhash

from engine_adapter.events.fields import KeyReader, MalformedEvents
from engine_adapter.events.wire import CacheSnapshot, EventReader
from engine_adapter.events.zmq_inbox import Inbox, ReplayClient, replay_client, subscription
from engine_adapter.types import CacheCleared, EventPosition, KvEvent, ViewCurrent, ViewLost, ViewResumed

_digest = xxhash.xxh3_64_intdigest
_END_OF_REPLAY = 2**64 - 1
_SEQUENCE_BYTES = 8
# Seconds that an idle check waits for an answer. A replay socket that counts as silent
# is tried again after this many idle checks.
_LOOK_S, _LOOK_EVERY = 0.25, 10


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """ZMQ addresses of one engine's events. Without `replay`, a lost batch means starting over. Only messages
    with exactly this `topic` are read."""

    events: str
    replay: str | None
    topic: str = ""


@dataclass(slots=True)
class SubscriberCounts:
    """Counts since the start. `malformed`: unreadable messages and events, which were skipped. `replays`:
    those requested to fill a gap; `unanswered`: replays without an answer."""

    batches: int = 0
    events: int = 0
    malformed: int = 0
    gaps: int = 0
    replays: int = 0
    unanswered: int = 0


class _StartOverError(Exception):
    """The view is lost; the text says why."""


@dataclass(slots=True)
class _Cursor:
    """The position up to which one view has been followed.

    Attributes:
        reader: reads its batches.
        last: number of the last batch read, -1 before the first, None while any may be the first.
        digest: hash of that batch's bytes, None if a snapshot replaced it.
        last_live: number of the last batch that came by subscription, not by replay.
        complete: the engine held nothing unknown when the view began.
        silent: the replay socket does not answer.
        asked_at: when an idle check first got no answer, in seconds; None if the last one did.
        idle_checks: idle checks while the replay socket was silent.
        reported: the completeness last reported; None until the view has started.
        taken: number and digest of the last batch whose events were all taken.
        is_unproven: the position it goes on from may be another process's.
        until: the highest number that the running replay is known to have, -1 for none.
    """

    reader: EventReader
    last: int | None = None
    digest: int | None = None
    last_live: int | None = None
    complete: bool = False
    silent: bool = False
    asked_at: float | None = None
    idle_checks: int = 0
    reported: bool | None = None
    taken: tuple[int, int] | None = None
    is_unproven: bool = False
    until: int = -1

    @classmethod
    def at(cls, reader: EventReader, since: EventPosition) -> _Cursor:
        """A cursor that goes on from a position."""
        reader.groups.main = since.group
        return cls(
            reader,
            since.sequence,
            since.digest,
            complete=since.complete,
            taken=(since.sequence, since.digest),
            is_unproven=True,
        )

    @property
    def position(self) -> EventPosition | None:
        """The place from which another reader can go on; None while the view is not current. None for models
        with several groups, too: what the further ones hold is not kept."""
        groups = self.reader.groups
        if self.taken is None or self.reported is None or groups.others:
            return None
        return EventPosition(*self.taken, self.complete, groups.main)

    @property
    def is_complete(self) -> bool:
        # A group of an unknown kind may hold less than a prompt needs, and no event says so.
        return self.complete and self.reader.groups.are_known

    def report(self) -> ViewCurrent:
        self.reported = self.is_complete
        return ViewCurrent(complete=self.reported)

    def clear(self) -> None:
        """The engine holds nothing now, so the view is complete."""
        self.complete = True
        self.reported = self.reported if self.reported is None else True


@dataclass(eq=False)
class KvEventSubscriber:
    """One engine's event stream, as `EngineAdapter.events` describes it. Connects when `events` is iterated.

    Attributes:
        snapshot: asks the engine what it holds, where it can tell.
        read_keys: reads the keys beside the tokens, by default the embedded engine's.
        idle_check_s: after this time without a message, the replay socket is asked for missed batches.
        replay_timeout_s: its answer is over after this pause, on an idle check sooner.
        idle_timeout_s: the socket counts as silent once idle checks got no answer for this time.
        since: the view goes on here if the engine has the batches since then.
        between: called before each message is read, and on each idle check: its events come first, and what
            it raises ends the stream.
    """

    endpoints: EventEndpoints
    _: KW_ONLY
    snapshot: Callable[[], Awaitable[CacheSnapshot]] | None = None
    read_keys: KeyReader | None = None
    idle_check_s: float = 0.5
    replay_timeout_s: float = 5.0
    idle_timeout_s: float = 30.0
    since: EventPosition | None = None
    between: Callable[[], Iterable[KvEvent]] = tuple
    counts: SubscriberCounts = field(default_factory=SubscriberCounts, init=False)
    replay_is_silent: bool = field(default=False, init=False)
    _cursor: _Cursor | None = field(default=None, init=False)

    @property
    def position(self) -> EventPosition | None:
        """The place from which a later subscriber can go on."""
        return self._cursor.position if self._cursor is not None else None

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """Yields as `EngineAdapter.events` does. Raises EngineUnavailable when the engine goes away."""
        reason = "connected"
        with subscription(self.endpoints.events, self.endpoints.topic) as inbox:
            while True:
                if self.since is None:
                    yield ViewLost(reason)
                try:
                    async with aclosing(self._follow(inbox)) as events:
                        async for event in events:
                            yield event
                except _StartOverError as lost:
                    inbox.check()  # a new process at this address may be the cause
                    reason = str(lost)

    async def _follow(self, inbox: Inbox) -> AsyncGenerator[KvEvent, None]:
        """One view, from its start until it is lost."""
        since, self.since = self.since, None
        reader = EventReader(self.read_keys)
        cursor = self._cursor = _Cursor(reader) if since is None else _Cursor.at(reader, since)
        with replay_client(self.endpoints.replay) as replay:
            async with aclosing(self._start(replay, cursor)) as events:
                async for event in events:
                    yield event
            while True:
                frames = await inbox.receive(self.idle_check_s)
                for event in self.between():
                    yield event
                if frames is None:
                    missed = self._look(inbox, replay, cursor)
                elif (message := self._live(cursor, frames)) is None:
                    continue
                elif cursor.last is None or message[0] == cursor.last + 1:
                    for event in self._take(cursor, *message):
                        yield event
                    continue
                else:
                    missed = self._missed(replay, cursor, message[0])
                async with aclosing(missed) as events:
                    async for event in events:
                        yield event

    async def _start(self, replay: ReplayClient | None, cursor: _Cursor) -> AsyncGenerator[KvEvent, None]:
        """Yields what the engine holds, as far as it can tell, up to the last batch that it replays."""
        if self.snapshot is not None and not cursor.is_unproven:
            held = await self.snapshot()
            cursor.last, cursor.complete = held.sequence, True
            for event in held.events:
                yield event
        async with aclosing(self._catch_up(replay, cursor, self.replay_timeout_s)) as events:
            async for event in events:
                yield event
        if cursor.is_unproven:
            raise _StartOverError("nothing shows that the process is still the same")
        yield cursor.report()

    def _live(self, cursor: _Cursor, frames: list[bytes]) -> tuple[int, bytes] | None:
        """Number and payload of a published batch; None if it is of another topic, or a replay brought it
        already."""
        message = self._numbered(frames)
        if message is None:
            return None
        sequence, _ = message
        if cursor.last_live is not None and sequence <= cursor.last_live:
            raise _StartOverError(f"sequence fell from {cursor.last_live} to {sequence}")
        cursor.last_live = sequence
        return message if cursor.last is None or sequence > cursor.last else None

    async def _look(
        self, inbox: Inbox, replay: ReplayClient | None, cursor: _Cursor
    ) -> AsyncGenerator[KvEvent, None]:
        """An idle check: the events that were published but did not arrive. A message that arrives meanwhile
        ends it, for its number says whether one is missing."""
        if replay is None:
            return
        if cursor.silent:
            await self._look_for_replay(inbox, replay, cursor)
            return
        cursor.until = -1
        async with aclosing(self._catch_up(replay, cursor, _LOOK_S, other=inbox)) as events:
            async for event in events:
                yield event
        if self.replay_is_silent:  # a busy engine may be late
            now = time.monotonic()
            cursor.asked_at = now if cursor.asked_at is None else cursor.asked_at
            if now - cursor.asked_at >= self.idle_timeout_s:
                raise _StartOverError("the replay socket no longer answers")
            cursor.silent = self.replay_is_silent = False
            replay.connect()

    async def _missed(
        self, replay: ReplayClient | None, cursor: _Cursor, sequence: int
    ) -> AsyncGenerator[KvEvent, None]:
        """The events that were published but did not arrive, of batch `sequence` and those before it."""
        self.counts.gaps += 1
        self.counts.replays += replay is not None
        first, cursor.until = (cursor.last or 0) + 1, sequence
        async with aclosing(self._catch_up(replay, cursor, self.replay_timeout_s)) as events:
            async for event in events:
                yield event
        if cursor.last is None or cursor.last < sequence:
            raise _StartOverError(f"batches {first} to {sequence} are lost")

    async def _look_for_replay(self, inbox: Inbox, replay: ReplayClient, cursor: _Cursor) -> None:
        """Starts the view over once a silent replay socket answers. It is asked again only now and then."""
        answers = await replay.inbox.receive(0) is not None
        cursor.idle_checks += 1
        if not answers and cursor.idle_checks % _LOOK_EVERY == 0:
            with replay_client(self.endpoints.replay) as another:
                if another is not None:
                    await another.ask(_END_OF_REPLAY)
                    answers = await another.inbox.receive(_LOOK_S, inbox) is not None
        if answers:
            raise _StartOverError("the replay socket answers again")

    async def _catch_up(
        self, replay: ReplayClient | None, cursor: _Cursor, patience_s: float, other: Inbox | None = None
    ) -> AsyncGenerator[KvEvent, None]:
        """Replays what the engine published after `cursor.last`, with pauses of at most `patience_s` seconds.
        A ROUTER drops messages for a slow peer, so an answer with gaps is requested again. A message in the
        `other` inbox ends the replay."""
        if replay is None or cursor.silent:
            return
        while True:
            before = cursor.last
            async with aclosing(self._replayed(replay, cursor, patience_s, other)) as events:
                async for event in events:
                    yield event
            if (other is not None and other.has_messages()) or cursor.last is None:
                return
            if cursor.last >= cursor.until:
                return
            if cursor.last == before:
                raise _StartOverError(f"batches {cursor.last + 1} to {cursor.until} are lost")

    async def _replayed(
        self, replay: ReplayClient, cursor: _Cursor, patience_s: float, other: Inbox | None
    ) -> AsyncGenerator[KvEvent, None]:
        """The events of one answer, up to its first gap."""
        known, batches = cursor.last if cursor.last is not None and cursor.last >= 0 else None, 0
        await replay.ask(known or 0)
        while (frames := await replay.inbox.receive(patience_s, other)) is not None:
            message = self._numbered(frames, replayed=True)
            if message is None:
                continue
            sequence, payload = message
            if sequence == _END_OF_REPLAY:
                break
            cursor.until, batches = max(cursor.until, sequence), batches + 1
            if known is not None and batches == 1:
                events = _check_same(cursor, sequence, payload)
            elif cursor.last is None or sequence == cursor.last + 1:
                events = self._take(cursor, sequence, payload)
            else:
                continue
            for event in events:
                yield event
        else:
            if batches or (other is not None and other.has_messages()):
                replay.connect()  # the rest was dropped or is late, or it was given no time
            else:
                cursor.silent = self.replay_is_silent = True
                self.counts.unanswered += 1
            return
        self.replay_is_silent, cursor.asked_at = False, None
        if known is not None and not batches:
            raise _StartOverError(f"the engine no longer has batch {known}")
        if cursor.last is None:  # it has published nothing yet
            cursor.last, cursor.complete = -1, True

    def _take(self, cursor: _Cursor, sequence: int, payload: bytes) -> Iterator[KvEvent]:
        """The events of this batch; moves the cursor to it."""
        reader, counts = cursor.reader, self.counts
        if cursor.last is None:
            cursor.complete = sequence == 0
        cursor.last, cursor.digest = sequence, _digest(payload)
        counts.batches += 1
        skipped = reader.skipped
        try:
            for event in reader.read(payload):
                counts.events += 1
                if isinstance(event, CacheCleared):
                    cursor.clear()
                yield event
        except MalformedEvents:
            counts.malformed += 1
        counts.malformed += reader.skipped - skipped
        cursor.taken = sequence, cursor.digest
        if cursor.reported not in (None, cursor.is_complete):
            yield cursor.report()

    def _numbered(self, frames: list[bytes], *, replayed: bool = False) -> tuple[int, bytes] | None:
        """Sequence number and payload, the last two frames of a message. None for another topic, and for a
        malformed message, which is counted."""
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:  # noqa: PLR2004 - sequence, payload
            self.counts.malformed += 1
            return None
        topic = self.endpoints.topic
        if topic and not replayed and frames[0] != topic.encode():
            return None
        return int.from_bytes(frames[-2], "big"), frames[-1]


def _check_same(cursor: _Cursor, sequence: int, payload: bytes) -> Iterator[KvEvent]:
    """Raises if the first replayed batch is not the last known one: then the process is another."""
    if sequence != cursor.last:
        raise _StartOverError(f"batch {cursor.last} left the replay buffer")
    digest = _digest(payload)
    if cursor.digest not in (None, digest):
        raise _StartOverError(f"batch {sequence} has changed: the engine restarted")
    cursor.digest = digest
    if cursor.is_unproven:
        cursor.is_unproven = False
        yield ViewResumed()
