"""The adapter of vLLM: its HTTP routes, its event sockets, and findings about the server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, cast

from msgspec import structs
from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.detect import release_of
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.events.fields import read_vllm_keys
from engine_adapter.events.options import RANKS
from engine_adapter.hold import Hold
from engine_adapter.http.adapter import rank_headers, read_models
from engine_adapter.types import (
    MESSAGES_ROUTES,
    TRANSLATED_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    Finding,
    KvEvent,
    KvTarget,
    RenderedPrompt,
    TokenIds,
)
from engine_adapter.vllm import prompts, requests
from engine_adapter.vllm.copies import Copies
from engine_adapter.vllm.discovery import VllmFacts, VllmMetrics, discover, event_endpoints, is_several, look
from engine_adapter.vllm.kv_transfer import findings_of_transfer, role_of, transfer_of
from engine_adapter.vllm.options import ROUTES, VllmSpec
from engine_adapter.vllm.prompts import VLLM_INPUT
from engine_adapter.vllm.requests import RequestShaper, longest_chat

# --- findings, with the flags that fix them -------------------------------------------------------------

_FLAG = (
    """start it with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","""
    """"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'"""
)
_EVENTS = (Capability.KV_EVENTS,)
_NO_EVENTS = Finding("it sends no KV events: kvpin learns what it holds from its answers", _FLAG, _EVENTS)
_NO_SOURCES = Finding(
    "it does not say where its KV events are: kvpin learns what it holds from its answers",
    f"{_FLAG} and name both addresses: events=tcp://HOST:5557,replay=tcp://HOST:5657",
    _EVENTS,
)
_NO_REPLAY = Finding(
    "missed events cannot be replayed: kvpin does not know what it held before kvpin connected, or while "
    "events were lost",
    'give --kv-events-config a "replay_endpoint" that this machine reaches',
)
_SILENT = Finding(
    "its replay socket does not answer: kvpin does not know what it held before kvpin connected",
    'let kvpin\'s machine reach the "replay_endpoint" of --kv-events-config, or name it: replay=tcp://HOST:PORT',
)
_LMCACHE = Finding(
    "it uses an LMCache that kvpin does not know: its hits are not predicted, and LMCache mixes up the KV of "
    "LoRA adapters and of prompt embeddings",
    "name its server: lmcache=http://HOST:PORT",
)
_UNNAMED_CHUNKS = Finding(
    "it offloads several blocks together and does not say which: what comes back from there is not predicted",
    'add "self_describing_kv_events":true to the "kv_connector_extra_config" of its --kv-transfer-config',
)

_OLDEST = (0, 24)


def findings_of(facts: VllmFacts, spec: VllmSpec, *, replay_is_silent: bool = False) -> tuple[Finding, ...]:
    """All findings, the most important first. `replay_is_silent`: the replay socket did not answer."""
    if facts.wrong_kind is not None:
        return (facts.wrong_kind,)  # the others name flags that it has not
    found = [*_cache_findings(facts), *_event_findings(facts, spec)]
    if facts.metrics.lmcache and spec.options.lmcache is None:
        found.insert(0, _LMCACHE)
    extra = facts.kv_transfer.kv_connector_extra_config if facts.kv_transfer else {}
    if facts.blocks_per_chunk > 1 and extra.get("self_describing_kv_events") is not True:
        found.append(_UNNAMED_CHUNKS)
    if replay_is_silent:
        found.append(_SILENT)
    return (*found, *_route_findings(facts, spec), *findings_of_transfer(spec, facts.kv_transfer))


def _cache_findings(facts: VllmFacts) -> Iterator[Finding]:
    if facts.metrics.caching is False:
        yield Finding(
            "prefix caching is off: it reuses nothing", "start it without --no-enable-prefix-caching"
        )
    if facts.metrics.block_size is None:
        yield Finding(
            "/metrics does not report its block size: kvpin cannot follow its cache",
            "start it without --disable-log-stats",
            _EVENTS,
        )


