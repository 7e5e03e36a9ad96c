import asyncio
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_adapter.errors import EngineSpecError
from engine_adapter.llama_server import saved_files
from engine_adapter.llama_server.plan import SlotRates
from engine_adapter.llama_server.saved import (
    RETRY_S,
    Saved,
    SavedEvent,
    SavedPlace,
    SavedPrefixes,
    salt_digest,
)
from engine_adapter.llama_server.saved_files import GRACE_S, FileFault, StateFileError
from engine_adapter.types import Tier
from tests.state_files import no_handles, write_state

KEY, SIZE = "k1", 1000


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class World:
    """A registry over two directories, and what it told of itself."""

    def __init__(self, root: Path, host: int = 3, disk: int = 0, *, host_dir: Path | None = None) -> None:
        self.host, self.disk = host_dir or root / "host", root / "disk"
        self.host.mkdir(parents=True, exist_ok=True)
        self.clock = Clock()
        self.place = SavedPlace(self.host, host * SIZE, self.disk if disk else None, disk * SIZE)
        self.told: list[tuple[str, str, str]] = []
        self.open()

    def open(self) -> None:
        """What a restart of kvpin does."""
        self.registry = SavedPrefixes(self.place, clock=self.clock)
        self.told.clear()
        self.registry.subscribe(lambda event, saved: self.told.append((event, saved.name, saved.tier)), "e")

    def server_saves(self, tokens, size: int = SIZE, key: str = KEY) -> str:
        name = saved_files.new_name(key)
        write_state(self.host / name, tokens, size=size)
        return name

    async def save(self, first: int, *, count: int = 5, size: int = SIZE, key: str = KEY, salt=None) -> Saved:
        """A saved prefix of `count` tokens from `first` on; a second passes."""
        self.clock.now += 1
        name = self.server_saves(range(first, first + count), size, key)
        return await self.registry.add(name, key, salt, tokens_expected=count, bytes_expected=size)

    def stats(self, *names: str) -> list[int]:
        return [self.registry.stats()[name] for name in names]

    def check(self) -> None:
        """What the registry says is what lies there and what it told, and no more."""
        entries = list(self.registry._entries.values())
        told: dict[str, str] = {}
        for event, name, tier in self.told:
            told[name] = tier
            if event is SavedEvent.REMOVED:
                del told[name]
        assert told == {saved.name: saved.tier for saved in entries}
        for tier, directory in ((Tier.HOST, self.host), (Tier.DISK, self.disk)):
            wanted = {saved.name for saved in entries if saved.tier is tier}
            wanted |= {name.replace(".bin", ".json") for name in wanted}
            lies = {each.name for each in directory.glob("kvpin-*")}
            assert lies == wanted, tier
        for tier, numbers in self.registry.stats()["tiers"].items():
            assert numbers["bytes"] == sum(saved.size for saved in entries if saved.tier == tier)
            assert numbers["entries"] == sum(saved.tier == tier for saved in entries)


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    """Checked when the test is over."""
    world = World(tmp_path)
    yield world
    world.check()


@pytest.fixture
def tiers(tmp_path) -> Iterator[World]:
    world = World(tmp_path, host=2, disk=2)
    yield world
    world.check()


@contextmanager
def refused(reason: FileFault, why: str | None = None):
    with pytest.raises(StateFileError, match=why) as caught:
        yield
    assert caught.value.reason is reason


# --- The registry of a process -----------------------------------------------------------------------


