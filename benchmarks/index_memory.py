"""Memory of the prefix index at 5 to 10 million blocks: resident bytes per block and location.

Each case is its own process. It fills an index as engines would, and reads its resident memory all the way,
because dicts grow by doubling. Prompts are chains of 512 blocks. "a turn at a time" stores them 20 blocks at
a time, as conversations grow, 64 of them interleaved. The number of locations is how many of 64 engines hold
each prompt. With --window-groups, engines have so many further KV cache groups (hybrid models), which hold
the last 64 blocks of each prompt.

    python benchmarks/index_memory.py [--window-groups 5]
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import subprocess
import sys
from array import array
from pathlib import Path

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.core.index.blocks import BlockHash, extend, namespace_root
from proxy.core.index.prefix_index import PrefixIndex

ENGINES = 64
PROMPT_BLOCKS = 512
TOKENS_PER_BLOCK = 16
TURN_BLOCKS = 20
WINDOW_BLOCKS = 64
# Conversations that grow beside each other.
AT_ONCE = 64
CASES = ((1, PROMPT_BLOCKS), (1, TURN_BLOCKS), (2, PROMPT_BLOCKS), (4, PROMPT_BLOCKS))


def main() -> None:
    """Measures every case, or the one that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=10_000_000, help="the most blocks")
    parser.add_argument("--case", nargs=2, type=int, metavar=("LOCATIONS", "STEP"), help="only this one")
    parser.add_argument("--window-groups", type=int, default=0)
    options = parser.parse_args()
    if options.case is not None:
        fill(options.blocks, *options.case, options.window_groups)
        return
    print(f"{platform.node()}, {cpu()}, Python {platform.python_version()}")
    print(f"{'locations a block':>18} {'stored':>16} {'at the end':>11} {'mean':>6} {'worst':>6} {'at':>11}")
    for locations, step in CASES:
        command = [
            sys.executable,
            __file__,
            "--blocks",
            str(options.blocks),
            "--window-groups",
            str(options.window_groups),
            "--case",
            str(locations),
            str(step),
        ]
        subprocess.run(command, check=True)


def fill(blocks: int, locations: int, step: int, window_groups: int) -> None:
    """Fills an index; prints bytes per block and location from half of `blocks` on."""
    index = PrefixIndex()
    draw = random.Random(1)  # noqa: S311 - not for secrets
    engines = [f"engine-{n}" for n in range(ENGINES)]
    groups = [KvGroup(at + 1, Attention.WINDOW, 1024) for at in range(window_groups)]
    for engine in engines:
        index.add_engine(engine)
        for group in groups:
            index.add_group(engine, group, TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
    before = resident()
    seen: list[tuple[float, int]] = []
    known = first = 0
    while known < blocks:
        talks = [prompt(draw) for _ in range(AT_ONCE)]
        for at in range(0, PROMPT_BLOCKS, step):
            for talk, hashes in enumerate(talks):
                part = hashes[at : at + step]
                for copy in range(locations):
                    engine = engines[(first + talk + 7 * copy) % ENGINES]
                    index.store(engine, Tier.GPU, part, hashes[at - 1] if at else None)
                    window = hashes[max(at, PROMPT_BLOCKS - WINDOW_BLOCKS) : at + step]
                    for group in groups if window else ():
                        index.store_group(engine, group, window)
        first += 1
        known += AT_ONCE * PROMPT_BLOCKS
        del talks
        if known >= blocks // 2:
            seen.append(((resident() - before) / (known * locations), known))
    if len(index) != known:
        raise RuntimeError(f"{len(index)} blocks are known, not {known}")
    worst, at = max(seen)
    mean = sum(each for each, _ in seen) / len(seen)
    how = "prompts" if step == PROMPT_BLOCKS else "a turn at a time"
    print(f"{locations:18} {how:>16} {seen[-1][0]:11.1f} {mean:6.1f} {worst:6.1f} {at:11,}")


def prompt(draw: random.Random) -> tuple[BlockHash, ...]:
    """The chain of a new prompt."""
    tokens = array("i", array("H", draw.randbytes(2 * TOKENS_PER_BLOCK * PROMPT_BLOCKS)))
    return extend(namespace_root("m"), tokens, None, TOKENS_PER_BLOCK)


def resident() -> int:
    """Resident memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
