"""The adapter of a vLLM with an LMCache below it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from msgspec import structs
from typing_extensions import override

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineError, NotSupported
from engine_adapter.hold import RequestBody
from engine_adapter.http.prepare import route_of
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.lmcache import LmCache
from engine_adapter.lmcache.salts import embeddings_of, salt_for, without_lora
from engine_adapter.types import (
    BelowGpu,
    BlocksRemoved,
    BlocksStored,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
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

_MOVES = frozenset({Capability.OFFLOAD, Capability.RESTORE, Capability.PIN})
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
        return TieredVllmAdapter(spec, LmCache(spec))
    return VllmAdapter(spec)


class TieredVllmAdapter(VllmAdapter):
    """`EngineAdapter` of vLLM over LMCache."""

    def __init__(self, spec: VllmSpec, lower: LmCache) -> None:
        super().__init__(spec)
        self._lower = lower
        self._loras: frozenset[str] = frozenset()
        self._salts = False

    # --- what it is -----------------------------------------------------------------------------------

    @override
    async def connect(self) -> EngineInfo:
        info = await super().connect()
        path = self._facts.model.root if self._facts is not None else None
        await self._lower.connect(path or info.model, info.tokens_per_block)
        self._loras = info.loras
        self._salts = Capability.CACHE_SALT in info.capabilities
        self.capabilities = info.capabilities | self._lower.capabilities
        return replace(
            info,
            capabilities=self.capabilities,
            tokens_per_chunk=self._lower.tokens_per_chunk,
            shared_tiers=self.spec.options.lmcache,
            renders_embeds=False,  # their salts here are not the client's, see `prepare`
        )

    @override
    async def load(self) -> EngineLoad:
        load, changed = await asyncio.gather(super().load(), self._lower.has_changed())
        return replace(load, outdated=load.outdated or changed)

    @override
    def findings(self) -> tuple[Finding, ...]:
        mixed = (_MIXED,) if self._loras and not self._salts else ()
        alone = (_NO_PAIRS,) if self.spec.role is not Role.BOTH else ()
        return (*super().findings(), *self._lower.findings, *mixed, *alone)

    @override
    def not_supported(self, capability: Capability) -> NotSupported:
        if capability in _MOVES and self._lower.findings:
            instead = str(self._lower.findings[0])
            return NotSupported(capability.value, engine=self.spec.id, instead=instead)
        return super().not_supported(capability)

    @override
    async def stats(self) -> dict[str, Any]:
        own = await super().stats()
        try:
            return own | {"lmcache": await self._lower.stats()}
        except EngineError as error:
            return own | {"lmcache": {"error": str(error)}}

    # --- requests -------------------------------------------------------------------------------------

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """A salt keeps KV apart that LMCache would mix, also without reuse."""
        if isinstance(body, JsonBody) and self._salts and route_of(path) in _GENERATES:
            salt, model = body.get("cache_salt"), body.get("model")
            lora = model if model in self._loras else None
            if salt is None or isinstance(salt, str):
                sent = salt_for(salt, lora, embeddings_of(body))
                body = body if sent == salt else body.replace(cache_salt=sent)
        return super().prepare(method, path, headers, body)

    @override
    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:
        return await self._lower.lookup(prompt)

    # --- KV -------------------------------------------------------------------------------------------

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        """LMCache's events of lower tiers, which come through vLLM, have neither salt nor LoRA adapter. They
        could be anybody's, so they are left out."""
        async with aclosing(super().events(since)) as events:
            async for event in events:
                kept = _of_gpu(event)
                if kept is not None:
                    yield kept

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """A flush drops vLLM's cache and what LMCache holds of its model."""
        if verb is not KvVerb.FLUSH:
            await self.require(Capability(verb.value))
            async with aclosing(self._lower.operate(verb, target)) as steps:
                async for progress in steps:
                    yield progress
            return
        before = KvProgress(0, 0)
        if self._lower.tokens_per_chunk is None:
            flushes = [super().operate(verb, target)]
        else:
            # LMCache last: blocks of vLLM may have been on their way there.
            flushes = [super().operate(verb, target), self._lower.operate(verb, target)]
        for flush in flushes:
            async with aclosing(flush) as steps:
                async for progress in steps:
                    now = before.plus(progress)
                    yield now
            before = now

    @override
    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        await self.require(Capability.PIN)
        return await self._lower.pin(target, ttl_s)

    @override
    async def unpin(self, pin_id: str) -> bool:
        await self.require(Capability.PIN)
        return await self._lower.unpin(pin_id)

    @override
    async def aclose(self) -> None:
        await self._lower.aclose()
        await super().aclose()


def _of_gpu(event: KvEvent) -> KvEvent | None:
    """An event of vLLM's GPU with the client's own salt; None for one of a lower tier."""
    match event:
        case BlocksStored(tier=Tier.GPU, salt=salt, lora=lora):
            return structs.replace(event, salt=without_lora(salt, lora))
        case BlocksStored() | BlocksRemoved() if event.tier is not Tier.GPU:
            return None
        case _:
            return event
