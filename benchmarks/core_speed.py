"""Time to decide where a prompt goes: chain, match, place; compared with ai-dynamo-runtime in one run.

Engines are full (524,288 tokens each) and busy (4 requests in flight on each). All hold a system prompt of
2,048 tokens. Of each prompt, one engine holds 90%, three others 75, 50 and 25%. Each round requests each
prompt once, so that the processor's caches hold as much of it as in service. Figures are medians over the
prompts, then over the rounds, in which kvpin and the peer take turns. The best round is printed too, because
on a busy machine the others measure the machine.

    chain    the hashes of a prompt's blocks
    match    what each engine holds of it, by tier
    place    the cost of every engine, and the choice
    lease    its blocks as pending and its load in the ledger, when it begins and when it ends
    learn    for engines without KV events: a full engine holds a new prompt now, and evicts others for it

The peer gets the same prompts. Its `match` is find_matches of its radix tree. Its `select`, from its
selection service, hashes, matches and places. It is installed to ~/.cache/kvpin (KVPIN_CACHE) on the first
run. "plain" is the least that Python can do: the hashes in a loop, and a bisection over a dict of bit masks
for the deepest block that any engine holds. That is right if parents outlive children, and finds only the
engines with the longest match. "hybrid" is kvpin for a model with five window layers for each layer of full
attention: each engine has five more KV cache groups, which hold the last 1,024 tokens of what it holds of a
prompt. "shared" is kvpin where every engine can read what another one holds, and conversations are long: it
looks for pairs each time.

    python benchmarks/core_speed.py [--world 8k] [--rounds 7] [--no-peer]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import time
import venv
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from core_world import IN_FLIGHT, SYSTEM_TOKENS, TOKENS_PER_BLOCK, WORLDS, World
from harness import CACHE
from index_memory import cpu
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from engine_adapter.types import Attention, KvGroup, Tier
from proxy.core.index.blocks import BlockHash, Chain, chain, namespace_root
from proxy.core.index.expected import LearnedBlocks
from proxy.core.index.prefix_index import PrefixIndex
from proxy.core.placement.decision import Candidate, Placement
from proxy.core.placement.placer import Placer

PEER = "ai-dynamo-runtime==1.6.1"
ROOT = namespace_root("m")
WINDOW_TOKENS = 1024
WINDOW_BLOCKS = WINDOW_TOKENS // TOKENS_PER_BLOCK
WINDOW_GROUPS = 5
Times = dict[str, float]


def main() -> None:
    """Measures every world, or the one that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, help="only this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peer", action="store_true", help="kvpin and plain Python alone")
    options = parser.parse_args()
    print(f"{platform.node()}, {cpu()}, Python {platform.python_version()}; medians in microseconds")
    for name in [options.world] if options.world else WORLDS:
        world = WORLDS[name]
        with nobody() if options.no_peer else peer(name) as ask_peer:
            report(world, rounds(world, options.rounds, ask_peer))


# --- kvpin -----------------------------------------------------------------------------------------


