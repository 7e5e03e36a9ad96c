"""The prefix tree of the last requests' prompts, and which engines hold which part of it. No prompt text,
unless the first words of each part are asked for.

It is made anew for each who asks, in slices, so that requests are served in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import msgspec

from proxy.core.index.blocks import BlockHash, chain
from proxy.core.index.tree import PrefixNode, PrefixTree
from proxy.core.peers.messages import packed, unpacked
from proxy.core.retention import PinBook
from proxy.errors import BadRequest, NotFound
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt
from proxy.request.records import RequestRecords

# Where a worker tells the others of its own.
PROMPTS_PATH = "/workers/kept_prompts"
# Blocks that are hashed in a row: 0.3 ms.
_SLICE_BLOCKS = 1024
# Tokens whose text names a prefix.
_NAME_TOKENS = 12


class KeptPrompt(msgspec.Struct, frozen=True, array_like=True):
    """The prompt of a request."""

    request_id: str
    started: float  # when the request came, in Unix time
    model: str  # the pool that it was for
    lora: str | None
    tenant: str | None
    session: str | None  # the conversation that its client named
    hashes: bytes  # its full blocks, as `packed` makes them


class PromptsAndPins(msgspec.Struct, frozen=True, array_like=True):
    """The prompts and pins of one worker, or of all."""

    prompts: list[KeptPrompt]  # the oldest first
    pins: list[tuple[str, BlockHash]]  # the id of each pin, and the last block that it protects


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
        session: the conversation of that request, if its client named one.
        words: the first words of it, if they were asked for. They are prompt text.
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
    session: str | None
    words: str | None
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


_Tree = PrefixTree[tuple[KeptPrompt, Pool]]
_Node = PrefixNode[tuple[KeptPrompt, Pool]]
_Pinned = dict[_Node, list[str]]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Gathers the prompts and pins of all workers, and tells what engines hold of them.

    `_others` asks the other workers for theirs. `_clock` gives monotonic seconds.
    """

    _fleet: Fleet
    _requests: RequestRecords
    _pins: PinBook
    _others: Callable[[], Awaitable[Iterable[bytes]]]
    _clock: Callable[[], float] = time.monotonic

    async def own(self) -> PromptsAndPins:
        """Prompts and pins of this process."""
        prompts = list[KeptPrompt]()
        for record in list(self._requests):
            prompt, model, session = record.prompt, record.served_as, record.session
            pool = self._fleet.pools.get(model) if model is not None else None
            if prompt is not None and pool is not None:
                name = session.name if session is not None else None
                whose, hashes = (pool.model, prompt.lora, record.tenant, name), await _hashes(pool, prompt)
                prompts.append(KeptPrompt(record.request_id, record.started, *whose, packed(hashes)))
            await asyncio.sleep(0)
        pins = self._pins.active(self._clock())
        return PromptsAndPins(
            prompts, [(pin.pin_id, pin.last_block) for pin in pins if pin.last_block is not None]
        )

    async def told(self) -> bytes:
        """The prompts and pins of this process, encoded for another worker."""
        return msgspec.msgpack.encode(await self.own())

    async def all(self) -> PromptsAndPins:
        """Prompts and pins of all workers."""
        own, others = await asyncio.gather(self.own(), self._others())
        kept = [own, *(msgspec.msgpack.decode(each, type=PromptsAndPins) for each in others)]
        prompts = sorted((prompt for each in kept for prompt in each.prompts), key=lambda each: each.started)
        return PromptsAndPins(prompts, [pin for each in kept for pin in each.pins])

    def words(self, request_id: str, start: int) -> str | None:
        """The first words of a prompt from a token on; None for a prompt of another worker."""
        record = self._requests.get(request_id)
        pool = self._fleet.pools.get(record.served_as or "") if record is not None else None
        if record is None or record.prompt is None or pool is None or pool.prompts is None:
            return None
        return pool.prompts.decode(record.prompt.token_ids[start : start + _NAME_TOKENS])

    async def look(self, under: str | None, depth: int, most: int, *, words: bool = False) -> PrefixesAnswer:
        """The widest prefixes.

        Args:
            under: the prefix to begin with; None for the beginnings of all prompts.
            depth: how many below each other.
            most: how many in all.
            words: with the first words of each.

        Raises:
            NotFound: no prompt that kvpin keeps goes through `under`.
            BadRequest: `under` is no id of a prefix.
        """
        try:
            block = int(under, 16) if under is not None else None
        except ValueError as error:
            why = "under must be the id of a prefix, as this route answers it"
            raise BadRequest(why, param="under") from error
        kept = await self.all()
        tree, requests = _Tree(), 0
        for prompt in kept.prompts:
            if (pool := self._fleet.pools.get(prompt.model)) is not None:
                tree.add(unpacked(prompt.hashes), (prompt, pool))
                requests += 1
            await asyncio.sleep(0)
        top = await _find(tree, block) if block is not None else None
        tops = [*tree.roots.values()] if top is None else [top]
        pinned = await _pinned(tree, kept.pins)
        path = [self._answer(node, pinned) for node in top.path()] if top is not None else []
        shown, unshown = await self._widest(tops, pinned, depth, most)
        return PrefixesAnswer(
            requests=requests,
            tokens=sum(node.blocks * node.newest[1].tokens_per_block for node in tree.roots.values()),
            path=path,
            prefixes=self._with_words(shown) if words else shown,
            unshown=unshown,
        )

    def _with_words(self, prefixes: list[PrefixAnswer]) -> list[PrefixAnswer]:
        for prefix in prefixes:
            prefix.words = self.words(prefix.request_id, prefix.start)
            self._with_words(prefix.children)
        return prefixes

    async def _widest(
        self, tops: Iterable[_Node], pinned: _Pinned, depth: int, most: int
    ) -> tuple[list[PrefixAnswer], int]:
        """The widest nodes from `tops` on, and how many of `tops` are left out."""
        order, shown = count(), list[PrefixAnswer]()  # of equals, the first one first
        left = list[tuple[int, int, int, _Node, PrefixAnswer | None]]()
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

    def _answer(self, node: _Node, pinned: _Pinned) -> PrefixAnswer:
        prompt, pool = node.newest
        block, matches = pool.tokens_per_block, pool.index.match(node.own)
        held = sorted(matches.items(), key=lambda item: (-item[1].blocks, item[0]))
        return PrefixAnswer(
            id=f"{node.last:016x}",
            request_id=prompt.request_id,
            model=pool.model,
            lora=prompt.lora,
            tenant=prompt.tenant,
            session=prompt.session,
            words=None,
            start=node.start * block,
            end=node.end * block,
            below=node.blocks * block,
            requests=node.chains,
            last_used=prompt.started,
            engines=len(matches),
            holders=[
                Holder(engine, {tier: tokens for tier, tokens in match.tokens(block).items() if tokens})
                for engine, match in held[:HOLDERS]
            ],
            pins=pinned.get(node, []),
            children=[],
            unshown=len(node.children),
        )