def test_adapters_that_share_a_directory_share_the_registry(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    one = SavedPrefixes.shared(SavedPlace(tmp_path / "host", 10), "e")
    one.subscribe(print, "e")
    assert SavedPrefixes.shared(SavedPlace(tmp_path / "link" / "host", 10), "f") is one
    assert SavedPrefixes.shared(SavedPlace(tmp_path / "other", 10), "f") is not one
    for other in (
        SavedPlace(tmp_path / "host", 11),
        SavedPlace(tmp_path / "host", 10, tmp_path / "disk", 10),
    ):
        with pytest.raises(EngineSpecError, match="give them the same"):
            SavedPrefixes.shared(other, "f")
    one.unsubscribe(print)
    one.unsubscribe(print)  # again is fine
    assert SavedPrefixes.shared(SavedPlace(tmp_path / "host", 11), "f").place.host_bytes == 11


def test_the_only_engine_of_a_directory_may_get_other_bytes(tmp_path):
    places = [SavedPlace(tmp_path, 10), SavedPlace(tmp_path, 11)]
    old = SavedPrefixes.shared(places[0], "e")
    old.subscribe(print, "e")
    new = SavedPrefixes.shared(places[1], "e")
    assert [old.place, new.place] == places
    assert SavedPrefixes.shared(places[0], "e") is old  # the new settings are given up
    new.subscribe(print, "e")
    old.unsubscribe(print)
    with pytest.raises(EngineSpecError, match="give them the same"):
        SavedPrefixes.shared(places[0], "f")
    assert SavedPrefixes.shared(places[0], "e") is not old  # what it knows of the files is old


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (SavedPlace(Path("a"), 0), "above 0"),
        (SavedPlace(Path("a"), 1, Path("b"), 0), "above 0"),
        (SavedPlace(Path("a"), 1, Path("b/../a"), 1), "cannot be both"),
    ],
)
def test_a_place_that_cannot_be(place, why):
    with pytest.raises(EngineSpecError, match=why):
        SavedPrefixes.shared(place, "e")


# --- add ---------------------------------------------------------------------------------------------


async def test_a_longer_one_takes_the_place_and_the_uses_of_those_it_continues(world):
    short, same = await world.save(1, count=3), await world.save(50)
    salted = await world.save(1, count=3, salt=salt_digest("a"))
    await world.registry.ready(short)
    long = await world.save(1, count=9)
    assert set(world.registry.entries(KEY)) == {same, salted, long}
    assert long.uses == 1
    again = await world.save(1, count=9)
    assert set(world.registry.entries(KEY)) == {same, salted, again}
    assert world.stats("evicted", "refused") == [0, 0]


async def test_a_restore_of_one_that_was_just_replaced_is_one_of_its_heir(world):
    short, other = await world.save(1, count=3), await world.save(50)
    long = await world.save(1, count=9)
    assert world.registry.heir(short) is long
    assert world.registry.heir(other) is other
    await world.registry.drop(long)
    assert world.registry.heir(long) is long


@pytest.mark.parametrize("protected", ["pinned", "held"])
async def test_a_protected_one_stays_beside_what_continues_it(world, protected):
    short = await world.save(1, count=3)
    if protected == "pinned":
        short.pins["test"] = world.clock.now + 60
        long = await world.save(1, count=9)
        world.clock.now += 60
    else:
        async with world.registry.keeping(short):
            long = await world.save(1, count=9)
    assert set(world.registry.entries(KEY)) == {short, long}
    longer = await world.save(1, count=10)
    assert set(world.registry.entries(KEY)) == {longer}


async def test_the_room_of_what_is_continued_counts_for_what_continues_it(world):
    others = [await world.save(100 * i) for i in (1, 2)]
    await world.save(1, count=3)
    long = await world.save(1, count=9)
    assert set(world.registry.entries(KEY)) == {*others, long}


@pytest.mark.parametrize(
    ("expected", "fault", "why"),
    [
        ({"bytes_expected": SIZE + 1}, FileFault.DAMAGED, f"{SIZE} bytes, of {SIZE + 1}"),
        ({"tokens_expected": 6}, FileFault.DAMAGED, "5 tokens, of 6"),
        (None, FileFault.MISSING, "No such file"),
    ],
    ids=["bytes", "tokens", "gone"],
)
async def test_a_file_that_is_not_whole_is_refused_and_removed(world, expected, fault, why):
    name = world.server_saves(range(5))
    if expected is None:
        (world.host / name).unlink()
    with refused(fault, why):
        await world.registry.add(name, KEY, None, **expected or {})
    assert world.stats("refused") == [1]


