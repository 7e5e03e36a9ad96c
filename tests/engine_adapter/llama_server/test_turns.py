"""Who gets which slot when, as scripts of asks and releases under a clock of the test's own."""

import asyncio
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.errors import EngineUnavailable
from engine_adapter.hold import Forecast
from engine_adapter.llama_server.answer import CompletionOutput
from engine_adapter.llama_server.plan import Plan
from engine_adapter.llama_server.scheduler import SlotRequest, Turns
from engine_adapter.llama_server.server_files import UNKNOWN_OWNER
from engine_adapter.llama_server.slots import SlotOperation, SlotTable
from tests.engine_adapter.llama_server.answers import lease_of

ANYWHERE = -1


def plan_of(slot, *, save_first=False, restore=None):
    return Plan(slot=slot, cost=Forecast(0), restore=restore, save_first=save_first, over_pin=False)


@dataclass
class World:
    """Turns over slots; an ask names the slot that it prefers."""

    slots: int = 2
    got: dict = field(default_factory=dict)  # name → slot, in the order of the grants
    tasks: dict = field(default_factory=dict)

    def __post_init__(self):
        self.table = SlotTable(self.slots)
        self.turns = Turns(self.table, self.decide, lambda: 100.0)

    def decide(self, ask, slots):
        ids = [slot.id for slot in slots]
        return plan_of(ask.tokens[0] if ask.tokens[0] in ids else ids[0])

    @property
    def waiting(self):
        return sum(not task.done() for task in self.tasks.values())

    async def ask(self, name, home=ANYWHERE):
        """A request joins the queue; what it gets stands in `got`."""

        async def get():
            self.got[name] = (await self.turns.turn(SlotRequest(array("i", [home])))).slot

        self.tasks[name] = asyncio.create_task(get())
        await settle()
        return self.tasks[name]

    async def ask_each(self, names, home=ANYWHERE):
        for name in names:
            await self.ask(name, home)

    async def release(self, slot):
        self.turns.release(slot)
        await settle()

    async def leave(self, name):
        task = self.tasks[name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await settle()

    def busy(self):
        return [slot.id for slot in self.table if not slot.is_idle]


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def world():
    world = World()
    yield world
    world.turns.fail(EngineUnavailable("the test is over"))
    await asyncio.gather(*world.tasks.values(), return_exceptions=True)
    assert world.table.violations == 0
    assert max(world.table.most_in_flight) <= 1


class TestOrder:
    async def test_first_come_first_served(self, world):
        await world.ask_each("abcd")
        assert (world.got, world.waiting) == ({"a": 0, "b": 1}, 2)
        await world.release(1)
        await world.release(0)
        assert (world.got, world.waiting) == ({"a": 0, "b": 1, "c": 1, "d": 0}, 0)
        assert list(world.got) == ["a", "b", "c", "d"]

    async def test_each_gets_the_best_of_the_idle_slots(self, world):
        await world.ask("a", 1)
        await world.ask("b", 1)
        assert world.got == {"a": 1, "b": 0}

    @pytest.mark.parametrize("operation", [SlotOperation.SETTLE, SlotOperation.SAVE])
    async def test_a_slot_that_is_idle_in_a_moment_is_waited_for(self, world, operation):
        world.table.begin(1, operation, 100.0)
        await world.ask("a", 1)
        await world.ask("b", 0)
        assert world.got == {"b": 0}, "whoever is behind it need not wait"
        await world.release(1)
        assert world.got == {"b": 0, "a": 1}


class TestFail:
    @pytest.mark.parametrize("first", ["it fails", "the request leaves"])
    async def test_whoever_leaves_meanwhile_is_cancelled(self, world, first):
        await world.ask_each("ab")
        waiting = await world.ask("c")
        if first == "the request leaves":
            waiting.cancel()
        world.turns.fail(EngineUnavailable("it is gone"))
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert world.busy() == [0, 1]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(-1, 2)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("race"), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(STEPS)
async def test_whatever_happens_no_slot_is_used_twice_and_everybody_is_served(steps):
    world, running = World(slots=3), {}
    for number, (what, value) in enumerate(steps):
        if what == "ask":
            await world.ask(number, value)
        elif what == "release":
            await _release_one(world, running, value)
        elif what == "race":
            await _race(world, running, value)
        else:
            waiting = [name for name, task in world.tasks.items() if not task.done()]
            if waiting:
                await world.leave(waiting[value % len(waiting)])
        _note_running(world, running)
    while running:
        await _release_one(world, running, 0)
        _note_running(world, running)
    assert (world.waiting, world.busy(), world.table.violations) == (0, [], 0)
    assert all(task.done() for task in world.tasks.values())


async def _release_one(world, running, value):
    if running:
        name = list(running)[value % len(running)]
        await world.release(running.pop(name))


async def _race(world, running, value):
    """A slot is released, and somebody who waits leaves in the moment before or after."""
    waiting = [task for task in world.tasks.values() if not task.done()]
    if running and waiting:
        leaves = waiting[value // 2 % len(waiting)]
        if value % 2:
            leaves.cancel()
        world.turns.release(running.pop(next(iter(running))))
        if not value % 2:
            leaves.cancel()
        await settle()
        assert leaves.cancelled()


def _note_running(world, running):
    """Moves what was granted to what runs, and compares that with the table."""
    running.update(world.got)
    world.got.clear()
    assert world.busy() == sorted(running.values())


# --- leases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "salt", "answer", "leaves_own"),
    [
        ([], None, CompletionOutput(is_complete=True), True),
        ([], "s", CompletionOutput(is_complete=True), True),
        ([5], None, CompletionOutput(is_complete=True), False),
        pytest.param([], UNKNOWN_OWNER, CompletionOutput(is_complete=True), False, id="owner unknown"),
        ([], None, CompletionOutput(is_complete=True, error="no"), False),
        ([], None, CompletionOutput(), False),
        ([], None, None, False),
    ],
)
def test_kv_of_an_unknown_prompt_is_its_clients_once_the_answer_is_whole(tokens, salt, answer, leaves_own):
    assert lease_of(tokens, salt, answer).leaves_own is leaves_own
