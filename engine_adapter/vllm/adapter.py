"""The adapter of vLLM: its HTTP routes and its event sockets."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, cast

from msgspec import structs
from typing_extensions import override

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.events.keys import read_vllm_keys
from engine_adapter.events.subscriber import KvEventSubscriber
from engine_adapter.hold import Hold
from engine_adapter.http.adapter import HttpAdapter
from engine_adapter.http.headers import Headers
from engine_adapter.http.models import read_models
from engine_adapter.types import (
    MESSAGES_ROUTES,
    TRANSLATED_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    RenderedPrompt,
    TokenIds,
)
from engine_adapter.vllm import embeddings, prompts
from engine_adapter.vllm.discovery import VllmFacts, discover, event_endpoints
from engine_adapter.vllm.event_watch import Copies, EventWatch, flush
from engine_adapter.vllm.findings import findings_of
from engine_adapter.vllm.kv_transfer import role_of, transfer_of
from engine_adapter.vllm.metrics import look
from engine_adapter.vllm.options import VllmSpec, rank_headers
from engine_adapter.vllm.requests import RequestShaper, longest_chat
from engine_adapter.vllm.routes import ROUTES
from engine_adapter.vllm.template_input import VLLM_INPUT

_INSTEAD = {
    Capability.KV_EVENTS: "kvpin learns what it holds from its answers; start it with --kv-events-config",
    Capability.CACHED_TOKENS: "start it with --enable-prompt-tokens-details",
    Capability.RENDER: "chats are followed up to their first image; start it with --enable-scale-out",
    Capability.CACHE_SALT: "serve tenants that must not share KV from engines of their own, or upgrade it",
    Capability.FLUSH: "start it with VLLM_SERVER_DEV_MODE=1, or let eviction take the KV",
    Capability.OFFLOAD: "start it with an LMCache server and name that: lmcache=http://HOST:PORT",
    Capability.RESTORE: "start it with an LMCache server and name that: lmcache=http://HOST:PORT; "
    '"fallback": "warm" computes a prefix again by a one-token prefill',
    Capability.PIN: "start it with an LMCache server and name that: lmcache=http://HOST:PORT",
}  # fmt: skip
# Seconds that the replay socket may be silent. A thread of the server answers while its worker computes.
# On SGLang that thread waits for the computation.
_SILENT_S = 3.0


class VllmAdapter(HttpAdapter):
    """`EngineAdapter` of vLLM."""

    spec: VllmSpec
    instead = _INSTEAD

    def __init__(self, spec: VllmSpec) -> None:
        super().__init__(spec)
        self._rank = spec.options.dp_rank
        self._own_headers = Headers.of(rank_headers(self._rank).items()).raw
        self._facts: VllmFacts | None = None
        self._instance = ""
        self._queries = 0
        self._watch = EventWatch(None)
        self._shaper = RequestShaper(asks_usage=False)
        self.transfer = transfer_of(spec, None)

    # --- what it is -----------------------------------------------------------------------------------

    @override
    async def connect(self) -> EngineInfo:
        facts = await discover(self._control, self.spec, self._facts)
        metrics = facts.metrics
        if self._facts is None or self._is_another(metrics.identity, metrics.queries):
            self._instance = metrics.identity or uuid.uuid4().hex
            self._watch = EventWatch(metrics.blocks)
        self._facts, self._queries = facts, metrics.queries
        self.transfer = transfer_of(self.spec, facts.kv_transfer)
        self.capabilities = _capabilities(facts, self.spec)
        self._shaper = RequestShaper(
            asks_usage=facts.trials.reports_cached is not False,
            longest_chat=longest_chat(facts.version, facts.model.max_model_len),
            renders=facts.renders,
        )
        return EngineInfo(
            model=facts.model.name,
            instance=self._instance,
            names_process=metrics.identity is not None,
            rendering=f"model {facts.model.root}" if facts.model.root else "",
            capabilities=self.capabilities,
            tokens_per_block=metrics.block_size,
            max_model_len=facts.model.max_model_len,
            tokenizer=self.spec.tokenizer or facts.model.root,
            gpu_blocks=metrics.blocks,
            version=f"vLLM {facts.version}".rstrip(),
            loras=facts.model.loras,
            lora_paths=facts.model.lora_paths,
            loads_loras=facts.loads_loras,
            shares_prefill=True,
            renders_embeds=metrics.block_size is not None and (facts.tokenizes or facts.renders),
            # Its own route for responses ignores the rank.
            served_as_chats=MESSAGES_ROUTES if facts.renders and self._rank is None else TRANSLATED_ROUTES,
            ranks=metrics.addressable_ranks,
            routes=ROUTES,
            template_input=VLLM_INPUT,
            card=facts.model.card,
            role=role_of(self.spec, facts.kv_transfer),
        )

    @override
    async def load(self) -> EngineLoad:
        metrics = await look(self._control, self._rank)
        if self._facts is not None and self._is_another(metrics.identity, metrics.queries):
            raise EngineUnavailable("the engine was restarted")
        self._queries = metrics.queries
        return EngineLoad(
            metrics.running, metrics.waiting, metrics.usage, outdated=await self._serves_others()
        )

    async def _serves_others(self) -> bool:
        """True if its models or LoRA adapters changed. A server that cannot load any is not asked."""
        known = self._facts
        if known is None or not (known.loads_loras or known.metrics.identity is None):
            return False
        return read_models(await self._control.get("/v1/models"), self.spec.model) != known.model

    @override
    def findings(self) -> tuple[Finding, ...]:
        if self._facts is None:
            return ()
        is_silent = self._subscriber is not None and self._subscriber.replay_is_silent
        return findings_of(self._facts, self.spec, replay_is_silent=is_silent)

    @override
    async def stats(self) -> dict[str, Any]:
        metrics = await look(self._control, self._rank)
        subscriber = self._subscriber
        return {
            "prefix_cache": {
                "queried_tokens": metrics.queries,
                "hit_tokens": metrics.hits,
                "fetched_tokens": metrics.fetched,
            },
            "requests": {"running": metrics.running, "waiting": metrics.waiting},
            "blocks": {"capacity": metrics.blocks, "known": self._watch.blocks, "in_use": metrics.usage},
            "events": {
                "followed": self._watch.is_followed,
                "asks_for_reuse": self._watch.wants_reuse_told,
                **(asdict(subscriber.counts) if subscriber is not None else {}),
            },
        }

    # --- requests -------------------------------------------------------------------------------------

    @override
    def _hold(self, path: str, body: JsonBody, prompt: KvTarget | None) -> Hold:
        return self._shaper.hold(path, body, prompt, tell_reuse=self._watch.wants_reuse_told)

    @override
    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        facts = await self._able(Capability.TOKENIZE)
        model = _served_name(facts, body)
        if facts.renders:
            return (await prompts.render(self._control, path, body, model)).token_ids
        return await prompts.tokenize(self._control, path, body, model)

    @override
    async def render(self, path: str, body: JsonBody) -> RenderedPrompt:
        if embeddings.has_embeddings(path, body):
            block = (await self._able(Capability.TOKENIZE)).metrics.block_size
            if block is None:
                raise EngineRejected("its block size is unknown", status=400)
            return await embeddings.render(path, body, block=block, tokenize=self.tokenize)
        facts = await self._able(Capability.RENDER)
        return await prompts.render(self._control, path, body, _served_name(facts, body))

    # --- KV -------------------------------------------------------------------------------------------

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        facts = await self._able(Capability.KV_EVENTS)
        endpoints = event_endpoints(facts, self.spec)
        if endpoints is None:
            raise self.not_supported(Capability.KV_EVENTS)
        watch, copies = self._watch, Copies(facts.blocks_per_chunk)
        if since is not None:
            # Copies of blocks were counted before, and are not known here: too little may be held now.
            since = structs.replace(since, complete=False)
        self._subscriber = KvEventSubscriber(
            endpoints, read_keys=read_vllm_keys, idle_timeout_s=_SILENT_S, since=since
        )
        with watch.follower():
            async with aclosing(self._subscriber.events()) as events:
                async for sent in events:
                    for event in copies.count(sent):
                        yield event
                        watch.note(event)

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """It can only flush everything, on all ranks."""
        facts = await self._able(Capability(verb.value))
        self.check_flushes_all(target)
        ranks = (None,) if self._rank is None else facts.metrics.ranks or (self._rank,)
        offloads = facts.kv_transfer is not None and facts.kv_transfer.offloads
        yield await flush(self._control, facts.model.name, ranks, self._watch, offloads=offloads)

    # --- inside ---------------------------------------------------------------------------------------

    async def _able(self, capability: Capability) -> VllmFacts:
        await self.require(capability)
        return cast("VllmFacts", self._facts)

    def _is_another(self, identity: str | None, queries: int) -> bool:
        """True if the server's process was replaced since `connect`. Where `/metrics` has no identity, a
        counter that fell shows it."""
        return queries < self._queries if identity is None else identity != self._instance


def _capabilities(facts: VllmFacts, spec: VllmSpec) -> frozenset[Capability]:
    has = {
        Capability.KV_EVENTS: event_endpoints(facts, spec) is not None,
        Capability.CACHED_TOKENS: facts.trials.reports_cached is True,
        Capability.TOKENIZE: facts.tokenizes or facts.renders,
        Capability.RENDER: facts.renders,
        Capability.CACHE_SALT: facts.trials.takes_salt is True,
        Capability.FLUSH: facts.resets,
    }
    return frozenset(capability for capability, there in has.items() if there)


def _served_name(facts: VllmFacts, body: JsonBody) -> str:
    """The LoRA adapter that a request names, else the base model; clients may know that by another name."""
    name = body.get("model")
    return name if name in facts.model.loras else facts.model.name
