"""The LMCache below one vLLM engine, as its adapter uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import takewhile
from typing import Any

from engine_adapter.errors import EngineError, EngineRejected, EngineUnavailable
from engine_adapter.lmcache.client import Coordinator, LmCacheNode, below_gpu, text_of
from engine_adapter.lmcache.options import LmCacheSpec
from engine_adapter.lmcache.salts import salt_for
from engine_adapter.lmcache.survey import Site, survey
from engine_adapter.lmcache.verbs import KvMover, TimedPins
from engine_adapter.types import (
    BelowGpu,
    Capability,
    Finding,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
)

# A look-up takes a few milliseconds, longer for very long prompts. A slower one is given up, and no other is
# sent until LMCache is healthy again.
_LOOKUP_S = 0.25
_LOOKUP_TOK_S = 500_000
_CHECK_S = 1.0


class LmCache:
    """The LMCache node beside an engine, and its coordinator. Its findings are those of the last `connect`.

    The engine's spec names the node, and the coordinator if that is not the node's own.
    """

    def __init__(self, spec: LmCacheSpec) -> None:
        """Raises EngineSpecError for an invalid address, ValueError if the spec names no node."""
        if spec.options.lmcache is None:
            raise ValueError(f"engine {spec.id!r} names no LMCache server")
        self._spec = spec
        self._node = LmCacheNode(spec, spec.options.lmcache)
        self._coordinators: dict[str, Coordinator] = {}
        if spec.options.lmcache_coordinator is not None:
            self._coordinator_at(spec.options.lmcache_coordinator)
        self._pins = TimedPins()
        self._model = ""
        self._tokens_per_block: int | None = None
        self._site: Site | None = None
        self.findings: tuple[Finding, ...] = ()
        self._doubted = False

    # --- what it is -----------------------------------------------------------------------------------

    async def connect(self, model: str, tokens_per_block: int | None) -> None:
        """Finds out what the node and the coordinator are; `model` is what the engine was started with."""
        self._model, self._tokens_per_block = model, tokens_per_block
        self._site, self.findings = await survey(self._spec, model, self._node, self._coordinator_at)
        self._doubted = False

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Capabilities it adds to the engine's, as of the last `connect`."""
        return self._site.capabilities if self._site is not None else frozenset()

    @property
    def tokens_per_chunk(self) -> int | None:
        """Chunk size in tokens; None if it cannot be used."""
        return self._site.tokens_per_chunk if self._site is not None else None

    async def has_changed(self) -> bool:
        """True if the result of the last `connect` is out of date."""
        try:
            async with asyncio.timeout(_CHECK_S):
                if self._site is None or self._doubted or self.findings:
                    now = await survey(self._spec, self._model, self._node, self._coordinator_at)
                    self._doubted = now[0] is None
                    return now[0] != self._site or _remedies(now[1]) != _remedies(self.findings)
                await self._node.check()
                await self._site.coordinator.check()
        except (EngineError, TimeoutError):
            return self._site is not None
        return False

    # --- what it holds --------------------------------------------------------------------------------

    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:
        """The part of a prompt that it holds; None if it does not answer in time. Never raises."""
        if self._site is None or self._doubted or prompt.token_ids is None:
            return None
        n_tokens = len(prompt.token_ids)
        text = text_of(prompt, self._site.tokens_per_chunk)
        try:
            async with asyncio.timeout(_LOOKUP_S + n_tokens / _LOOKUP_TOK_S):
                chunks = await self._mover(self._site).look(text, _salt(prompt)) if text else []
        except (EngineError, TimeoutError):
            self._doubted = True
            return None
        return below_gpu(chunks, n_tokens, self._site.tokens_per_chunk)

    async def stats(self) -> dict[str, Any]:
        """Statistics of its content, for people."""
        if self._site is None:
            return {"error": str(self.findings[0])} if self.findings else {}
        storage = (await self._node.status()).storage_manager
        known = await self._site.coordinator.stats()
        return {
            "tokens_per_chunk": self._site.tokens_per_chunk,
            "l1": {
                "objects": storage.l1_objects,
                "bytes": sum(l1.memory_used_bytes for l1 in storage.l1_managers.values()),
                "capacity_bytes": sum(l1.memory_total_bytes for l1 in storage.l1_managers.values()),
            },
            "directory": {
                "l1": {"objects": known.l1_count, "bytes": known.l1_size_bytes},
                "l2": {"objects": known.l2_count, "bytes": known.l2_size_bytes},
            },
            "pins": {
                "own": len(self._pins),
                "objects": await self._site.coordinator.pins() if Capability.PIN in self.capabilities else 0,
            },
        }

    # --- operations -----------------------------------------------------------------------------------

    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Offloads to L2, restores to L1, or flushes the whole engine. Restores one prompt at a time."""
        site = self._usable()
        mover = self._mover(site)
        if target.token_ids is not None:
            text, salt = text_of(target, site.tokens_per_chunk), _salt(target)
            steps = mover.restore(text, salt) if verb is KvVerb.RESTORE else mover.offload(text, salt)
        elif verb is KvVerb.RESTORE:
            what = "LMCache restores one prompt at a time: name its messages, prompt or token_ids"
            raise EngineRejected(what, status=400)
        else:
            steps = mover.offload(None, target.cache_salt) if verb is KvVerb.OFFLOAD else mover.flush()
        async with aclosing(steps):
            async for progress in steps:
                yield progress

    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        """Protects a prompt's chunks on L2 from eviction."""
        site = self._usable()
        mover, salt = self._mover(site), _salt(target)
        text = text_of(target, site.tokens_per_chunk)
        chunks = await mover.written(text, salt) if text else []
        held = sum(1 for _ in takewhile(lambda chunk: chunk.on_disk, chunks))
        if not held:
            return Pinned("", 0, ttl_s)
        tokens = text[: held * site.tokens_per_chunk]
        pin_id = await self._pins.add(site.coordinator, site.scope, tokens, salt or "", ttl_s)
        return Pinned(pin_id, held * self._blocks_per_chunk(site), ttl_s)

    async def unpin(self, pin_id: str) -> bool:
        """Ends a pin; False if there is none with that id."""
        return await self._pins.remove(pin_id)

    async def aclose(self) -> None:
        """Ends all pins and closes connections."""
        await self._pins.aclose()
        await self._node.aclose()
        for coordinator in self._coordinators.values():
            await coordinator.aclose()

    # --- inside ---------------------------------------------------------------------------------------

    def _usable(self) -> Site:
        if self._site is None:
            raise EngineUnavailable(str(self.findings[0]) if self.findings else "LMCache was not asked yet")
        return self._site

    def _mover(self, site: Site) -> KvMover:
        return KvMover(self._node, site, self._blocks_per_chunk(site))

    def _blocks_per_chunk(self, site: Site) -> int:
        return max(site.tokens_per_chunk // (self._tokens_per_block or site.tokens_per_chunk), 1)

    def _coordinator_at(self, url: str) -> Coordinator:
        if url not in self._coordinators:
            self._coordinators[url] = Coordinator(self._spec, url)
        return self._coordinators[url]


def _remedies(findings: tuple[Finding, ...]) -> list[str]:
    """Identity of a finding, without the error text in it."""
    return [finding.remedy for finding in findings]


def _salt(target: KvTarget) -> str | None:
    """The salt sent with the target's requests."""
    return salt_for(target.cache_salt, target.lora)