def _event_findings(facts: VllmFacts, spec: VllmSpec) -> Iterator[Finding]:
    if not facts.metrics.tells_blocks:
        return  # _cache_findings says why
    ranks, source = facts.metrics.ranks, facts.source
    if is_several(facts, spec):
        yield Finding(
            f"it has {len(ranks)} data-parallel ranks, each with its own cache, and chooses one itself",
            f"{RANKS}, or add it {len(ranks)} times, with dp_rank={ranks[0]} to {ranks[-1]}",
            _EVENTS,
        )
    elif (endpoints := event_endpoints(facts, spec)) is not None:
        if endpoints.replay is None:
            yield _NO_REPLAY
    elif source is not None and source.publishes:
        yield Finding(
            f"its events at {source.endpoint} cannot be reached from here",
            'give --kv-events-config an "endpoint" such as tcp://*:5557, or name the address that reaches '
            "it: events=tcp://HOST:PORT",
            _EVENTS,
        )
    else:
        yield _NO_EVENTS if facts.names_sources else _NO_SOURCES


def _route_findings(facts: VllmFacts, spec: VllmSpec) -> Iterator[Finding]:
    if facts.trials.reports_cached is False:
        yield Finding(
            "its answers do not report reused tokens: predictions cannot be checked",
            "start it with --enable-prompt-tokens-details",
            (Capability.CACHED_TOKENS,),
        )
    if facts.trials.takes_salt is False:
        yield Finding("it ignores cache salts on some routes", "upgrade vLLM", (Capability.CACHE_SALT,))
    if not facts.renders:
        yield Finding(
            "kvpin cannot follow chats with images, and serves /v1/responses as chats",
            "start it with --enable-scale-out",
            (Capability.RENDER,),
        )
    if not facts.resets:
        remedy = "start it with VLLM_SERVER_DEV_MODE=1"
        yield Finding("its cache cannot be flushed", remedy, (Capability.FLUSH,))
    if spec.api_key:
        yield Finding(
            "its --api-key protects only /v1: whoever reaches its port can tokenise, read metrics and, in "
            "dev mode, reset the cache",
            "let only kvpin reach that port",
        )
    if (release := release_of(facts.version)) and release < _OLDEST:
        yield Finding(f"kvpin is not tested with vLLM {facts.version}", "upgrade it to 0.24 or later")


# --- the adapter ----------------------------------------------------------------------------------------

_INSTEAD = {
    Capability.OFFLOAD: "start it with an LMCache server and name that: lmcache=http://HOST:PORT",
    Capability.RESTORE: "start it with an LMCache server and name that: lmcache=http://HOST:PORT; "
    '"fallback": "warm" computes a prefix again by a one-token prefill',
    Capability.PIN: "start it with an LMCache server and name that: lmcache=http://HOST:PORT",
}  # fmt: skip
# Seconds within which the events tell of a reset. A request of one token makes the server publish them.
_EVENT_S = 2.0
_NUDGES: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": [1], "max_tokens": 1, "temperature": 0},
    "/v1/embeddings": {"input": [1]},  # of a model that has no route for completions
}


