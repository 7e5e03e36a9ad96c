"""The prompts of the last requests as block hashes: those that this worker keeps, and those of the others.

They are hashed anew for each who asks, in slices, so that requests are served in between. No prompt text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from proxy.core.index.blocks import BlockHash, chain
from proxy.core.peers.messages import packed
from proxy.core.pins import PinBook
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt
from proxy.request.records import RequestLog

# Where a worker tells the others of its own.
PROMPTS_PATH = "/admin/v1/kept_prompts"
# Blocks that are hashed in a row: 0.3 ms.
_SLICE_BLOCKS = 1024


class KeptPrompt(msgspec.Struct, frozen=True, array_like=True):
    """The prompt of a request.

    Attributes:
        started: when the request came, in Unix time.
        model: the pool that it was for.
        hashes: its full blocks, as `packed` makes them.
    """

    request_id: str
    started: float
    model: str
    lora: str | None
    tenant: str | None
    hashes: bytes


class PromptsAndPins(msgspec.Struct, frozen=True, array_like=True):
    """The prompts and pins of one worker, or of all.

    Attributes:
        prompts: the oldest first.
        pins: the id of each pin, and the last block that it protects.
    """

    prompts: list[KeptPrompt]
    pins: list[tuple[str, BlockHash]]


async def _nobody() -> Iterable[bytes]:
    return ()


class KeptPrompts:
    """Gathers the prompts and pins of all workers."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestLog,
        pins: PinBook,
        others: Callable[[], Awaitable[Iterable[bytes]]] = _nobody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others`: asks the other workers for what they tell. `clock` gives monotonic seconds."""
        self._fleet, self._requests, self._pins = fleet, requests, pins
        self._others, self._clock = others, clock

    async def own(self) -> PromptsAndPins:
        """Prompts and pins of this process."""
        prompts = list[KeptPrompt]()
        for record in list(self._requests):
            prompt, model = record.prompt, record.served_as
            pool = self._fleet.pools.get(model) if model is not None else None
            if prompt is not None and pool is not None:
                hashes = packed(await _hashes(pool, prompt))
                prompts.append(
                    KeptPrompt(
                        record.request_id, record.started, pool.model, prompt.lora, record.tenant, hashes
                    )
                )
            await asyncio.sleep(0)
        pins = self._pins.active(self._clock())
        return PromptsAndPins(
            prompts, [(pin.pin_id, pin.last_block) for pin in pins if pin.last_block is not None]
        )

    async def told(self) -> bytes:
        """The same, for another worker."""
        return msgspec.msgpack.encode(await self.own())

    async def all(self) -> PromptsAndPins:
        """Prompts and pins of all workers."""
        own, others = await asyncio.gather(self.own(), self._others())
        kept = [own, *(msgspec.msgpack.decode(each, type=PromptsAndPins) for each in others)]
        prompts = sorted((prompt for each in kept for prompt in each.prompts), key=lambda each: each.started)
        return PromptsAndPins(prompts, [pin for each in kept for pin in each.pins])


async def _hashes(pool: Pool, prompt: Prompt) -> Sequence[BlockHash]:
    """The blocks of a prompt."""
    root, block = pool.root_of(prompt.salt, prompt.lora), pool.tokens_per_block
    known: tuple[BlockHash, ...] = ()
    step = _SLICE_BLOCKS * block
    for end in range(step, len(prompt.token_ids) + step, step):
        extra_ids = prompt.extra_ids and prompt.extra_ids[:end]
        known = chain(root, prompt.token_ids[:end], extra_ids, block, known).hashes
        await asyncio.sleep(0)
    return known
