"""Every attack of the corpus. docs/threat-model.md says what keeps them off.

json_shapes     many, deep, long, odd values    broken_engines  answers that no engine should give
computing       to count, compile, choose       strangers       no key, web pages, objects of other tenants
surroundings    disk, clock, the exchange       connections     heads, unfinished bodies, sockets not read
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from tests.hostile import broken_engines, computing, connections, json_shapes, strangers, surroundings
from tests.hostile.attacker import BUSY, Attack, Attacker
from tests.hostile.place import Place

ATTACKS: tuple[Attack, ...] = (
    *json_shapes.ATTACKS,
    *computing.ATTACKS,
    *broken_engines.ATTACKS,
    *connections.ATTACKS,
    *strangers.ATTACKS,
    *surroundings.ATTACKS,
)
_BY_NAME = {attack.name: attack for attack in ATTACKS}
_LIMIT_S = 240.0


def fire(
    name: str, place: Place, small: bool, until: float, beside_others: bool
) -> tuple[Counter[int], list[str]]:
    """Makes an attack again and again until then, monotonic seconds. Returns its answers and faults. Runs in
    a process of its own. Beside other attacks, which share its tenant, any request may be refused."""
    attack, attacker = _BY_NAME[name], Attacker(place, small)

    async def run() -> None:
        while True:
            async with asyncio.timeout(_LIMIT_S):
                await attack.run(attacker)
            if time.monotonic() >= until:
                return

    try:
        asyncio.run(run())
    except TimeoutError:
        attacker.fault(f"the attack did not end within {_LIMIT_S:.0f} s")
    expects = attack.expects | (BUSY if beside_others else frozenset())
    odd = {status: count for status, count in attacker.answers.items() if status not in expects}
    faults = [f"answer {status}, {count} times" for status, count in odd.items()]
    return attacker.answers, [*faults, *attacker.faults]
