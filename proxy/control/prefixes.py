"""The prefix tree of the last requests' prompts, and which engines hold which part of it. No prompt text.

It is made anew for each who asks, in slices, so that requests are served in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import msgspec

from engine_adapter.types import Tier
from proxy.control.kept_prompts import KeptPrompt, KeptPrompts
from proxy.core.index.blocks import BlockHash
from proxy.core.index.prefix_index import Match
from proxy.core.index.tree import Node, PrefixTree
from proxy.core.peers.messages import unpacked
from proxy.errors import BadRequest, NotFound
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool

# Engines that are named for each prefix; `engines` counts the others, too.
HOLDERS = 8
MAX_DEPTH, MAX_PREFIXES = 64, 500
# Nodes that are looked at in a row.
_SLICE_NODES = 1024


class Holder(msgspec.Struct):
    """An engine that holds the beginning of a prefix: how many of its tokens, by the fastest tier of each."""

    engine: str
    tokens: dict[str, int]


class PrefixAnswer(msgspec.Struct, kw_only=True):
    """A part of prompts that all prompts through it share, as long as none leaves it.

    Attributes:
        id: names it in `under`; hexadecimal.
        request_id: the last request through it. As a target, with `end` as `tokens`, it names this prefix.
        start: tokens of the prompt before it.
        end: tokens of the prompt up to its end.
        below: different tokens of it and of all that follows.
        requests: of the requests that kvpin keeps, how many go through it.
        last_used: when the last of them came, in Unix time.
        engines: how many engines hold its first block.
        holders: those that hold most of it, eight at most.
        pins: the pins that protect its first block.
        children: what follows, the widest first.
        unshown: how many more parts follow that this answer leaves out.
    """

    id: str
    request_id: str
    model: str
    lora: str | None
    tenant: str | None
    start: int
    end: int
    below: int
    requests: int
    last_used: float
    engines: int
    holders: list[Holder]
    pins: list[str]
    children: list[PrefixAnswer]
    unshown: int


class PrefixesAnswer(msgspec.Struct, kw_only=True):
    """The prefix tree of the prompts of the last requests.

    Attributes:
        requests: how many requests it shows.
        tokens: their different prompt tokens, in full blocks.
        path: the prefixes before `under`, the first one first, and itself; without their children.
        prefixes: `under` alone, or the beginnings of all prompts, the widest first.
        unshown: how many more beginnings there are.
    """

    requests: int
    tokens: int
    path: list[PrefixAnswer]
    prefixes: list[PrefixAnswer]
    unshown: int


@dataclass(frozen=True, slots=True)
class _Owner:
    """A prompt, and the pool that it was for."""

    prompt: KeptPrompt
    pool: Pool


class Prefixes:
    """Tells what engines hold of the last prompts."""

    def __init__(self, fleet: Fleet, prompts: KeptPrompts) -> None:
        self._fleet, self._prompts = fleet, prompts

    async def look(self, under: str | None, depth: int, most: int) -> PrefixesAnswer:
        """The widest prefixes.

        Args:
            under: the prefix to begin with; None for the beginnings of all prompts.
            depth: how many below each other.
            most: how many in all.

        Raises:
            NotFound: no prompt that kvpin keeps goes through `under`.
            BadRequest: `under` is no id of a prefix.
        """
        kept = await self._prompts.all()
        tree, requests = await self._grow(kept.prompts)
        top = None if under is None else await _find(tree, _block_of(under))
        tops = [*tree.roots.values()] if top is None else [top]
        pinned = await _pinned(tree, kept.pins)
        path = [self._answer(node, pinned) for node in top.path()] if top is not None else []
        shown, unshown = await self._widest(tops, pinned, depth, most)
        return PrefixesAnswer(
            requests=requests,
            tokens=sum(node.blocks * node.newest.pool.tokens_per_block for node in tree.roots.values()),
            path=path,
            prefixes=shown,
            unshown=unshown,
        )

    async def _grow(self, prompts: Iterable[KeptPrompt]) -> tuple[PrefixTree[_Owner], int]:
        """The tree of all prompts whose pools are here, and how many these are."""
        tree, requests = PrefixTree[_Owner](), 0
        for prompt in prompts:
            if (pool := self._fleet.pools.get(prompt.model)) is not None:
                tree.add(unpacked(prompt.hashes), _Owner(prompt, pool))
                requests += 1
            await asyncio.sleep(0)
        return tree, requests

    async def _widest(
        self, tops: Iterable[Node[_Owner]], pinned: dict[Node[_Owner], list[str]], depth: int, most: int
    ) -> tuple[list[PrefixAnswer], int]:
        """The widest nodes from `tops` on, and how many of `tops` are left out."""
        order = count()  # of equals, the first one first
        shown, left = list[PrefixAnswer](), list[tuple[int, int, int, Node[_Owner], PrefixAnswer | None]]()
        for node in tops:
            heappush(left, (-node.blocks, next(order), 1, node, None))
        for _ in range(most):
            if not left:
                break
            _, _, level, node, parent = heappop(left)
            answer = self._answer(node, pinned)
            if parent is None:
                shown.append(answer)
            else:
                parent.children.append(answer)
                parent.unshown -= 1
            if level < depth:
                for child in node.children.values():
                    heappush(left, (-child.blocks, next(order), level + 1, child, answer))
            await asyncio.sleep(0)
        return shown, sum(parent is None for *_, parent in left)

    def _answer(self, node: Node[_Owner], pinned: dict[Node[_Owner], list[str]]) -> PrefixAnswer:
        """A node without its children."""
        prompt, pool, block = node.newest.prompt, node.newest.pool, node.newest.pool.tokens_per_block
        matches = pool.index.match(node.own)
        held = sorted(matches.items(), key=lambda item: (-item[1].blocks, item[0]))
        return PrefixAnswer(
            id=f"{node.last:016x}",
            request_id=prompt.request_id,
            model=pool.model,
            lora=prompt.lora,
            tenant=prompt.tenant,
            start=node.start * block,
            end=node.end * block,
            below=node.blocks * block,
            requests=node.chains,
            last_used=prompt.started,
            engines=len(matches),
            holders=[Holder(engine, _by_tier(match, block)) for engine, match in held[:HOLDERS]],
            pins=pinned.get(node, []),
            children=[],
            unshown=len(node.children),
        )


def _by_tier(match: Match, block: int) -> dict[str, int]:
    """Tokens of a match by tier, and of running requests that will leave them on the GPU."""
    by_tier = {
        Tier.GPU.value: match.gpu,
        Tier.HOST.value: match.host,
        Tier.DISK.value: match.disk,
        "pending": match.pending,
    }
    return {tier: blocks * block for tier, blocks in by_tier.items() if blocks}


async def _pinned(
    tree: PrefixTree[_Owner], pins: Sequence[tuple[str, BlockHash]]
) -> dict[Node[_Owner], list[str]]:
    """The ids of the pins on each node."""
    ends: dict[BlockHash, list[str]] = {}
    for pin_id, last in pins:
        ends.setdefault(last, []).append(pin_id)
    pinned: dict[Node[_Owner], list[str]] = {}
    for node in tree if ends else ():
        for block in ends.keys() & node.own:
            for each in node.path():
                pinned.setdefault(each, []).extend(ends[block])
        await asyncio.sleep(0)
    return pinned


def _block_of(under: str) -> BlockHash:
    try:
        return int(under, 16)
    except ValueError as error:
        raise BadRequest(
            "under must be the id of a prefix, as this route answers it", param="under"
        ) from error


async def _find(tree: PrefixTree[_Owner], last: BlockHash) -> Node[_Owner]:
    """The node that ends in a block."""
    for looked, node in enumerate(tree):
        if node.last == last:
            return node
        if looked % _SLICE_NODES == 0:
            await asyncio.sleep(0)
    raise NotFound("no prompt of the last requests goes on under this prefix", param="under")