class VllmAdapter(EngineAdapter):
    """`EngineAdapter` of vLLM."""

    spec: VllmSpec
    instead = _INSTEAD
    _read_keys = staticmethod(read_vllm_keys)
    _silent_s = 3.0  # a thread of the server answers while its worker computes

    def __init__(self, spec: VllmSpec) -> None:
        super().__init__(spec)
        self._rank = spec.options.dp_rank
        self._facts: VllmFacts | None = None
        self._instance = ""
        self._queries = 0
        self._shaper = RequestShaper(asks_usage=False)
        self.transfer = transfer_of(spec, None)

    # --- what it is -----------------------------------------------------------------------------------

    @override
    async def connect(self) -> EngineInfo:
        before = self._queries
        facts = await discover(self._control, self.spec, self._facts)
        metrics = facts.metrics
        if self._facts is None or self._is_another(metrics, before):
            self._instance = metrics.identity or uuid.uuid4().hex
            self._watch.capacity = metrics.blocks
            self._queries = 0
        self._facts, self._queries = facts, max(self._queries, metrics.queries)
        self._endpoints = event_endpoints(facts, self.spec)
        self.transfer = transfer_of(self.spec, facts.kv_transfer)
        has = {
            Capability.KV_EVENTS: self._endpoints is not None,
            Capability.CACHED_TOKENS: facts.trials.reports_cached is True,
            Capability.TOKENIZE: facts.tokenizes or facts.renders,
            Capability.RENDER: facts.renders,
            Capability.CACHE_SALT: facts.trials.takes_salt is True,
            Capability.FLUSH: facts.resets,
        }
        self.capabilities = frozenset(capability for capability, there in has.items() if there)
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
        before = self._queries
        metrics = await look(self._control, self._rank)
        if self._facts is not None and self._is_another(metrics, before):
            raise EngineUnavailable("the engine was restarted")
        self._queries = max(self._queries, metrics.queries)
        known, outdated = self._facts, False
        if known is not None and (known.loads_loras or known.metrics.identity is None):
            # Its models or LoRA adapters may have changed. A server that cannot load any is not asked.
            outdated = read_models(await self._control.get("/v1/models"), self.spec.model) != known.model
        return EngineLoad(metrics.running, metrics.waiting, metrics.usage, outdated)

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
        if requests.has_embeddings(path, body):
            block = (await self._able(Capability.TOKENIZE)).metrics.block_size
            if block is None:
                raise EngineRejected("its block size is unknown", status=400)
            return await requests.render(path, body, block=block, tokenize=self.tokenize)
        facts = await self._able(Capability.RENDER)
        return await prompts.render(self._control, path, body, _served_name(facts, body))

    # --- KV -------------------------------------------------------------------------------------------

    @override
    def _reading(self) -> Callable[[KvEvent], Iterable[KvEvent]]:
        return Copies(self._facts.blocks_per_chunk if self._facts is not None else 1).count

    @override
    def event_position(self) -> EventPosition | None:
        """Copies of blocks are counted, and not kept: who goes on there may know too little."""
        position = super().event_position()
        return None if position is None else structs.replace(position, complete=False)

    @override
    async def _reset(self) -> bool:
        """It refuses while requests run, and publishes the reset of each rank with its next request. Raises
        EngineUnavailable without such an event."""
        facts, cleared = cast("VllmFacts", self._facts), self._watch.clearings
        offloads = facts.kv_transfer is not None and facts.kv_transfer.offloads
        route = f"/reset_prefix_cache{'?reset_external=true' if offloads else ''}"
        answer = await self._control.call("POST", route)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            return False
        for rank in (None,) if self._rank is None else facts.metrics.ranks or (self._rank,):
            headers = rank_headers(rank)
            for path, nudge in _NUDGES.items():
                with suppress(EngineRejected):
                    named = {**nudge, "model": facts.model.name}
                    await self._control.call("POST", path, json=named, headers=headers)
                    break
        if self._watch.is_followed and not await self._watch.wait_for_clearing(cleared, _EVENT_S):
            raise EngineUnavailable("its cache was reset, but no event said so")
        return True

    # --- inside ---------------------------------------------------------------------------------------

    async def _able(self, capability: Capability) -> VllmFacts:
        await self.require(capability)
        return cast("VllmFacts", self._facts)

    def _is_another(self, metrics: VllmMetrics, before: int) -> bool:
        """True if the server's process was replaced since `connect`. Where `/metrics` has no identity, a
        counter that fell shows it: below `before`, its value when `metrics` were asked for. `connect` and
        `load` may run side by side, and the later value may be read first."""
        identity = metrics.identity
        return metrics.queries < before if identity is None else identity != self._instance


def _served_name(facts: VllmFacts, body: JsonBody) -> str:
    """The LoRA adapter that a request names, else the base model; clients may know that by another name."""
    name = body.get("model")
    return name if name in facts.model.loras else facts.model.name
