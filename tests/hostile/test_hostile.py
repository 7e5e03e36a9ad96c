"""Every attack once, reduced, on a kvpin whose memory is limited. `scripts/test-hostile` makes them whole."""

from __future__ import annotations

import pytest

from tests.hostile.attacks import ATTACKS
from tests.hostile.trial import MORE_MEMORY, Worlds, attackers, try_attack

pytestmark = pytest.mark.live
# Those on one kvpin one after the other. The clock is set by scripts/test-hostile alone.
_ATTACKS = sorted(
    (attack for attack in ATTACKS if not attack.needs_clock), key=lambda attack: attack.has_keys
)


@pytest.fixture(scope="module")
def worlds():
    # Three times what is allowed: the limit counts reserved memory, too, and C code ends the process there.
    worlds = Worlds(None, None, 3 * MORE_MEMORY)
    yield worlds
    assert worlds.end() is None


@pytest.fixture(scope="module")
def pool():
    with attackers(1) as pool:
        yield pool


@pytest.mark.parametrize("attack", _ATTACKS, ids=lambda attack: attack.name)
async def test_nobody_else_notices(worlds, pool, attack):
    world, innocent = worlds.get(attack)
    result = await try_attack(world, innocent, attack, pool, small=True, seconds=0)
    if result.is_damaged:
        worlds.end()
    assert not result.faults
    assert result.answers
