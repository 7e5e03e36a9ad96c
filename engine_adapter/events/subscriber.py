"""Follows an engine's KV events over ZMQ without missing one, or says that it did.

    start    subscribe → snapshot, where there is one → replay what came after it → ViewCurrent
    follow   the next number: yield · a hole: replay from the last one known · a number that falls: start over
    idle     ask the replay socket what follows the last one known, so that a lost last batch is noticed;
             where it answered before and no longer does, what is lost could not be noticed: start over

A replay begins at the last batch known, and that batch has to come back unchanged: that is how another
process behind the same address is told from this one. A view is complete when nothing can have been held
before it began: after a snapshot, or when the first batch of all was seen.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import xxhash

from engine_adapter.events.keys import KeyReader, MalformedEvents
from engine_adapter.events.wire import EventReader, Snapshot
from engine_adapter.events.zmq_inbox import Inbox, ReplayClient, replay_client, subscription
from engine_adapter.types import CacheCleared, KvEvent, ViewCurrent, ViewLost

_END_OF_REPLAY = 2**64 - 1
_SEQUENCE_BYTES = 8
# A replay socket that was silent is asked anew at every so many idle checks, and so long waited for.
_LOOK_EVERY, _LOOK_S = 10, 0.25


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """ZMQ addresses of one engine's events; without `replay` a lost batch means starting over. A `topic` is
    the whole of it: others that begin the same are not followed."""

    events: str
    replay: str | None
    topic: str = ""


@dataclass(slots=True)
class SubscriberCounts:
    """Since the start: batches and events taken in, messages and events that could not be read and were
    skipped, holes in the numbers, times the replay socket was asked to fill one, and times it did not
    answer at all."""

    batches: int = 0
    events: int = 0
    malformed: int = 0
    gaps: int = 0
    replays: int = 0
    unanswered: int = 0


class _StartOverError(Exception):
    """The view cannot be carried on; the text says why."""


@dataclass(slots=True)
class _Cursor:
    """How far one view has been followed.

    Attributes:
        reader: reads its batches.
        last: number of the last batch taken in, -1 before the first, None while any may be the first.
        digest: hash of that batch's bytes, None where they were never seen (a snapshot stood for them).
        last_live: number of the last batch that came by subscription rather than replay.
        complete: nothing can have been held before the view began.
        silent: the replay socket did not answer.
        idle_checks: since then.
        told: what the view takes itself for; None before its start is over.
    """

    reader: EventReader
    last: int | None = None
    digest: int | None = None
    last_live: int | None = None
    complete: bool = False
    silent: bool = False
    idle_checks: int = 0
    told: bool | None = None

    @property
    def is_complete(self) -> bool:
        # Groups that are not followed may hold less than the one that is, and nothing tells.
        return self.complete and not self.reader.groups.several

    def tell(self) -> ViewCurrent:
        self.told = self.is_complete
        return ViewCurrent(complete=self.told)

    def clear(self) -> None:
        """The engine holds nothing; views conclude from it that they are complete."""
        self.complete = True
        self.told = self.told if self.told is None else True


class KvEventSubscriber:
    """One engine's event stream as `EngineAdapter.events` promises it.

    Attributes:
        counts: what it met.
        replay_is_silent: the replay socket, asked when the view began or had a hole, does not answer.
    """

    def __init__(
        self,
        endpoints: EventEndpoints,
        *,
        snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
        read_keys: KeyReader | None = None,
        idle_check_s: float = 0.5,
        replay_timeout_s: float = 5.0,
        idle_timeout_s: float = 3.0,
    ) -> None:
        """Follows nothing yet.

        Args:
            endpoints: where.
            snapshot: asks the engine what it holds, where it can tell.
            read_keys: how it writes what stands beside the tokens; the embedded engine's way if None.
            idle_check_s: after so long without a message the replay socket is asked for what was missed.
            replay_timeout_s: how long an answer may pause before it counts as over.
            idle_timeout_s: the same for one that is asked for while nothing else comes.
        """
        self._endpoints = endpoints
        self._snapshot = snapshot
        self._read_keys = read_keys
        self._idle_check_s = idle_check_s
        self._replay_timeout_s = replay_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self.counts = SubscriberCounts()
        self.replay_is_silent = False

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """See `EngineAdapter.events`. Raises EngineUnavailable when the engine goes away."""
        reason = "connected"
        with subscription(self._endpoints.events, self._endpoints.topic) as inbox:
            while True:
                yield ViewLost(reason)
                try:
                    async with aclosing(self._follow(inbox)) as events:
                        async for event in events:
                            yield event
                except _StartOverError as lost:
                    inbox.check()  # another process behind the address may be why
                    reason = str(lost)

    async def _follow(self, inbox: Inbox) -> AsyncGenerator[KvEvent, None]:
        """One view from its start until it breaks."""
        cursor = _Cursor(EventReader(self._read_keys))
        with replay_client(self._endpoints.replay) as replay:
            if self._snapshot is not None:
                held = await self._snapshot()
                cursor.last, cursor.complete = held.sequence, True
                for event in held.events:
                    yield event
            async with aclosing(self._catch_up(replay, cursor)) as events:
                async for event in events:
                    yield event
            yield cursor.tell()
            while True:
                frames = await inbox.receive(self._idle_check_s)
                if frames is None:
                    async with aclosing(self._check(replay, cursor)) as events:
                        async for event in events:
                            yield event
                    continue
                message = self._numbered(frames)
                if message is not None:
                    async with aclosing(self._go_on(replay, cursor, *message)) as events:
                        async for event in events:
                            yield event

    async def _go_on(
        self, replay: ReplayClient | None, cursor: _Cursor, sequence: int, payload: bytes
    ) -> AsyncGenerator[KvEvent, None]:
        """The events of a batch that was published, and of those missing before it; none if it was replayed
        before it came."""
        if cursor.last_live is not None and sequence <= cursor.last_live:
            raise _StartOverError(f"sequence fell from {cursor.last_live} to {sequence}")
        cursor.last_live = sequence
        if cursor.last is None or sequence == cursor.last + 1:
            for event in self._take(cursor, sequence, payload):
                yield event
        elif sequence > cursor.last:
            self.counts.gaps += 1
            self.counts.replays += replay is not None
            first = cursor.last + 1
            async with aclosing(self._catch_up(replay, cursor, until=sequence)) as events:
                async for event in events:
                    yield event
            if cursor.last < sequence:
                raise _StartOverError(f"batches {first} to {sequence} are lost")

    async def _check(self, replay: ReplayClient | None, cursor: _Cursor) -> AsyncGenerator[KvEvent, None]:
        """What was published and did not come."""
        if replay is None:
            return
        if cursor.silent:
            await self._look_for_replay(replay, cursor)
            return
        async with aclosing(self._catch_up(replay, cursor, patience_s=self._idle_timeout_s)) as events:
            async for event in events:
                yield event
        if cursor.silent:
            raise _StartOverError("the replay socket no longer answers")

    async def _look_for_replay(self, replay: ReplayClient, cursor: _Cursor) -> None:
        """A view that began without its replay socket starts over once that answers: late, or asked anew,
        which is seldom done and not waited for long, as events wait meanwhile."""
        answers = await replay.receive(0) is not None
        cursor.idle_checks += 1
        if not answers and cursor.idle_checks % _LOOK_EVERY == 0:
            with replay_client(self._endpoints.replay) as another:
                if another is not None:
                    await another.ask(_END_OF_REPLAY)
                    answers = await another.receive(_LOOK_S) is not None
        if answers:
            raise _StartOverError("the replay socket answers again")

    async def _catch_up(
        self,
        replay: ReplayClient | None,
        cursor: _Cursor,
        *,
        until: int = -1,
        patience_s: float | None = None,
    ) -> AsyncGenerator[KvEvent, None]:
        """What the engine published after `cursor.last`, by replay, as far as it has it; `until` is known to
        exist. A ROUTER drops what its peer is too slow for, so an answer with holes is asked for again."""
        if replay is None or cursor.silent:
            return
        while True:
            before, answer = cursor.last, _Answer(until, patience_s or self._replay_timeout_s)
            async with aclosing(self._replayed(replay, cursor, answer)) as events:
                async for event in events:
                    yield event
            if cursor.last is None or cursor.last >= answer.until:
                return
            if cursor.last == before:
                raise _StartOverError(f"batches {cursor.last + 1} to {answer.until} are lost")
            until = answer.until

    async def _replayed(
        self, replay: ReplayClient, cursor: _Cursor, answer: _Answer
    ) -> AsyncGenerator[KvEvent, None]:
        """The events of one answer, up to its first hole."""
        known = cursor.last if cursor.last is not None and cursor.last >= 0 else None
        await replay.ask(known or 0)
        while True:
            frames = await replay.receive(answer.patience_s)
            if frames is None:
                self._note_silence(cursor, answer)
                return
            message = self._numbered(frames, replayed=True)
            if message is None:
                continue
            sequence, payload = message
            if sequence == _END_OF_REPLAY:
                break
            answer.until = max(answer.until, sequence)
            answer.batches += 1
            if known is not None and answer.batches == 1:
                _check_same(cursor, sequence, payload)
            elif cursor.last is None or sequence == cursor.last + 1:
                for event in self._take(cursor, sequence, payload):
                    yield event
        self.replay_is_silent = False
        if known is not None and not answer.batches:
            raise _StartOverError(f"the engine no longer has batch {known}")
        if cursor.last is None:  # it published nothing yet
            cursor.last, cursor.complete = -1, True

    def _note_silence(self, cursor: _Cursor, answer: _Answer) -> None:
        """An answer stopped coming: after some of it the end mark was dropped, else nobody answers."""
        if not answer.batches:
            cursor.silent = self.replay_is_silent = True
            self.counts.unanswered += 1

    def _take(self, cursor: _Cursor, sequence: int, payload: bytes) -> Iterator[KvEvent]:
        """Moves the cursor to this batch; its events."""
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
        if cursor.told not in (None, cursor.is_complete):
            yield cursor.tell()

    def _numbered(self, frames: list[bytes], *, replayed: bool = False) -> tuple[int, bytes] | None:
        """Sequence number and payload, the last two frames of any message; None for one without, which is
        counted, and for one of another topic."""
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:  # noqa: PLR2004 - sequence, payload
            self.counts.malformed += 1
            return None
        topic = self._endpoints.topic
        if topic and not replayed and frames[0] != topic.encode():
            return None
        return int.from_bytes(frames[-2], "big"), frames[-1]


@dataclass(slots=True)
class _Answer:
    """One answer of the replay socket: the highest number known to exist, how long it may pause, and the
    batches that came."""

    until: int
    patience_s: float
    batches: int = 0


def _check_same(cursor: _Cursor, sequence: int, payload: bytes) -> None:
    """The first replayed batch is the last one known, or the process is another."""
    if sequence != cursor.last:
        raise _StartOverError(f"batch {cursor.last} left the replay buffer")
    digest = _digest(payload)
    if cursor.digest not in (None, digest):
        raise _StartOverError(f"batch {sequence} is another than before: the engine restarted")
    cursor.digest = digest


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)