@pytest.mark.parametrize("name", ["../x.bin", "x.bin", "kvpin-k2-" + "0" * 32 + ".bin"])
async def test_a_name_that_was_not_given_is_not_taken(world, name):
    with pytest.raises(ValueError, match="is no new name"):
        await world.registry.add(name, KEY, None)


async def test_a_save_that_is_cancelled_leaves_no_entry_without_a_file(tmp_path, monkeypatch):
    world, begun, over, write = (
        World(tmp_path),
        threading.Event(),
        threading.Event(),
        saved_files.write_sidecar,
    )

    def slow(path, saved):
        begun.set()
        over.wait()
        write(path, saved)

    monkeypatch.setattr(saved_files, "write_sidecar", slow)
    name = world.server_saves(range(5))
    adds = asyncio.create_task(world.registry.add(name, KEY, None))
    await asyncio.to_thread(begun.wait)
    adds.cancel()
    await asyncio.wait([adds])
    await world.registry.discard(name)
    over.set()
    await world.registry._tasks.settled()
    assert list(world.registry.entries(KEY)) == []


async def test_a_failed_save_is_discarded(world):
    name = world.server_saves(range(5))
    (world.host / "notes.txt").write_text("mine")
    await world.registry.discard("notes.txt")
    await world.registry.discard(name)
    assert {each.name for each in world.host.iterdir()} == {"notes.txt"}


# --- Room ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_s", [60.0, math.inf])
async def test_who_wants_it_kept_is_remembered_over_restarts_and_longer_prefixes(tmp_path, keep_s):
    world = World(tmp_path, host=4)
    name = world.server_saves(range(5))
    first = await world.registry.add(name, KEY, None, keep_s=keep_s, owner="them")
    until = world.clock.now + keep_s
    world.open()
    await world.registry.rebuild()
    (found,) = world.registry.entries(KEY)
    assert (first.kept_until, found.kept_until, found.kept_for) == (until, until, "them")
    assert await world.registry.ready(found) == name
    longer = await world.save(0, count=9)
    assert list(world.registry.entries(KEY)) == [longer]
    assert (longer.kept_until, longer.kept_for) == (until, "them")
    world.registry.keep(longer, 100.0, "others")
    assert (longer.kept_until, longer.kept_for) == (max(until, world.clock.now + 100), "others")


async def test_the_least_valuable_goes_when_there_is_no_room(world):
    first, second, third = [await world.save(100 * i) for i in (1, 2, 3)]
    await world.registry.ready(first)
    fourth = await world.save(400)
    assert set(world.registry.entries(KEY)) == {first, third, fourth}
    assert world.told[-2:] == [
        (SavedEvent.ADDED, fourth.name, Tier.HOST),
        (SavedEvent.REMOVED, second.name, Tier.HOST),
    ]
    assert world.stats("evicted") == [1]


async def test_a_file_is_worth_what_its_servers_pool_has_learned(world):
    rates = world.registry.rates[KEY] = SlotRates(
        returns=lambda idle_s: float(idle_s > 30.0), reuse_probability=0.1
    )
    first = await world.save(100)
    world.clock.now += 60
    second, third = [await world.save(100 * i) for i in (2, 3)]
    fourth = await world.save(400)
    assert set(world.registry.entries(KEY)) == {first, third, fourth}, "the longest idle one comes back"
    rates.returns = lambda idle_s: float(idle_s < 30.0)
    fifth = await world.save(500)
    assert set(world.registry.entries(KEY)) == {third, fourth, fifth}
    assert second.name not in {path.name for path in world.host.iterdir()}


async def test_a_file_that_no_room_can_be_made_for_is_refused(world):
    saved = await world.save(1)
    with refused(FileFault.NO_ROOM):
        await world.save(100, size=3 * SIZE + 1)
    saved.pins["test"] = world.clock.now + 60
    with refused(FileFault.NO_ROOM):
        await world.save(100, size=3 * SIZE)
    with refused(FileFault.NO_ROOM):  # nor is what it would continue lost
        await world.save(1, count=50, size=4 * SIZE)
    assert list(world.registry.entries(KEY)) == [saved]
    assert world.stats("refused", "evicted") == [3, 0]


