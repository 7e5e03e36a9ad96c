"""The adapter of SGLang: its OpenAI routes, its own routes and its KV events.

It rests on the code of SGLang 0.5.23; docs/engines/sglang.md lists the facts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any

from msgspec import structs

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy, NotSupported
from engine_adapter.events.keys import read_sglang_keys
from engine_adapter.events.sources import reachable_endpoint
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.hold import Hold, RequestBody, SelfPlaced
from engine_adapter.http.control import ControlClient, prepare_request, route_of
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.sglang.findings import find, why_events_do_not_fit
from engine_adapter.sglang.loads import Loads
from engine_adapter.sglang.options import SglangSpec
from engine_adapter.sglang.requests import hold_request, kept_apart, tells_cached_tokens
from engine_adapter.sglang.routes import ROUTES
from engine_adapter.sglang.server_info import ServerInfo, read_loras, read_server_info
from engine_adapter.sglang.tokens import tokenize, tokenizes_chats, uses_jinja
from engine_adapter.types import (
    MESSAGES_ROUTES,
    RESPONSES_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    TokenIds,
)
from engine_adapter.undeclared import Undeclared

_INSTEAD = {
    Capability.KV_EVENTS: "kvpin learns what it holds from its answers; start it with --kv-events-config",
    Capability.CACHED_TOKENS: "start it with --enable-cache-report",
    Capability.FLUSH: "give the server's --admin-api-key to kvpin as api_key, or restart the server",
    Capability.OFFLOAD: "with --enable-hierarchical-cache SGLang copies to its host tier by itself",
    Capability.RESTORE: 'SGLang loads from its host tier by itself; "fallback": "warm" computes again',
}
_FLUSH_ALL_ONLY = "SGLang can only flush everything: flush the engine, without a prompt or a tenant"
_BAD_REQUEST, _UNAUTHORIZED, _NOT_FOUND = 400, 401, 404
_DP_RANK = b"x-data-parallel-rank"
_RANKS_SINCE = (0, 5, 10)  # before, requests cannot name one


class SglangAdapter(SelfPlaced, Undeclared):
    """`EngineAdapter` of SGLang, or with `dp_rank` of one data-parallel rank of it."""

    instead = _INSTEAD

    def __init__(self, spec: SglangSpec) -> None:
        """Raises EngineSpecError for an invalid address."""
        self.spec = spec
        self._control = ControlClient(spec)
        self._loads = Loads(self._control, spec.options.dp_rank)
        self._info: ServerInfo | None = None
        self._subscriber: KvEventSubscriber | None = None
        self._findings: tuple[Finding, ...] = ()
        self._tells_ready = True
        self._tokenizes = self._jinja = False

    async def connect(self) -> EngineInfo:
        """See `EngineAdapter.connect`."""
        return self._describe(await self._look())

    async def load(self) -> EngineLoad:
        """See `EngineAdapter.load`. LoRA adapters can be loaded and unloaded while the server runs."""
        await self._check_ready()
        load = await self._loads.read()
        info = self._info
        if info is None or not info.lora:
            return load
        loras = read_loras(await self._control.get("/v1/models"))
        return replace(load, outdated=loras != info.loras)

    def findings(self) -> tuple[Finding, ...]:
        """See `EngineAdapter.findings`."""
        return self._findings

    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        """See `EngineAdapter.hold`."""
        if not isinstance(body, JsonBody) or self._info is None:
            return nullcontext(Hold(body))
        return nullcontext(hold_request(self._info, path, body, prompt, jinja=self._jinja))

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """See `EngineAdapter.prepare`. Namespaces and LoRA adapters are kept apart, also without reuse."""
        if isinstance(body, JsonBody) and self._info is not None:
            body = kept_apart(self._info, route_of(path), body)
        request = prepare_request(self.spec, method, path, headers, body)
        if self.spec.options.dp_rank is None:
            return request
        # Every route reads this header, and it overrides the body's rank.
        kept = [(name, value) for name, value in request.headers if name != _DP_RANK]
        return structs.replace(request, headers=[*kept, (_DP_RANK, b"%d" % self.spec.options.dp_rank)])

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        """See `EngineAdapter.tokenize`."""
        return await tokenize(self._control, path, body)

    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        """See `EngineAdapter.events`."""
        info = self._info or await self._look()
        if why_events_do_not_fit(info, self.spec) is not None:
            raise self.not_supported(Capability.KV_EVENTS)
        self._subscriber = KvEventSubscriber(self._endpoints(info), read_keys=read_sglang_keys, since=since)
        async with aclosing(self._subscriber.events()) as events:
            async for event in events:
                yield event

    def event_position(self) -> EventPosition | None:
        """See `EngineAdapter.event_position`."""
        return self._subscriber.position if self._subscriber is not None else None

    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """See `EngineAdapter.operate`. Flushes everything, on all data-parallel ranks. What a HiCache storage
        backend keeps outside the server stays. SGLang does not report how many blocks it dropped."""
        if verb is not KvVerb.FLUSH:
            raise self.not_supported(Capability(verb.value))
        if target.token_ids is not None or target.cache_salt is not None:
            raise NotSupported(verb.value, engine=self.spec.id, instead=_FLUSH_ALL_ONLY)
        try:
            await self._control.fetch("POST", "/flush_cache")
        except EngineRejected as error:
            if error.status != _BAD_REQUEST:
                raise
            load = await self._loads.read()
            yield KvProgress(0, 0, left={"busy": max(load.running + load.waiting, 1)})
        else:
            yield KvProgress(0, 0)

    async def stats(self) -> dict[str, Any]:
        """See `EngineAdapter.stats`."""
        load = await self._loads.read()
        info = self._info or await self._look()
        return {
            "page_size": info.page_size,
            "capacity_tokens": info.capacity_tokens,
            "gpu_usage": load.gpu_usage,
            "cache_hit_rate": self._loads.cache_hit_rate,
        }

    async def aclose(self) -> None:
        """See `EngineAdapter.aclose`."""
        await self._control.aclose()

    async def _look(self) -> ServerInfo:
        """Reads what the server reports, and the findings."""
        self._tells_ready = True
        await self._check_ready()
        answer, models = await self._server_info(), await self._control.get("/v1/models")
        info = self._info = read_server_info(answer, models, api_key=self.spec.api_key)
        rank = self.spec.options.dp_rank
        if rank is not None and rank >= info.dp_ranks:
            raise EngineUnavailable(f"it has no dp_rank {rank}, only {info.dp_ranks} rank(s)")
        self._loads.forget()
        self._tokenizes = await tokenizes_chats(self._control)
        self._jinja = self._tokenizes and await uses_jinja(self._control, info)
        self._findings = find(info, self.spec, jinja=self._jinja, tokenizes=self._tokenizes)
        return info

    async def _check_ready(self) -> None:
        """Raises EngineUnavailable while the server starts, is paused or is not healthy. `/health` would take
        a second and make the model compute a token. Servers before 0.5.20 have no `/ready`."""
        if not self._tells_ready:
            return
        try:
            await self._control.fetch("GET", "/ready")
        except EngineRejected as error:
            if error.status != _NOT_FOUND:
                raise EngineUnhealthy(f"/ready answered {error.status}: {error}") from error
            self._tells_ready = False

    async def _server_info(self) -> object:
        try:
            answer: object = await self._control.get("/server_info")
        except EngineRejected as error:
            if error.status == _NOT_FOUND:
                return await self._control.get("/get_server_info")
            if error.status == _UNAUTHORIZED:
                raise EngineUnavailable("it needs its --api-key: give it to kvpin as api_key") from error
            raise
        return answer

    def _endpoints(self, info: ServerInfo) -> EventEndpoints:
        """Addresses of the rank's events, as this machine reaches them."""
        events, replay, topic = self.spec.options.events, self.spec.options.replay, ""
        if info.publisher is not None and events is None:
            own, own_replay = info.publisher.endpoints(self.spec.options.dp_rank or 0)
            events, topic = reachable_endpoint(own, self.spec.url), info.publisher.topic
            replay = replay or (own_replay and reachable_endpoint(own_replay, self.spec.url))
        if events is None:
            raise self.not_supported(Capability.KV_EVENTS)
        return EventEndpoints(events, replay, topic)

    def _describe(self, info: ServerInfo) -> EngineInfo:
        capabilities = {Capability.CACHE_SALT}
        for capability, has in (
            (Capability.KV_EVENTS, why_events_do_not_fit(info, self.spec) is None),
            (Capability.CACHED_TOKENS, tells_cached_tokens(info)),
            (Capability.TOKENIZE, self._tokenizes),
            (Capability.FLUSH, not info.lacks_admin_key),
        ):
            if has:
                capabilities.add(capability)
        blocks = info.capacity_tokens // info.page_size if info.capacity_tokens and info.page_size else None
        return EngineInfo(
            model=info.model,
            instance=info.instance,
            capabilities=frozenset(capabilities),
            tokens_per_block=info.page_size,
            max_model_len=info.max_model_len,
            tokenizer=self.spec.tokenizer or info.tokenizer,
            gpu_blocks=blocks,
            host_blocks=int(blocks * info.host_ratio) or None if blocks is not None else None,
            version=f"SGLang {info.version}",
            loras=info.loras,
            shares_prefill=True,
            served_as_chats=MESSAGES_ROUTES | RESPONSES_ROUTES,
            ranks=tuple(range(info.dp_ranks)) if info.release >= _RANKS_SINCE else (),
            routes=ROUTES,
            card=info.card,
        )