async def _hashes(pool: Pool, prompt: Prompt) -> Sequence[BlockHash]:
    root, block = pool.root_of(prompt.salt, prompt.lora), pool.tokens_per_block
    known: tuple[BlockHash, ...] = ()
    step = _SLICE_BLOCKS * block
    for end in range(step, len(prompt.token_ids) + step, step):
        extra_ids = prompt.extra_ids and prompt.extra_ids[:end]
        known = chain(root, prompt.token_ids[:end], extra_ids, block, known).hashes
        await asyncio.sleep(0)
    return known


async def _pinned(tree: _Tree, pins: Sequence[tuple[str, BlockHash]]) -> _Pinned:
    ends: dict[BlockHash, list[str]] = {}
    for pin_id, last in pins:
        ends.setdefault(last, []).append(pin_id)
    pinned: _Pinned = {}
    for node in tree if ends else ():
        for block in ends.keys() & node.own:
            for each in node.path():
                pinned.setdefault(each, []).extend(ends[block])
        await asyncio.sleep(0)
    return pinned


async def _find(tree: _Tree, last: BlockHash) -> _Node:
    for looked, node in enumerate(tree):
        if node.last == last:
            return node
        if looked % _SLICE_NODES == 0:
            await asyncio.sleep(0)
    raise NotFound("no prompt of the last requests goes on under this prefix", param="under")