async def test_room_is_made_before_a_save(world):
    _, second, third = [await world.save(100 * i) for i in (1, 2, 3)]
    third.pins["test"] = world.clock.now + 60
    assert not await world.registry.make_room(2 * SIZE + 1)
    assert len(list(world.registry.entries(KEY))) == 3
    assert await world.registry.make_room(SIZE)
    assert set(world.registry.entries(KEY)) == {second, third}
    assert await world.registry.make_room(SIZE)
    assert set(world.registry.entries(KEY)) == {second, third}


async def test_a_victim_moves_to_disk_and_comes_back_when_it_is_needed(tiers):
    first, second = await tiers.save(100), await tiers.save(200)
    data = (tiers.host / first.name).read_bytes()
    third = await tiers.save(300)
    assert [first.tier, second.tier, third.tier] == [Tier.DISK, Tier.HOST, Tier.HOST]
    assert (tiers.disk / first.name).read_bytes() == data
    tiers.check()

    assert await tiers.registry.ready(first) == first.name
    assert [first.tier, second.tier, third.tier] == [Tier.HOST, Tier.DISK, Tier.HOST]
    assert (tiers.host / first.name).read_bytes() == data
    assert tiers.stats("demoted", "promoted", "evicted") == [2, 1, 0]


async def test_the_disk_gives_up_what_is_worth_less_and_takes_nothing_that_is(tiers):
    first, second, third, fourth = [await tiers.save(100 * i) for i in (1, 2, 3, 4)]
    assert [first.tier, second.tier] == [Tier.DISK, Tier.DISK]
    await tiers.save(500)  # third is worth more than first
    assert set(tiers.registry.entries(KEY)) >= {second, third, fourth}
    assert first not in set(tiers.registry.entries(KEY))
    assert third.tier is Tier.DISK

    second.uses = third.uses = 9  # fourth is worth less than both
    await tiers.save(600)
    assert fourth not in set(tiers.registry.entries(KEY))
    assert [second.tier, third.tier] == [Tier.DISK, Tier.DISK]
    assert tiers.stats("evicted") == [2]


async def test_an_entry_of_the_disk_waits_there_when_the_host_tier_has_no_room(tiers):
    first, second, third = [await tiers.save(100 * i) for i in (1, 2, 3)]
    second.pins["test"] = third.pins["test"] = tiers.clock.now + 60
    with refused(FileFault.NO_ROOM):
        await tiers.registry.ready(first)
    assert first.tier is Tier.DISK
    assert tiers.stats("refused") == [1]
    tiers.check()
    tiers.clock.now += 60
    await tiers.registry.ready(first)
    assert first.tier is Tier.HOST


# --- ready, using, drop ----------------------------------------------------------------------------------


async def test_an_entry_is_verified_and_counted_before_a_restore(world):
    saved = await world.save(1)
    world.clock.now += 5
    assert await world.registry.ready(saved) == saved.name
    assert (saved.uses, saved.last_used) == (1, world.clock.now)
    os.utime(world.host / saved.name)  # touched: hashed again
    assert await world.registry.ready(saved) == saved.name
    assert saved.seen == saved_files.stamp(world.host / saved.name)
    assert saved.uses == 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flip, FileFault.DAMAGED),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), FileFault.DAMAGED),
        (lambda path: write_state(path, [9, 2, 3, 4, 5], size=SIZE), FileFault.DAMAGED),
        (saved_files.remove, FileFault.MISSING),
    ],
)
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_an_entry_that_is_not_what_it_was_is_dropped(tiers, harm, reason, tier):
    saved = await tiers.save(1)
    if tier is Tier.DISK:
        await tiers.save(100)
        await tiers.save(200)
    assert saved.tier is tier
    harm((tiers.host if tier is Tier.HOST else tiers.disk) / saved.name)
    with refused(reason):
        await tiers.registry.ready(saved)
    assert saved not in set(tiers.registry.entries(KEY))
    assert tiers.told[-1][:2] == (SavedEvent.REMOVED, saved.name)
    with refused(FileFault.MISSING):
        await tiers.registry.ready(saved)


