"""Every attack in full, beside an innocent tenant. Run by scripts/test-hostile.

Each attack goes on for some seconds, or all of them side by side in random order. Prints a table in Markdown:
answers, how long the innocent's requests took (99th percentiles, alone and beside the attack), how much more
memory kvpin and its engine took at their peaks, and the faults. Ends with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.attacker import CLOSED, HELD, LATE, Attack
from tests.hostile.attacks import ATTACKS
from tests.hostile.trial import (
    Result,
    Watch,
    Worlds,
    attackers,
    innocent_faults,
    make,
    p99,
    try_attack,
)

ALONE_S = 20.0
AT_ONCE = 4
"""Attacks that run side by side."""
MOST_MEMORY = 8 << 30
"""So that a fault ends kvpin and not this machine."""
TITLE = (
    "| attack | answers | p99 ms of the innocent: alone → beside | the same, embedded engine "
    "| longest /health/live, ms | MB more: kvpin, engine | seconds | faults |\n"
    "|---|---|---:|---:|---:|---:|---:|---|"
)
_NAMES = {CLOSED: "closed", LATE: "late", HELD: "held"}


def _answers(counts: Counter[int]) -> str:
    return ", ".join(f"{_NAMES.get(status, status)} × {count}" for status, count in sorted(counts.items()))


def _row(result: Result) -> str:
    alone, during = result.alone, result.during
    pairs = ((alone.well, during.well), (alone.tiny, during.tiny))
    times = [f"{p99(before) * 1000:.0f} → {p99(beside) * 1000:.0f}" for before, beside in pairs]
    health = f"{max(during.health, default=0) * 1000:.0f}"
    memory = ", ".join(f"{more / 1e6:.0f}" for more in result.more)
    faults = "; ".join(result.faults).replace("|", "\\|").replace("\n", " ")[:600] or "–"
    seconds = f"{result.seconds:.0f}"
    cells = (result.name, _answers(result.answers), *times, health, memory, seconds, faults)
    return f"| {' | '.join(cells)} |"


async def _one_by_one(attacks: Sequence[Attack], worlds: Worlds, options: argparse.Namespace) -> list[Result]:
    results = []
    with attackers(1) as pool:
        for attack in attacks:
            world, innocent = worlds.get(attack)  # here: kvpin ends with the thread that starts it
            seconds = 0 if options.small else options.seconds
            try:
                result = await try_attack(world, innocent, attack, pool, small=options.small, seconds=seconds)
            except Exception as error:  # noqa: BLE001 - whatever kvpin does, the other attacks follow
                result = Result.of_error(attack, error)
            if result.is_damaged and (error := worlds.end()):
                result.faults.append(error)
            results.append(result)
            print(_row(result), flush=True)
    return results


async def _at_once(attacks: Sequence[Attack], worlds: Worlds, options: argparse.Namespace) -> list[Result]:
    """All attacks in random order, several side by side."""
    chosen = [attack for attack in attacks if attack.has_keys]
    world, innocent = worlds.get(max(chosen, key=lambda attack: attack.needs_clock))
    async with innocent.at_work() as alone:
        await asyncio.sleep(ALONE_S)
    watch, dice = Watch(world), random.Random(options.seed)  # noqa: S311 - not for secrets
    waiting, began = list(chosen), time.monotonic()
    until, answers, faults = began + options.minutes * 60, Counter[int](), list[str]()

    async def attacker() -> None:
        while time.monotonic() < until and world.kvpin.process.poll() is None:
            # None beside itself: an attack on what is around kvpin puts back what it found.
            attack = waiting.pop(dice.randrange(len(waiting)))
            more, wrong = await make(attack, world.place, pool, small=options.small, beside_others=True)
            waiting.append(attack)
            answers.update(more)
            faults.extend(f"{attack.name}: {fault}" for fault in wrong)

    with attackers(AT_ONCE) as pool:
        async with innocent.at_work() as during, asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(attacker())
    more = watch.more()
    faults = [*innocent_faults(during), *await watch.faults(), *faults]
    count = len(during.well) + len(during.tiny) + len(during.health)
    failed = f"{len(during.failures)} of {count} requests of the innocent failed"
    name = f"all at once for {options.minutes:g} minutes: {failed}"
    result = Result(name, answers, alone, during, more, time.monotonic() - began, faults)
    print(_row(result), flush=True)
    for fault, times in Counter(faults).most_common():
        print(f"{times} × {fault}"[:600], file=sys.stderr)
    return [result]


def main() -> int:
    """Makes the attacks and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attack", default="", help="only those with this in their name")
    parser.add_argument("--seconds", type=float, default=6, help="of each attack, at least once (6)")
    parser.add_argument("--all-at-once", action="store_true", help="side by side, in random order")
    parser.add_argument("--minutes", type=float, default=20, help="of all at once (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="reduced and once, as in the tests")
    parser.add_argument(
        "--checkout", type=Path, help="attack the kvpin of another checkout, with a .venv of its own"
    )
    parser.add_argument(
        "--faketime", type=Path, help="libfaketimeMT.so.1; without it the clock does not jump"
    )
    options = parser.parse_args()
    attacks = [attack for attack in ATTACKS if options.attack in attack.name]
    if options.faketime is None:
        for attack in (attack for attack in attacks if attack.needs_clock):
            print(f"not made, without --faketime: {attack.name}", file=sys.stderr)
        attacks = [attack for attack in attacks if not attack.needs_clock]
    attacks.sort(key=lambda attack: (attack.needs_clock, not attack.has_keys))
    print(TITLE)
    worlds = Worlds(options.checkout, options.faketime, MOST_MEMORY)
    run = _at_once if options.all_at_once else _one_by_one
    results = asyncio.run(run(attacks, worlds, options))
    error = worlds.end()
    faults = sum(len(result.faults) for result in results) + (error is not None)
    attempts = sum(result.answers.total() for result in results)
    peaks = [
        max((result.more[at] for result in results if len(result.more) > at), default=0) / 1e6
        for at in (0, 1)
    ]
    faulty = sum(bool(result.faults) for result in results)
    summary = f"{len(results)} rows, {attempts} attempts, {faults} faults in {faulty} rows; at most "
    summary += f"{peaks[0]:.0f} MB more of kvpin and {peaks[1]:.0f} MB of its engine"
    if error:
        summary += f"; {error}"
    print(f"\n{summary}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