class Kvpin:
    """A placer that knows the world, and a dict of bit masks that does."""

    def __init__(self, world: World, window_groups: int = 0, *, shares: bool = False) -> None:
        self.world, self.shares = world, shares
        self.groups = [KvGroup(at + 1, Attention.WINDOW, WINDOW_TOKENS) for at in range(window_groups)]
        self.placer = Placer(TOKENS_PER_BLOCK)
        self.masks: dict[BlockHash, int] = {}
        self.now = 0.0
        for engine in range(world.engines):
            self.placer.add(str(engine), gpu_blocks=world.engine_tokens // TOKENS_PER_BLOCK)
        self._fill()
        self.engines = list(self.placer.books)
        for at in range(IN_FLIGHT * world.engines):
            self._begin(world.request(at))
        if shares:
            self._crowd()

    def _fill(self) -> None:
        placer = self.placer
        for engine, tokens in self.world.held():
            self.now += 1.0
            held = chain(ROOT, tokens, None, TOKENS_PER_BLOCK)
            placer.index.store(str(engine), Tier.GPU, held.hashes)
            for group in self.groups:
                placer.index.add_group(str(engine), group, TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
                placer.index.store_group(str(engine), group, held.hashes[-WINDOW_BLOCKS:])
                system = SYSTEM_TOKENS // TOKENS_PER_BLOCK
                placer.index.store_group(str(engine), group, held.hashes[system - WINDOW_BLOCKS : system])
            placer.books[str(engine)].residents.use(self.now, held.hashes, len(held.hashes))
            for block in held.hashes:
                self.masks[block] = self.masks.get(block, 0) | 1 << engine

    def _begin(self, tokens: array[int]) -> None:
        prompt = chain(ROOT, tokens, None, TOKENS_PER_BLOCK)
        matches = self.placer.match(prompt)
        candidates = [self.placer.candidate(self.now, each, matches.get(each)) for each in self.engines]
        placement = self.placer.place(self.now, candidates, prompt)
        self.placer.begin(self.now, placement.engine, placement.work, prompt)

    def _crowd(self) -> None:
        """Next turns wait, at some engines longer than at others."""
        outlook = replace(self.placer.outlook(self.now), turns=5.0, rest_s=0.5)
        self.placer.outlook = lambda _now: outlook  # type: ignore[method-assign]
        for number, book in enumerate(self.placer.books.values()):
            book.worked.add(self.now, number)

    def _placed(self, prompt: Chain, candidates: list[Candidate]) -> Placement:
        placer, now = self.placer, self.now
        prefillers = placer.prefillers(now, [], placer.books, candidates) if self.shares else None
        return placer.place(now, candidates, prompt, prefillers)

    def check(self) -> None:
        """Raises when what is found is not what engines hold."""
        for at in range(self.world.prompts):
            matches = self.placer.match(chain(ROOT, self.world.prompt(at), None, TOKENS_PER_BLOCK))
            found = [matches[str(engine)].gpu * TOKENS_PER_BLOCK for engine, _ in self.world.holders(at)]
            if len(matches) != self.world.engines or found != [n for _, n in self.world.holders(at)]:
                raise RuntimeError(f"prompt {at} is not found as it is held: {found}")

    def measure(self, prompts: Sequence[array[int]]) -> tuple[Times, Times]:
        """Medians of kvpin, and of plain Python."""
        placer, now = self.placer, self.now
        times: dict[str, list[float]] = {name: [] for name in ("chain", "match", "place", "lease")}
        plain: dict[str, list[float]] = {"chain": [], "match": []}
        for tokens in prompts:
            begun = time.perf_counter()
            prompt = chain(ROOT, tokens, None, TOKENS_PER_BLOCK)
            chained = time.perf_counter()
            matches = placer.match(prompt)
            matched = time.perf_counter()
            candidates = [placer.candidate(now, engine, matches.get(engine)) for engine in self.engines]
            placement = self._placed(prompt, candidates)
            decided = time.perf_counter()
            placed = placer.begin(now, placement.engine, placement.work, prompt)
            placer.end(now, placed, None)
            placer.settled(placed)
            ended = time.perf_counter()
            note(times, begun, chained, matched, decided, ended)
        for tokens in prompts:
            begun = time.perf_counter()
            hashes = plain_chain(tokens)
            chained = time.perf_counter()
            deepest(self.masks, hashes)
            note(plain, begun, chained, time.perf_counter())
        own = medians(times)
        own["learn"] = self._learning(prompts)
        return own, medians(plain)

    def _learning(self, prompts: Sequence[array[int]]) -> float:
        """Microseconds to learn that a full engine holds a prompt: the median."""
        index, learned = PrefixIndex(), LearnedBlocks(self.world.engine_tokens // TOKENS_PER_BLOCK)
        index.add_engine("learned")
        chains = [chain(ROOT, tokens, None, TOKENS_PER_BLOCK).hashes for tokens in prompts]
        times = list[float]()
        for hashes in chains:
            was_full = len(learned) == learned.capacity
            begun = time.perf_counter()
            index.store("learned", Tier.GPU, hashes)
            index.remove("learned", Tier.GPU, learned.learn(hashes))
            if was_full:
                times.append(1e6 * (time.perf_counter() - begun))
        return statistics.median(times)


def plain_chain(tokens: array[int]) -> list[BlockHash]:
    """The chain, as one would write it."""
    data, step, parent, hashes = tokens.tobytes(), 4 * TOKENS_PER_BLOCK, ROOT, []
    for at in range(0, len(data) - step + 1, step):
        parent = xxh3_64_intdigest(parent.to_bytes(8, "little") + data[at : at + step])
        hashes.append(parent)
    return hashes


def deepest(masks: dict[BlockHash, int], hashes: Sequence[BlockHash]) -> tuple[int, int]:
    """Number of leading blocks that any engine holds, and the engines that hold the last of them."""
    held = bisect_left(hashes, True, key=lambda block: block not in masks)
    return held, masks[hashes[held - 1]] if held else 0


def note(times: dict[str, list[float]], *at: float) -> None:
    """Adds what passed between moments, in microseconds."""
    for each, (begun, ended) in zip(times.values(), pairwise(at), strict=True):
        each.append(1e6 * (ended - begun))


def medians(times: dict[str, list[float]]) -> Times:
    """The median time of each step."""
    return {name: statistics.median(each) for name, each in times.items()}


# --- the peer --------------------------------------------------------------------------------------


@contextmanager
def nobody() -> Iterator[None]:
    """No peer."""
    yield None


@contextmanager
def peer(world: str) -> Iterator[subprocess.Popen[str] | None]:
    """The peer in a process of its own, once it knows the world; None where it cannot be had."""
    python = CACHE / "dynamo-1.6.1" / "bin" / "python"
    try:
        install(python)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{PEER} cannot be installed: {error}; measuring without it")
        yield None
        return
    command = [str(python), str(Path(__file__).with_name("core_speed_dynamo.py")), world]
    with subprocess.Popen(
        command, env={"DYN_LOG": "off"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def install(python: Path) -> None:
    """The peer's environment."""
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    needed = [PEER, "pyzmq>=27", "msgspec>=0.20"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *needed], check=True)


def ask(process: subprocess.Popen[str]) -> Times:
    """One round of the peer."""
    if process.stdin is None:
        raise RuntimeError("the peer has no standard input")
    process.stdin.write("\n")
    process.stdin.flush()
    times: Times = json.loads(answer(process))
    return times


def answer(process: subprocess.Popen[str]) -> str:
    """The peer's next line that is JSON."""
    for line in process.stdout or ():
        if line.startswith(("{", '"')):
            return line
    raise RuntimeError(f"the peer ended with status {process.wait()}")


# --- the report ------------------------------------------------------------------------------------


def rounds(world: World, count: int, process: subprocess.Popen[str] | None) -> list[dict[str, Times]]:
    """The medians of each round. In a round, kvpin, plain Python and the peer take turns."""
    kvpin, hybrid, shared = Kvpin(world), Kvpin(world, WINDOW_GROUPS), Kvpin(world, shares=True)
    kvpin.check()
    hybrid.check()
    if process is not None:
        answer(process)  # it is ready
    prompts = [world.prompt(at) for at in range(world.prompts)]
    gc.collect()
    gc.freeze()
    each = []
    for _ in range(count):
        own, plain = kvpin.measure(prompts)
        groups, _ = hybrid.measure(prompts)
        pairs, _ = shared.measure(prompts)
        for times in (own, groups, pairs):
            times["in all"] = times["chain"] + times["match"] + times["place"]
        each.append({"kvpin": own, "hybrid": groups, "shared": pairs, "plain": plain})
        if process is not None:
            each[-1]["dynamo"] = ask(process)
    return each


def report(world: World, each: list[dict[str, Times]]) -> None:
    """Prints one world."""
    print(f"\n{world.name} of {world.engine_tokens:,} tokens each: median of rounds (best)")
    for name in each[0]:
        steps = (f"{step} {figures([times[name][step] for times in each])}" for step in each[0][name])
        print(f"  {name:7} {', '.join(steps)}")
    for step in ("match", "place", "lease", "in all"):
        ratio = statistics.median(times["hybrid"][step] / times["kvpin"][step] for times in each)
        print(f"  {step} of hybrid models takes {ratio:.2f} times as long")
    ratio = statistics.median(times["shared"]["place"] / times["kvpin"]["place"] for times in each)
    print(f"  place with pairs takes {ratio:.2f} times as long")
    if "dynamo" in each[0]:
        for own, theirs in (("chain", "hash"), ("match", "match"), ("in all", "select")):
            ratio = statistics.median(times["kvpin"][own] / times["dynamo"][theirs] for times in each)
            print(f"  kvpin's {own} is {ratio:.2f} of dynamo's {theirs}")


def figures(times: list[float]) -> str:
    """Over rounds."""
    return f"{statistics.median(times):,.1f} ({min(times):,.1f})"


if __name__ == "__main__":
    main()