async def test_what_another_kvpin_moved_to_disk_stays_there(tiers):
    """Two share both directories: one moves what the other is about to restore."""
    saved = await tiers.save(1)
    other = SavedPrefixes(tiers.place, clock=tiers.clock)
    await other.rebuild()
    (same,) = other.entries(KEY)
    for first in (100, 200):
        await tiers.save(first)
    assert saved.tier is Tier.DISK
    with refused(FileFault.MISSING):
        async with other.using(same):
            pytest.fail("it is not there")
    assert same not in set(other.entries(KEY))
    assert await tiers.registry.ready(saved) == saved.name


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
async def test_an_entry_that_cannot_be_read_now_is_kept_and_tried_again_later(tiers, tier):
    saved = await tiers.save(1)
    if tier is Tier.DISK:
        await tiers.save(100)
        await tiers.save(200)
    saved.seen = None  # as after a restart: its bytes are hashed
    with no_handles(), refused(FileFault.UNREADABLE):
        await tiers.registry.ready(saved)
    tiers.check()
    assert saved in set(tiers.registry.entries(KEY))
    assert saved not in set(tiers.registry.usable(KEY))
    tiers.clock.now += RETRY_S
    assert saved in set(tiers.registry.usable(KEY))
    assert await tiers.registry.ready(saved) == saved.name


async def test_an_entry_in_use_keeps_its_files_whatever_becomes_of_it(world):
    saved = await world.save(1)
    async with world.registry.using(saved) as name:
        async with world.registry.using(saved):
            await world.registry.drop(saved)
            await world.registry.drop(saved)
            assert list(world.registry.entries(KEY)) == []
        assert (world.host / name).exists()
        with refused(FileFault.MISSING):
            await world.registry.ready(saved)


async def test_what_fails_its_check_under_two_restores_goes_with_the_last(world):
    saved = await world.save(1)
    async with world.registry.using(saved) as name:
        flip(world.host / name)
        with refused(FileFault.DAMAGED):
            async with world.registry.using(saved):
                pytest.fail("it is not sound")
        assert (world.host / name).exists()


async def test_a_caller_that_leaves_leaves_no_half_work(tiers):
    first, _, _ = [await tiers.save(100 * i) for i in (1, 2, 3)]
    coming = asyncio.create_task(tiers.registry.ready(first))
    await asyncio.sleep(0)
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    await first.idle()
    assert first.tier is Tier.HOST


async def test_a_listener_that_fails_while_nobody_waits_is_heard_of(tmp_path, caplog):
    tiers = World(tmp_path, host=2, disk=2)

    def fail(event: SavedEvent, saved: Saved) -> None:
        if event is SavedEvent.MOVED:
            raise RuntimeError("what a listener did wrong")

    tiers.registry.subscribe(fail, "e")
    first, _, _ = [await tiers.save(100 * i) for i in (1, 2, 3)]
    assert first.tier is Tier.DISK
    assert "what a listener did wrong" in caplog.text


# --- rebuild ---------------------------------------------------------------------------------------------


async def test_a_restart_finds_what_was_saved(tiers):
    first, second, third = [await tiers.save(100 * i, salt=salt_digest("a")) for i in (1, 2, 3)]
    await tiers.registry.ready(second)
    tiers.open()
    await asyncio.gather(tiers.registry.rebuild(), tiers.registry.rebuild())
    await tiers.registry.rebuild()
    assert [event for event, *_ in tiers.told] == [SavedEvent.ADDED] * 3
    found = {saved.name: saved for saved in tiers.registry.entries(KEY)}
    for saved in (first, second, third):
        assert found[saved.name].sidecar() == saved.sidecar()
        assert found[saved.name].tokens == saved.tokens
        assert await tiers.registry.ready(found[saved.name]) == saved.name


