import asyncio
from array import array

import msgspec
import pytest

from proxy.control.live import MAX_VIEWERS, MAX_WAITING_BYTES, SHOWN_PER_S, Live, Viewer
from proxy.core.placement.decision import Cost
from proxy.errors import Overloaded
from proxy.fleet.engine import EngineState
from proxy.fleet.fleet import Fleet
from proxy.observe.metrics import Metrics
from proxy.prompt import Prompt
from proxy.request.calls import Session
from proxy.request.records import RequestRecord
from proxy.runtime import Supervisor
from tests.fakes import add_ready
from tests.placements import placement_of

SECRET = "the words of the prompt"


def events(taken: bytes) -> list[tuple[str, dict]]:
    found = []
    for event in taken.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))))
    return found


def record(request_id="r", **fields):
    costs = Cost("a", cached_tokens=32), Cost("b", cached_tokens=16)
    given = {
        "placement": placement_of("a", 32, 40, costs, "lowest cost"),
        "prompt": Prompt(array("i", range(40))),
        "served_as": "m",
        "attempts": ["a"],
        "error": SECRET,
        "note": SECRET,
        "prompt_cache_key": SECRET,
        "session": Session("t", SECRET),
    }
    return RequestRecord(request_id, 1.5, "/v1/x", SECRET, "t", stream=True, **{**given, **fields})


@pytest.fixture
async def world():
    """A fleet of one engine, its metrics, and those who watch."""
    fleet, tasks, draining = Fleet(), Supervisor(), asyncio.Event()
    add_ready(fleet, "a", host_blocks=8)
    live = Live(fleet, Metrics(fleet), tasks, draining, reuse=True)
    yield live
    await tasks.stop()


async def test_the_first_event_is_a_snapshot_of_everything(world):
    world._metrics.observe(record(reported_tokens=16, status=200))
    ((name, now),) = events(await world.join().take())
    assert (name, now["requests"], now["reuse_on"], now["waiting"]) == ("snapshot", 1, True, {})
    assert now["unserved"] == []
    world._fleet.engine("a").state = EngineState.DRAINING
    assert world.snapshot().unserved == ["m"]
    world._fleet.engine("a").state = EngineState.READY
    (engine,) = now["engines"]
    told = {"id": "a", "model": "m", "state": "ready", "trust": "approximate", "forms": {}}
    assert engine.items() >= told.items()
    assert engine["capacity_tokens"] == {"gpu": 64 * 16, "host": 8 * 16}
    assert engine["held_tokens"] == {"gpu": 0, "host": 0, "disk": 0}
    assert now["reuse"] == engine["reuse"]
    assert now["reuse"] == {
        "prompt_tokens": 40,
        "available_tokens": 32,
        "selected_tokens": 32,
        "delivered_tokens": 16,
        "saved_s": 0.0,  # no rate is learned
    }


async def test_an_engine_that_came_back_with_another_model_has_reused_nothing_for_it(world):
    world._metrics.observe(record(reported_tokens=16, served_as="earlier"))
    now = world.snapshot()
    assert (now.engines[0].model, now.engines[0].reuse.prompt_tokens) == ("m", 0)
    assert now.reuse.delivered_tokens == 16


async def test_a_request_is_told_when_it_is_placed_and_when_it_has_ended_without_its_text(world):
    viewer, request = world.join(), record()
    await viewer.take()
    world.placed(request, request.placement)
    request.reported_tokens, request.status, request.first_byte_s = 32, 200, 0.25
    world.finished(request)
    taken = await viewer.take()
    assert SECRET.encode() not in taken
    (first, placed), (second, finished) = events(taken)
    assert (first, second) == ("placed", "finished")
    assert placed["why"].startswith("a holds 32 of 40 tokens")
    same = {"request_id": "r", "engine": "a", "n_tokens": 40, "available_tokens": 32, "predicted_tokens": 32}
    same["is_firm"] = True
    assert placed.items() >= {**same, "reported_tokens": None, "status": None, "reason": "held"}.items()
    assert finished.items() >= {**same, "reported_tokens": 32, "status": 200, "why": None}.items()
    assert finished["first_byte_s"] == 0.25
    world.finished(record("placed before anybody watched"))
    ((_, unseen),) = events(await viewer.take())
    assert unseen["why"].startswith("a holds")


async def test_of_many_requests_some_are_shown_whole_and_the_others_counted(world):
    viewer, requests = world.join(), [record(str(number)) for number in range(SHOWN_PER_S + 5)]
    await viewer.take()
    for request in requests:
        world.placed(request, request.placement)
    for request in requests:
        world.finished(request)
    shown = [(name, event["request_id"]) for name, event in events(await viewer.take())]
    ids = [str(number) for number in range(SHOWN_PER_S)]
    assert shown == [("placed", each) for each in ids] + [("finished", each) for each in ids]
    assert world.snapshot().unshown == 10  # five placements and five ends
    assert not world._followed


async def test_snapshots_come_while_somebody_watches(world, monkeypatch):
    monkeypatch.setattr("proxy.control.live.TICK_S", 0.01)
    one, other = world.join(), world.join()
    for viewer in (one, other, one, other):
        assert events(await viewer.take())[0][0] == "snapshot"
    world.leave(one)
    await other.take()
    world.leave(other)
    assert not world._tasks._tasks


async def test_a_slow_viewer_misses_events_and_is_told_how_many(world):
    viewer, quick = Viewer(), Viewer()
    event = b"event: x\ndata: %b\n\n" % (b'"%b"' % (b"x" * (MAX_WAITING_BYTES // 4)))
    for _ in range(5):
        viewer.give(event)
        quick.give(event)
        assert await quick.take() == event
    *got, (name, missed) = events(await viewer.take())
    assert (len(got), name, missed) == (3, "missed", {"events": 2})
    viewer.give(event)
    assert await viewer.take() == event  # told once
    viewer.give(b"x" * (MAX_WAITING_BYTES + 1))  # longer than the room, it still comes
    assert len(await viewer.take()) == MAX_WAITING_BYTES + 1


async def test_viewers_end_when_kvpin_stops(world):
    viewer = world.join()
    world._draining.set()
    async with asyncio.timeout(30):
        while await viewer.take():
            pass


async def test_there_are_only_so_many_viewers(world):
    viewers = [world.join() for _ in range(MAX_VIEWERS)]
    with pytest.raises(Overloaded, match="32 clients watch already"):
        world.join()
    world.leave(viewers[0])
    world.join()
