"""The adapter of a vLLM with an LMCache below it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import Any, cast

from msgspec import structs
from typing_extensions import override

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineError, EngineRejected
from engine_adapter.hold import RequestBody
from engine_adapter.http.prepare import OutgoingRequest, route_of
from engine_adapter.lmcache.client import Coordinator, LmCacheNode, LmCacheSite, below_gpu, survey, text_of
from engine_adapter.lmcache.verbs import KvMover, TimedPins, embeddings_of, salt_for, without_lora
from engine_adapter.types import (
    BelowGpu,
    BlocksRemoved,
    BlocksStored,
    Capability,
    EngineInfo,
    EngineLoad,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Pinned,
    Role,
    Tier,
)
from engine_adapter.vllm.adapter import VllmAdapter
from engine_adapter.vllm.options import VllmSpec
from engine_adapter.vllm.prompts import RENDERED_ROUTES

# A look-up takes a few milliseconds, longer for very long prompts. A slower one is given up, and no other is
# sent until LMCache is healthy again.
_LOOKUP_S = 0.25
_LOOKUP_TOK_S = 500_000
_CHECK_S = 1.0
_GENERATES = RENDERED_ROUTES | {"/v1/chat/completions/batch", "/inference/v1/generate"}
_NO_PAIRS = Finding(
    "it has a role and an LMCache: kvpin moves KV between engines by NixlConnector alone",
    "leave out lmcache or role",
)
_MIXED = Finding(
    "it takes no cache_salt: LMCache would answer requests with one LoRA adapter from the KV of another",
    "upgrade vLLM, or serve LoRA adapters from engines without LMCache",
)


def make_vllm(spec: VllmSpec) -> VllmAdapter:
    """The adapter of a vLLM server; raises EngineSpecError for an invalid address."""
    if spec.options.lmcache is not None:
        return TieredVllmAdapter(spec, spec.options.lmcache)
    return VllmAdapter(spec)


class TieredVllmAdapter(VllmAdapter):
    """`EngineAdapter` of vLLM over LMCache: the node beside the engine, and its coordinator."""

    def __init__(self, spec: VllmSpec, node: str) -> None:
        """`node`: the node's address. The spec names the coordinator if that is not the node's own."""
        super().__init__(spec)
        self._node = LmCacheNode(spec, node)
        self._coordinators: dict[str, Coordinator] = {}
        if spec.options.lmcache_coordinator is not None:
            self._coordinator_at(spec.options.lmcache_coordinator)
        self._pins = TimedPins()
        self._model = ""  # what the engine was started with
        self._mover: KvMover | None = None  # if the node can be used
        self._flaws: tuple[Finding, ...] = ()  # what keeps kvpin from using the node
        self._doubted = False
        self._loras: dict[str, str] = {}  # the identity of each; LMCache knows neither name nor path
        self._salts = False

    # --- what it is -----------------------------------------------------------------------------------

    @override
    async def connect(self) -> EngineInfo:
        info = await super().connect()
        path = self._facts.model.root if self._facts is not None else None
        self._model, self._doubted = path or info.model, False
        site, self._flaws = await self._survey()
        moves, chunk = (frozenset(), None) if site is None else (site.capabilities, site.tokens_per_chunk)
        self._mover = None
        if site is not None:
            blocks = site.tokens_per_chunk // (info.tokens_per_block or site.tokens_per_chunk)
            self._mover = KvMover(self._node, site, max(blocks, 1))
        paths = info.lora_paths
        self._loras = {name: f"{name}\0{paths[name]}" if name in paths else name for name in info.loras}
        self._salts = Capability.CACHE_SALT in info.capabilities
        self.capabilities = info.capabilities | moves
        return replace(
            info,
            capabilities=self.capabilities,
            tokens_per_chunk=chunk,
            shared_tiers=self.spec.options.lmcache,
            renders_embeds=False,  # their salts here are not the client's, see `prepare`
        )

    @override
    async def load(self) -> EngineLoad:
        load, changed = await asyncio.gather(super().load(), self._is_outdated())
        return replace(load, outdated=load.outdated or changed)

    async def _is_outdated(self) -> bool:
        """True if LMCache is no longer what it was at the last `connect`."""
        before = None if self._mover is None else self._mover.site
        try:
            async with asyncio.timeout(_CHECK_S):
                if before is None or self._doubted or self._flaws:
                    site, flaws = await self._survey()
                    # Another one is told until `connect`: the rest of this check may fail, and tell nothing.
                    self._doubted = site is None or site != before
                    # The text of a problem may repeat an error.
                    return site != before or [f.remedy for f in flaws] != [f.remedy for f in self._flaws]
                await self._node.check()
                await before.coordinator.check()
        except (EngineError, TimeoutError):
            return before is not None
        return False

    @override
    def findings(self) -> tuple[Finding, ...]:
        mixed = (_MIXED,) if self._loras and not self._salts else ()
        alone = (_NO_PAIRS,) if self.spec.role is not Role.BOTH else ()
        return (*super().findings(), *self._flaws, *mixed, *alone)

    @override
    async def stats(self) -> dict[str, Any]:
        own = await super().stats()
        try:
            return own | {"lmcache": await self._stats_below()}
        except EngineError as error:
            return own | {"lmcache": {"error": str(error)}}

    async def _stats_below(self) -> dict[str, Any]:
        if self._mover is None:
            return {"error": str(self._flaws[0])} if self._flaws else {}
        site, storage = self._mover.site, (await self._node.status()).storage_manager
        known = await site.coordinator.stats()
        return {
            "tokens_per_chunk": site.tokens_per_chunk,
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
                "objects": await site.coordinator.pins() if Capability.PIN in site.capabilities else 0,
            },
        }

    # --- requests -------------------------------------------------------------------------------------

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """A salt keeps KV apart that LMCache would mix, also without reuse."""
        if isinstance(body, JsonBody) and self._salts and route_of(path) in _GENERATES:
            salt, model = body.get("cache_salt"), body.get("model")
            if salt is None or isinstance(salt, str):
                sent = salt_for(salt, self._loras.get(model), embeddings_of(body))
                body = body if sent == salt else body.replace(cache_salt=sent)
        return super().prepare(method, path, headers, body)

    @override
    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:
        mover = self._mover
        if mover is None or self._doubted or prompt.token_ids is None:
            return None
        n_tokens, per_chunk = len(prompt.token_ids), mover.site.tokens_per_chunk
        text = text_of(prompt, per_chunk)
        try:
            async with asyncio.timeout(_LOOKUP_S + n_tokens / _LOOKUP_TOK_S):
                chunks = await mover.look(text, self._salt(prompt)) if text else []
        except (EngineError, TimeoutError):
            self._doubted = True
            return None
        return below_gpu(chunks, n_tokens, per_chunk)

    # --- KV -------------------------------------------------------------------------------------------

    @override
    def _reading(self) -> Callable[[KvEvent], Iterable[KvEvent]]:
        """LMCache's events of lower tiers, which come through vLLM, have neither salt nor LoRA adapter. They
        could be anybody's, so they are left out."""
        read = super()._reading()
        return lambda sent: filter(None, map(self._of_gpu, read(sent)))

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Offloads to L2 or restores to L1 one prompt, a salt or everything. A flush drops vLLM's cache and
        what LMCache holds of its model."""
        before = KvProgress(0, 0)
        if verb is not KvVerb.FLUSH:
            steps = [self._move(await self._usable(Capability(verb.value)), verb, target)]
        elif self._mover is None:
            steps = [super().operate(verb, target)]
        else:
            # LMCache last: blocks of vLLM may have been on their way there.
            steps = [super().operate(verb, target), self._mover.flush()]
        for each in steps:
            now = before
            async with aclosing(each) as progresses:
                async for progress in progresses:
                    now = before.plus(progress)
                    yield now
            before = now

    def _move(self, mover: KvMover, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        if target.token_ids is not None:
            text, salt = text_of(target, mover.site.tokens_per_chunk), self._salt(target)
            return mover.restore(text, salt) if verb is KvVerb.RESTORE else mover.offload(text, salt)
        if verb is KvVerb.RESTORE:
            what = "LMCache restores one prompt at a time: name its messages, prompt or token_ids"
            raise EngineRejected(what, status=400)
        return mover.offload(None, target.cache_salt)

    @override
    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        """Protects a prompt's chunks on L2 from eviction."""
        mover, salt = await self._usable(Capability.PIN), self._salt(target)
        site = mover.site
        text = text_of(target, site.tokens_per_chunk)
        chunks = await mover.written(text, salt) if text else []
        held = sum(1 for _ in takewhile(lambda chunk: chunk.on_disk, chunks))
        if not held:
            return Pinned("", 0, ttl_s)
        tokens = text[: held * site.tokens_per_chunk]
        pin_id = await self._pins.add(site.coordinator, site.scope, tokens, salt or "", ttl_s)
        return Pinned(pin_id, held * mover.blocks_per_chunk, ttl_s)

    @override
    async def unpin(self, pin_id: str) -> bool:
        await self.require(Capability.PIN)
        return await self._pins.remove(pin_id)

    @override
    def holds_pin(self, pin_id: str) -> bool:
        return pin_id in self._pins

    @override
    async def aclose(self) -> None:
        await self._pins.aclose()
        await self._node.aclose()
        for coordinator in self._coordinators.values():
            await coordinator.aclose()
        await super().aclose()

    # --- inside ---------------------------------------------------------------------------------------

    async def _survey(self) -> tuple[LmCacheSite | None, tuple[Finding, ...]]:
        return await survey(self.spec, self._model, self._node, self._coordinator_at)

    async def _usable(self, capability: Capability) -> KvMover:
        await self.require(capability)
        return cast("KvMover", self._mover)

    def _coordinator_at(self, url: str) -> Coordinator:
        if url not in self._coordinators:
            self._coordinators[url] = Coordinator(self.spec, url)
        return self._coordinators[url]

    def _identity(self, lora: str | None) -> str | None:
        return None if lora is None else self._loras.get(lora, lora)

    def _salt(self, target: KvTarget) -> str | None:
        """The salt sent with the target's requests."""
        return salt_for(target.cache_salt, self._identity(target.lora))

    def _of_gpu(self, event: KvEvent) -> KvEvent | None:
        """An event of vLLM's GPU with the client's own salt; None for one of a lower tier."""
        match event:
            case BlocksStored(tier=Tier.GPU, salt=salt, lora=lora):
                return structs.replace(event, salt=without_lora(salt, self._identity(lora)))
            case BlocksStored() | BlocksRemoved() if event.tier is not Tier.GPU:
                return None
            case _:
                return event