async def test_a_restart_with_smaller_caps_keeps_the_best(tmp_path):
    world = World(tmp_path, host=3, disk=2)
    entries = [await world.save(100 * i) for i in range(5)]
    world.place = SavedPlace(world.host, SIZE, world.disk, 2 * SIZE)
    world.open()
    await world.registry.rebuild()
    assert {saved.name for saved in world.registry.entries(KEY)} == {saved.name for saved in entries[2:]}
    world.check()
    world.place = SavedPlace(world.host, SIZE, world.disk, SIZE)
    world.open()
    await world.registry.rebuild()
    assert {saved.name for saved in world.registry.entries(KEY)} == {saved.name for saved in entries[3:]}
    world.check()


async def test_an_entry_in_both_tiers_counts_in_the_host_tier(tiers):
    saved = await tiers.save(1)
    tiers.disk.mkdir(exist_ok=True)
    for name in (saved.name, saved.name.replace(".bin", ".json")):
        (tiers.disk / name).write_bytes((tiers.host / name).read_bytes())
    tiers.clock.now += 2 * GRACE_S
    tiers.open()
    await tiers.registry.rebuild()
    assert [found.tier for found in tiers.registry.entries(KEY)] == [Tier.HOST]


async def test_a_directory_that_is_not_there_is_asked_for_and_tried_again(tmp_path):
    world = World(tmp_path)
    await world.save(1)
    world.open()
    world.host.rename(tmp_path / "away")
    calls = world.registry.rebuild(), world.registry.rebuild(), world.registry.make_room(1)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, StateFileError)
        assert f"{world.host}: it cannot be read: No such file or directory" in str(error)
    (tmp_path / "away").rename(world.host)
    await world.registry.rebuild()
    assert len(list(world.registry.entries(KEY))) == 1


async def test_a_failure_that_came_after_its_caller_had_left_is_told_to_nobody(tmp_path):
    world = World(tmp_path)
    await world.save(1)
    world.open()
    world.host.rename(tmp_path / "away")
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await world.registry.rebuild()
    await world.registry._tasks.settled()
    (tmp_path / "away").rename(world.host)
    await world.registry.rebuild()
    assert len(list(world.registry.entries(KEY))) == 1


async def test_a_disk_tier_that_cannot_be_made(tmp_path):
    (tmp_path / "disk").write_text("a file")
    with refused(FileFault.UNWRITABLE):
        await World(tmp_path, disk=1).registry.rebuild()


# --- Disks that are full, or gone ------------------------------------------------------------------------


async def test_an_entry_that_a_full_disk_does_not_take_is_dropped(tmp_path, little, caplog):
    world = World(tmp_path, host=2)
    world.disk = little.path
    world.place = SavedPlace(world.host, 2 * SIZE, little.path, 2 * SIZE)
    world.open()
    first, second = [await world.save(100 * i) for i in (1, 2)]
    with little.full():
        assert await world.registry.make_room(SIZE)
    assert list(world.registry.entries(KEY)) == [second]
    assert world.told[-1][:2] == (SavedEvent.REMOVED, first.name)
    assert world.stats("evicted", "demoted") == [1, 0]
    assert "evicted instead of moved" in caplog.text
    world.check()


async def test_an_entry_that_a_full_host_tier_does_not_take_stays_on_disk(tmp_path, little):
    world = World(tmp_path, host=2, disk=2, host_dir=little.path)
    first, _, third = [await world.save(100 * i) for i in (1, 2, 3)]
    await world.registry.drop(third)
    with little.full(), refused(FileFault.NO_ROOM):
        await world.registry.ready(first)
    assert first.tier is Tier.DISK
    world.check()
    assert await world.registry.ready(first) == first.name
    world.check()


