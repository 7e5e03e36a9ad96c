"""The subscriber against a real publisher, and against a scripted one that misbehaves."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections import deque
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from engine_adapter.errors import EngineUnavailable
from engine_adapter.events import subscriber as subscriber_module
from engine_adapter.events.fields import read_vllm_keys
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber, SubscriberCounts
from engine_adapter.events.wire import CacheSnapshot, encode_batch
from engine_adapter.types import (
    Attention,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvGroup,
    Tier,
    ViewCurrent,
    ViewLost,
    ViewResumed,
    token_array,
)

WAIT_S = 10.0
END = 2**64 - 1


def removed(name: int) -> BlocksRemoved:
    return BlocksRemoved(Tier.GPU, (name,))


def payload(name: int) -> bytes:
    return encode_batch([removed(name)], timestamp=0.0)


class ScriptedEngine:
    """A PUB and a ROUTER that send what the test says, when it says so."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # each subscription is told, also one like another
        self.router = self.context.socket(zmq.ROUTER)
        self.ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (self.pub, self.router)]
        self.history: deque[tuple[int, bytes]] = deque()
        self.topic_in_replay = True
        self.asked: list[int] = []
        self.odd: list[bytes] = []  # sent before the next answer
        self.drops: list[set[int]] = []  # numbers each of the next answers leaves out
        self.answer()

    @property
    def endpoints(self) -> EventEndpoints:
        return EventEndpoints(*(f"tcp://127.0.0.1:{port}" for port in self.ports))

    async def subscribed(self) -> None:
        """Waits for a subscription that was not waited for yet; the end of one is none."""
        async with asyncio.timeout(WAIT_S):
            while not (await self.pub.recv()).startswith(b"\1"):
                pass

    def record(self, *names: int) -> None:
        """Puts batches into the replay history without publishing them."""
        for name in names:
            self.history.append((name, payload(name)))

    async def publish(self, sequence: int, data: bytes | None = None) -> None:
        await self.pub.send_multipart((b"kv", sequence.to_bytes(8, "big"), data or payload(sequence)))

    async def _serve(self) -> None:
        while True:
            identity, _, start = await self.router.recv_multipart()
            self.asked += struct.unpack(">Q", start)
            head = (identity, b"", b"kv") if self.topic_in_replay else (identity, b"")
            dropped = self.drops.pop(0) if self.drops else set()
            while self.odd:
                await self.router.send_multipart((identity, self.odd.pop()))
            for sequence, data in [*self.history, (END, b"")]:
                if sequence >= self.asked[-1] and sequence not in dropped:
                    await self.router.send_multipart((*head, sequence.to_bytes(8, "big"), data))

    def answer(self) -> None:
        """Answers on the replay socket from now on."""
        self._task = asyncio.create_task(self._serve())

    async def fall_silent(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def aclose(self) -> None:
        await self.fall_silent()
        self.pub.close(linger=0)
        self.router.close(linger=0)
        self.context.term()


@pytest.fixture
async def engine():
    engine = ScriptedEngine()
    yield engine
    await engine.aclose()


class Reader:
    def __init__(self, subscriber: KvEventSubscriber) -> None:
        self.subscriber = subscriber
        self.events = subscriber.events()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.events.aclose()

    async def take(self, count: int):
        return [await asyncio.wait_for(anext(self.events), WAIT_S) for _ in range(count)]


def reader(engine: ScriptedEngine, **options) -> Reader:
    return Reader(KvEventSubscriber(engine.endpoints, **options))


@asynccontextmanager
async def following(engine: ScriptedEngine, **options):
    """A reader that has seen that nothing was published yet, and follows."""
    async with reader(engine, **{"idle_check_s": 60} | options) as view:
        assert await view.take(2) == [ViewLost("connected"), ViewCurrent(complete=True)]
        await engine.subscribed()
        yield view


async def test_a_late_joiner_gets_the_snapshot_and_what_came_after_it(engine):
    engine.record(0, 1, 2, 3)
    block = BlocksStored(Tier.GPU, None, (1,), token_array([1, 2]), 2)

    async def snapshot():
        return CacheSnapshot(1, (block,))

    async with reader(engine, snapshot=snapshot, idle_check_s=60) as view:
        assert await view.take(5) == [ViewLost("connected"), block, removed(2), removed(3), ViewCurrent()]


async def test_batches_that_came_twice_count_once(engine):
    async with following(engine) as view:
        engine.record(0, 1, 2)
        await engine.publish(0)
        await engine.publish(2)  # 1 is missing: replayed up to 2, and 3 was replayed before it came
        assert await view.take(3) == [removed(0), removed(1), removed(2)]
        await engine.publish(3)
        assert await view.take(1) == [removed(3)]
        assert view.subscriber.counts.gaps == 1


async def test_a_hole_the_buffer_cannot_fill_starts_over(engine):
    async with following(engine) as view:
        await engine.publish(0)
        await view.take(1)
        engine.record(5, 6)
        await engine.publish(6)
        lost, *rest = await view.take(4)
        assert lost == ViewLost("batch 0 left the replay buffer")
        assert rest == [removed(5), removed(6), ViewCurrent(complete=False)]


async def test_a_sequence_that_falls_starts_over(engine):
    engine.record(0, 1)
    async with reader(engine, idle_check_s=60) as view:
        assert await view.take(4) == [ViewLost("connected"), removed(0), removed(1), ViewCurrent()]
        await engine.subscribed()
        await engine.publish(2)
        assert await view.take(1) == [removed(2)]
        engine.history.clear()
        engine.record(0)
        await engine.publish(0)
        assert await view.take(3) == [ViewLost("sequence fell from 2 to 0"), removed(0), ViewCurrent()]


@pytest.mark.parametrize(
    ("history", "reason", "held"),
    [([(0, payload(77))], "restarted", [removed(77)]), ([], "no longer has batch 0", [])],
    ids=["the same numbers", "no history"],
)
async def test_another_process_is_noticed_by_an_idle_check(engine, history, reason, held):
    engine.record(0)
    async with reader(engine, idle_check_s=0.02) as view:
        await view.take(3)
        engine.history = deque(history)
        lost, *rest = await view.take(2 + len(held))
        assert reason in lost.reason
        assert rest == [*held, ViewCurrent()]


async def test_malformed_messages_are_counted_and_skipped(engine):
    async with following(engine) as view:
        await engine.pub.send(b"alone")
        await engine.pub.send_multipart((b"kv", b"short", payload(0)))
        await engine.publish(0, b"\xc1 no msgpack")
        await engine.publish(1)
        assert await view.take(1) == [removed(1)]
        assert view.subscriber.counts.malformed == 3


@pytest.mark.parametrize("with_topic", [True, False])
async def test_malformed_answers_are_counted_and_skipped(engine, with_topic):
    engine.topic_in_replay = with_topic
    engine.record(0)
    engine.history.append((1, b"\xc1 no msgpack"))
    engine.record(2)
    engine.odd = [b"alone"]
    async with reader(engine, idle_check_s=60) as view:
        assert await view.take(4) == [ViewLost("connected"), removed(0), removed(2), ViewCurrent()]
        assert view.subscriber.counts.malformed == 2


async def test_a_dropped_connection_is_unavailable(engine):
    async with following(engine) as view:
        engine.pub.close(linger=0)
        with pytest.raises(EngineUnavailable):
            await view.take(1)


async def test_a_silent_replay_socket_costs_completeness_and_nothing_else(engine):
    await engine.fall_silent()
    async with reader(engine, idle_check_s=0.02, replay_timeout_s=0.05) as view:
        assert await view.take(2) == [ViewLost("connected"), ViewCurrent(complete=False)]
        assert view.subscriber.replay_is_silent
        await engine.subscribed()
        await engine.publish(4)
        await engine.publish(5)
        assert await view.take(2) == [removed(4), removed(5)]
        await engine.publish(7)
        assert await view.take(2) == [ViewLost("batches 6 to 7 are lost"), ViewCurrent(complete=False)]
        assert (view.subscriber.counts.unanswered, view.subscriber.counts.gaps) == (2, 1)


async def test_a_replay_socket_that_falls_silent_starts_over(engine):
    """Whatever is lost from then on could not be noticed."""
    engine.record(0)
    async with reader(engine, idle_check_s=0.02) as view:
        assert await view.take(3) == [ViewLost("connected"), removed(0), ViewCurrent(complete=True)]
        await engine.fall_silent()
        view.subscriber.replay_timeout_s, view.subscriber.idle_timeout_s = 0.2, 0.05
        engine.record(1)  # never published
        lost = ViewLost("the replay socket no longer answers")
        assert await view.take(2) == [lost, ViewCurrent(complete=False)]
        await engine.subscribed()
        await engine.publish(2)  # this view had none to begin with, and goes on
        assert await view.take(1) == [removed(2)]


async def test_a_replay_socket_that_is_late_on_idle_checks_costs_nothing(engine, monkeypatch):
    """So is that of a busy engine."""
    monkeypatch.setattr(subscriber_module, "_LOOK_S", 0.02)
    engine.record(0)
    async with reader(engine, idle_check_s=0.02) as view:
        assert await view.take(3) == [ViewLost("connected"), removed(0), ViewCurrent(complete=True)]
        await engine.fall_silent()
        engine.record(1)  # never published
        taken = asyncio.create_task(view.take(1))
        while view.subscriber.counts.unanswered < 3 and not taken.done():  # noqa: ASYNC110 - the task's
            await asyncio.sleep(0.01)
        engine.answer()
        assert await taken == [removed(1)]
        assert not view.subscriber.replay_is_silent


async def test_events_do_not_wait_for_the_answer_to_an_idle_check(engine, monkeypatch):
    monkeypatch.setattr(subscriber_module, "_LOOK_S", 600.0)
    engine.record(0)
    async with reader(engine, idle_check_s=0.02) as view:
        await view.take(3)
        await engine.subscribed()
        await engine.fall_silent()
        taken = asyncio.create_task(view.take(1))
        await asyncio.wait_for(engine.router.recv_multipart(), WAIT_S)
        await engine.publish(1)
        assert await taken == [removed(1)]
        engine.answer()
        engine.record(1, 2)  # the last was never published
        assert await view.take(1) == [removed(2)]


@pytest.mark.parametrize("forgets", [False, True], ids=["late", "asked-anew"])
async def test_a_replay_socket_that_answers_again_is_found(engine, forgets):
    await engine.fall_silent()
    async with reader(engine, idle_check_s=0.01, replay_timeout_s=0.1) as view:
        assert await view.take(2) == [ViewLost("connected"), ViewCurrent(complete=False)]
        if forgets:
            await asyncio.wait_for(engine.router.recv_multipart(), WAIT_S)
        engine.record(0)
        engine.answer()
        found = [ViewLost("the replay socket answers again"), removed(0), ViewCurrent(complete=True)]
        assert await view.take(3) == found
        assert not view.subscriber.replay_is_silent


async def test_without_replay_a_hole_starts_over(engine):
    subscriber = KvEventSubscriber(EventEndpoints(engine.endpoints.events, None), idle_check_s=0.02)
    async with Reader(subscriber) as view:
        assert await view.take(2) == [ViewLost("connected"), ViewCurrent(complete=False)]
        await engine.subscribed()
        await engine.publish(4)
        assert await view.take(1) == [removed(4)]
        await engine.publish(6)
        assert await view.take(2) == [ViewLost("batches 5 to 6 are lost"), ViewCurrent(complete=False)]


async def test_without_replay_a_view_is_complete_from_the_first_batch_of_all(engine):
    async with Reader(KvEventSubscriber(EventEndpoints(engine.endpoints.events, None))) as view:
        assert await view.take(2) == [ViewLost("connected"), ViewCurrent(complete=False)]
        await engine.subscribed()
        await engine.publish(0)
        assert await view.take(2) == [removed(0), ViewCurrent(complete=True)]


async def test_a_late_joiner_whom_replay_cannot_tell_all_is_not_complete_until_a_clearing(engine):
    engine.record(3, 4)
    async with reader(engine, idle_check_s=60) as view:
        assert (await view.take(4))[1:] == [removed(3), removed(4), ViewCurrent(complete=False)]
        await engine.subscribed()
        await engine.publish(5, encode_batch([CacheCleared(), removed(5)], timestamp=0.0))
        await engine.publish(6)
        assert await view.take(3) == [CacheCleared(), removed(5), removed(6)]  # views conclude it themselves


async def position_after(engine, taken):
    """The position of a reader that took so many events, ViewLost included, and waits."""
    async with reader(engine, idle_check_s=60) as view:
        await view.take(taken)
        await engine.subscribed()
        waits = asyncio.ensure_future(anext(view.events))
        await asyncio.sleep(0)
        position = view.subscriber.position
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
    return position


def stored(group: int, name: int, kind: str, **fields: object) -> dict[str, object]:
    """An event of a KV cache group on the wire, with one block."""
    event = {"type": "BlockStored", "block_hashes": [name], "token_ids": [1, 2], "block_size": 2}
    return event | {"group_idx": group, "kv_cache_spec_kind": kind} | fields


def batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


class TestGoingOn:
    async def test_only_what_came_since_is_read(self, engine):
        engine.record(0, 1, 2)
        position = await position_after(engine, 5)
        assert (position.sequence, position.complete) == (2, True)
        engine.record(3)
        async with reader(engine, idle_check_s=60, since=position) as view:
            assert await view.take(3) == [ViewResumed(), removed(3), ViewCurrent()]
            await engine.subscribed()
            await engine.publish(4)
            assert await view.take(1) == [removed(4)]
            # What the caller has not taken does not count.
            assert view.subscriber.position.sequence == 3

    async def test_there_is_no_position_before_the_view_is_current(self, engine):
        engine.record(0, 1)
        async with reader(engine, idle_check_s=60) as view:
            assert view.subscriber.position is None
            await view.take(3)
            assert view.subscriber.position is None

    async def test_another_process_shows(self, engine):
        engine.record(0, 1)
        position = await position_after(engine, 4)
        engine.history[1] = (1, payload(7))
        async with reader(engine, idle_check_s=60, since=position) as view:
            lost = ViewLost("batch 1 has changed: the engine restarted")
            assert await view.take(4) == [lost, removed(0), removed(7), ViewCurrent()]

    async def test_a_batch_that_left_the_buffer_proves_nothing(self, engine):
        engine.record(0, 1)
        position = await position_after(engine, 4)
        engine.history.clear()
        engine.record(5)
        async with reader(engine, idle_check_s=60, since=position) as view:
            lost = ViewLost("batch 1 left the replay buffer")
            assert await view.take(3) == [lost, removed(5), ViewCurrent(complete=False)]

    async def test_without_replay_nothing_is_proven(self, engine):
        engine.record(0)
        position = await position_after(engine, 3)
        endpoints = EventEndpoints(engine.endpoints.events, None)
        async with Reader(KvEventSubscriber(endpoints, since=position)) as view:
            lost = ViewLost("nothing shows that the process is still the same")
            assert await view.take(2) == [lost, ViewCurrent(complete=False)]

    async def test_with_several_groups_it_begins_again(self, engine):
        """What the further groups hold is not kept."""
        window = stored(0, 0, "sliding_window", kv_cache_spec_sliding_window=4)
        engine.history += [(0, batch(window)), (1, batch(stored(1, 1, "full_attention")))]
        assert await position_after(engine, 4) is None

    async def test_the_main_group_is_still_known(self, engine):
        engine.history += [(0, batch(stored(1, 1, "full_attention")))]
        position = await position_after(engine, 3)
        engine.history += [(1, batch({"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1}))]
        async with reader(engine, idle_check_s=60, since=position) as view:
            assert await view.take(3) == [ViewResumed(), removed(1), ViewCurrent(complete=True)]


@pytest.mark.parametrize("kind", ["sliding_window", "a kind of the future"])
async def test_a_group_of_unknown_need_is_never_complete(engine, kind):
    """A window without its size, or another kind."""
    full, main = BlocksStored(Tier.GPU, None, (0,), token_array([1, 2]), 2), stored(0, 0, "full_attention")
    other = BlocksStored(Tier.GPU, None, (1,), token_array([]), 2, group=KvGroup(1, Attention.UNKNOWN))
    async with reader(engine, read_keys=read_vllm_keys, idle_check_s=60) as view:
        await view.take(2)
        await engine.subscribed()
        await engine.publish(0, batch(main))
        await engine.publish(1, batch(stored(1, 1, kind), main))
        assert await view.take(4) == [full, other, full, ViewCurrent(complete=False)]
        await engine.publish(2, batch({"type": "AllBlocksCleared"}))
        await engine.publish(3, batch(main))
        assert await view.take(3) == [CacheCleared(), ViewCurrent(complete=False), full]
        assert view.subscriber.counts == SubscriberCounts(batches=4, events=5)


async def test_topics_that_only_begin_the_same_are_others(engine):
    endpoints = EventEndpoints(engine.endpoints.events, engine.endpoints.replay, topic="kv")
    async with Reader(KvEventSubscriber(endpoints, idle_check_s=60)) as view:
        await view.take(2)
        await engine.subscribed()
        await engine.pub.send_multipart((b"kv2", bytes(8), payload(77)))
        await engine.publish(0)
        assert await view.take(1) == [removed(0)]


async def test_an_answer_with_holes_is_asked_for_again(engine):
    """A ROUTER drops what its peer is too slow for, the end mark too."""
    async with following(engine, replay_timeout_s=0.05) as view:
        counts = view.subscriber.counts
        await engine.publish(0)
        await view.take(1)
        engine.record(0, 1, 2, 3, 4)
        engine.drops = [{2, 4, END}, {3, END}, set()]
        await engine.publish(4)
        assert await view.take(4) == [removed(1), removed(2), removed(3), removed(4)]
        assert engine.asked == [0, 0, 1, 2]
        assert (counts.gaps, counts.replays) == (1, 1)


async def test_a_hole_that_no_answer_fills_starts_over(engine):
    async with following(engine) as view:
        await engine.publish(0)
        await view.take(1)
        engine.record(0, 1, 3)
        await engine.publish(3)
        assert await view.take(2) == [removed(1), ViewLost("batches 2 to 3 are lost")]


async def test_whoever_leaves_in_a_replay_leaves_no_generator_behind(engine):
    engine.record(0, 1, 2)
    left = []
    before = sys.get_asyncgen_hooks()
    events = KvEventSubscriber(engine.endpoints).events()
    sys.set_asyncgen_hooks(before.firstiter, lambda generator: left.append(generator.__qualname__))
    try:
        while not isinstance(await anext(events), BlocksRemoved):
            pass
        await events.aclose()
    finally:
        sys.set_asyncgen_hooks(*before)
    assert left == []
