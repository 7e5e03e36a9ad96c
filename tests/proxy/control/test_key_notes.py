"""Over sockets, with engines that are really refused: tests/proxy/api/admin/test_key_routes.py."""

from types import SimpleNamespace

import pytest

from proxy.control.key_notes import KeyNotes
from proxy.fleet.engine import EngineState

READY, REFUSED = EngineState.READY, EngineState.REFUSED


class World:
    """A kvpin with two engines of the model `m`, which is open at first."""

    def __init__(self):
        self.tenants = SimpleNamespace(open=True)
        self.one, self.two = (
            SimpleNamespace(id=name, state=READY, is_served_there=False) for name in ("e1", "e2")
        )
        fleet = SimpleNamespace(engines={"e1": self.one, "e2": self.two}, has_model=lambda name: name == "m")
        self.notes = KeyNotes(self.tenants, fleet)

    def issued(self, models=None, *, then=lambda: None):
        before = self.notes.before()
        self.tenants.open = False
        then()
        return self.notes.since(before, SimpleNamespace(id="key-1", models=models))


@pytest.fixture
def world():
    return World()


def test_only_the_first_key_closes_kvpin(world):
    assert world.issued() == ["this is the first key: from now on, every request needs one"]
    assert world.issued(("m",)) == []


def test_engines_that_tenants_would_share_are_named_once(world):
    world.issued()

    def divide():
        world.two.state = REFUSED

    (note,) = world.issued(then=divide)
    assert note.startswith(
        "not used any more, because several tenants would share their KV: e2; set share_kv"
    )
    assert note.endswith("or remove the key: kvpin keys remove key-1")
    assert world.issued() == []


def test_a_model_that_nothing_serves(world):
    world.issued()
    assert world.issued(("m", "typo")) == ["no engine serves 'typo' now"]
    world.two.is_served_there = True  # what it serves is not known here
    assert world.issued(("m", "typo")) == []