async def test_room_is_free_before_it_is_filled(tmp_path, little):
    size = 600_000  # one fits the directory, two do not
    world = World(tmp_path, host=900, disk=2000, host_dir=little.path)
    first = await world.save(100, size=size)
    assert await world.registry.make_room(size)
    second = await world.save(200, size=size)
    assert await world.registry.ready(first) == first.name
    assert [first.tier, second.tier] == [Tier.HOST, Tier.DISK]
    world.check()


async def test_the_disk_is_free_before_it_is_filled(tmp_path, monkeypatch):
    world = World(tmp_path, host=1, disk=1)
    await world.save(100)
    await world.save(200)
    move, remove, moves, early = saved_files.move, saved_files.remove, threading.Event(), []

    def noted_move(source: Path, *rest) -> saved_files.Stamp:
        moves.set()
        return move(source, *rest)

    def slow_remove(path: Path) -> None:
        if path.parent == world.disk:
            early.append(moves.wait(0.1))  # a move that did not wait begins by now
        remove(path)

    monkeypatch.setattr(saved_files, "move", noted_move)
    monkeypatch.setattr(saved_files, "remove", slow_remove)
    await world.save(300)
    assert moves.is_set()
    assert early == [False]
    world.check()


async def test_a_use_that_cannot_be_written_down_is_still_a_use(tmp_path, little):
    world = World(tmp_path, host_dir=little.path)
    saved = await world.save(1)
    with little.full():
        assert await world.registry.ready(saved) == saved.name
    assert saved.uses == 1
    world.check()


async def test_a_save_without_room_for_its_sidecar_is_refused(tmp_path, little):
    world = World(tmp_path, host_dir=little.path)
    saved = await world.save(1)
    name = world.server_saves(range(100, 105))
    with little.full(), refused(FileFault.NO_ROOM):
        await world.registry.add(name, KEY, None)
    assert list(world.registry.entries(KEY)) == [saved]
    world.check()


# --- Any order of events -----------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["save", "ready", "use", "drop", "pin", "vanish", "room", "together"]),
        st.integers(0, 7),
        st.integers(1, 3),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_whatever_happens_the_registry_agrees_with_the_directory(steps, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"), host=4, disk=3)
    for what, which, much in steps:
        await _step(world, what, which, much)
        world.check()
        assert all(numbers["bytes"] <= numbers["cap"] for numbers in world.registry.stats()["tiers"].values())
    names = {saved.name for saved in world.registry.entries(KEY)}
    world.open()
    await world.registry.rebuild()
    assert {saved.name for saved in world.registry.entries(KEY)} == names


async def _step(world: World, what: str, which: int, much: int) -> None:
    entries = list(world.registry.entries(KEY))
    first, size = 100 * which, much * SIZE
    if what == "save":
        calls = [world.save(first, count=much, size=size)]
    elif what == "room":
        calls = [world.registry.make_room(size)]
    elif what == "together":
        calls = [world.registry.make_room(size)] if which % 2 else []  # entries that are on their way to disk
        calls += [world.registry.ready(each) for each in entries]
        calls += [world.save(first + i, size=size) for i in range(2)]
        calls += [world.registry.drop(each) for each in entries[: much - 1]]
    else:
        calls = [_touch(world, what, entries[which % len(entries)], much)] if entries else []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, StateFileError) and result.reason in {FileFault.NO_ROOM, FileFault.MISSING}:
            continue
        assert not isinstance(result, BaseException), result
    await world.registry._tasks.settled()


async def _touch(world: World, what: str, saved: Saved, much: int) -> None:
    if what == "pin":
        saved.pins["test"] = world.clock.now + much
    elif what == "drop":
        await world.registry.drop(saved)
    elif what == "use":
        async with world.registry.using(saved) as name:
            with suppress(StateFileError):
                await world.save(50 + much, size=much * SIZE)
            assert (world.host / name).exists()
    else:
        if what == "vanish":
            for directory in (world.host, world.disk):
                saved_files.remove(directory / saved.name)
        await world.registry.ready(saved)
