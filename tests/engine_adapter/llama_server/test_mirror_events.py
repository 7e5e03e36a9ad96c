"""Events of places, held against what lies in the places."""

import asyncio
from array import array
from contextlib import aclosing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.llama_server.mirror_events import MAX_SALTS, TOKENS_PER_BLOCK, MirrorEvents
from engine_adapter.types import BlocksRemoved, Tier
from proxy.core.index.blocks import extend, namespace_root
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.index.view import EngineView

BLOCK = TOKENS_PER_BLOCK


def tokens(n, start=0):
    return array("i", range(start, start + n))


class Follower:
    """Follows a mirror from now on."""

    def __init__(self, mirror):
        self._task = asyncio.ensure_future(self._follow(mirror))
        self.read = []

    async def _follow(self, mirror):
        async with aclosing(mirror.follow()) as events:
            async for event in events:
                self.read.append(event)

    async def catch_up(self):
        """Returns when it has read what was told so far."""
        for _ in range(3):
            await asyncio.sleep(0)

    async def aclose(self):
        await self.catch_up()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def events_of(mirror, *actions):
    """The events that actions bring to somebody who follows already."""
    follower = Follower(mirror)
    await follower.catch_up()
    known = len(follower.read)
    for action, *arguments in actions:
        action(*arguments)
    await follower.aclose()
    return follower.read[known:]


@pytest.fixture
def mirror():
    return MirrorEvents()


class TestPlaces:
    async def test_a_block_that_only_changes_place_never_leaves(self, mirror):
        mirror.put(0, Tier.GPU, tokens(2 * BLOCK), None)
        events = await events_of(mirror, (mirror.put, 0, Tier.GPU, tokens(BLOCK), None))
        assert [(type(event), len(event.hashes)) for event in events] == [(BlocksRemoved, 1)]


class TestSalts:
    async def test_salts_that_clients_invent_do_not_fill_memory(self, mirror):
        mirror.know("d", "secret")
        mirror.put(0, Tier.GPU, tokens(BLOCK), "d")
        for number in range(2 * MAX_SALTS):
            mirror.know(f"digest {number}", f"salt {number}")
        assert len(mirror._salts) <= MAX_SALTS + 2
        follower = Follower(mirror)
        await follower.aclose()
        assert [event.salt for event in follower.read[1:-1]] == ["secret"], "what is held stays known"
        assert len(await events_of(mirror, (mirror.put, 1, Tier.GPU, tokens(BLOCK), None))) == 1
        forgotten = await events_of(mirror, (mirror.put, 2, Tier.GPU, tokens(BLOCK), "digest 0"))
        assert forgotten == []
        assert len(await events_of(mirror, (mirror.know, "digest 0", "salt 0"))) == 1


class TestFollowing:
    async def test_ends_with_whoever_follows(self, mirror):
        async with aclosing(mirror.follow()) as events:
            await anext(events)
            assert len(mirror._followers) == 1
        assert not mirror._followers
        mirror.put(0, Tier.GPU, tokens(BLOCK), None)


# Few different prompts that share beginnings: each is a path of blocks, of which some are equal.
PROMPTS = st.lists(st.integers(0, 1), max_size=4).map(
    lambda path: array("i", [value for step in path for value in [step] * BLOCK])
)
SALTS = {None: None, "d1": "one", "d2": "two"}
PLACES = st.one_of(st.integers(0, 2), st.sampled_from(["f1", "f2", "f3"]))
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), PLACES, st.sampled_from(Tier), PROMPTS, st.integers(0, 15),
            st.sampled_from([*SALTS]),
        ),
        st.tuples(st.just("drop"), PLACES),
        st.tuples(st.just("know"), st.sampled_from(["d1", "d2"])),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)  # fmt: skip


@given(STEPS, st.integers(0, 30))
async def test_events_tell_exactly_what_lies_in_the_places(steps, join_at):
    mirror, held, known = MirrorEvents(), {}, {None}
    followers = [Follower(mirror)]
    for number, (what, *arguments) in enumerate(steps):
        await followers[0].catch_up()
        if number == join_at:
            followers.append(Follower(mirror))
            await followers[1].catch_up()
        if what == "put":
            place, tier, prompt, rest, digest = arguments
            mirror.put(place, tier, prompt + tokens(rest, 7), digest)
            held[place] = (tier, digest, tuple(prompt))
        elif what == "drop":
            mirror.drop(*arguments)
            held.pop(*arguments, None)
        elif what == "know":
            mirror.know(arguments[0], SALTS[arguments[0]])
            known.add(arguments[0])
        else:
            mirror.clear()
            held.clear()
    for follower in followers:
        await follower.aclose()
        assert _indexed(follower.read) == _hashes_of(held.values(), known)


def _hashes_of(places, known):
    """By tier, the hashes of the proxy for the blocks of these places."""
    hashes = {tier: set() for tier in Tier}
    for tier, digest, prompt in places:
        if digest in known:
            hashes[tier] |= set(extend(_root_of(SALTS[digest]), array("i", prompt), None, BLOCK))
    return hashes


def _indexed(events):
    """By tier, the hashes that the proxy's index holds after these events."""
    index = PrefixIndex()
    index.add_engine("e")
    view = EngineView("e", index, _root_of, BLOCK)
    for event in events:
        view.apply(event)
    assert view.counts.orphaned == 0
    bits = {Tier.GPU: 1, Tier.HOST: 2, Tier.DISK: 4}
    locations = index._locations
    where = {
        block: locations.get(block)
        for part in {id(part): part for part in locations._parts}.values()
        for block in part
    }
    return {tier: {block for block, at in where.items() if at & bits[tier]} for tier in Tier}


def _root_of(salt, lora=None):
    return namespace_root("m", lora=lora, salt=salt)
