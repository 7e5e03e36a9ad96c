"""The adapter of SGLang: its OpenAI routes, its own routes and its KV events.

It rests on the code of SGLang 0.5.23; docs/engines/sglang.md lists the facts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from msgspec import structs
from typing_extensions import override

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy
from engine_adapter.events.keys import read_sglang_keys
from engine_adapter.events.options import EventSpec
from engine_adapter.events.subscriber import KvEventSubscriber
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.http.adapter import HttpAdapter
from engine_adapter.http.models import read_models
from engine_adapter.http.prepare import route_of
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.sglang.findings import event_endpoints, find
from engine_adapter.sglang.rendezvous import ROLES, check_is_one, rendezvous_of
from engine_adapter.sglang.requests import (
    hold_request,
    kept_apart,
    tells_cached_tokens,
    tokenize,
    tokenizes_chats,
    uses_jinja,
)
from engine_adapter.sglang.routes import ROUTES
from engine_adapter.sglang.server_info import Loads, ServerInfo, read_server_info
from engine_adapter.sglang.template_input import SGLANG_INPUT
from engine_adapter.sglang.windows import Windows, window_of
from engine_adapter.types import (
    TRANSLATED_ROUTES,
    CacheCleared,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    TokenIds,
)

_INSTEAD = {
    Capability.KV_EVENTS: "kvpin learns what it holds from its answers; start it with --kv-events-config",
    Capability.CACHED_TOKENS: "start it with --enable-cache-report",
    Capability.FLUSH: "give the server's --admin-api-key to kvpin as api_key, or restart the server",
    Capability.OFFLOAD: "with --enable-hierarchical-cache SGLang copies to its host tier by itself",
    Capability.RESTORE: 'SGLang loads from its host tier by itself; "fallback": "warm" computes again',
}
_RANK_HEADER = b"x-data-parallel-rank"  # /generate takes the rank in its body
# Headers by which other servers of a deployment, not its clients, replace fields of a request: the rank, the
# priority, the server that did the prefill.
_OVERRIDES = b"x-override-"
# Seconds that a flush waits for the server to be idle; and then for the event of it, looking every so often.
_FLUSH_S, _CLEARED_S, _LOOK_S = 5, 1.0, 0.02
_RANKS_SINCE = (0, 5, 10)  # before, requests cannot name one


class SglangAdapter(HttpAdapter):
    """`EngineAdapter` of SGLang, or with `dp_rank` of one data-parallel rank of it."""

    spec: EventSpec
    instead = _INSTEAD

    def __init__(self, spec: EventSpec) -> None:
        """Raises EngineSpecError for an invalid address."""
        super().__init__(spec)
        if spec.options.dp_rank is not None:
            self._own_headers = [(_RANK_HEADER, b"%d" % spec.options.dp_rank)]
        self._loads = Loads(self._control, spec.options.dp_rank)
        self._info: ServerInfo | None = None
        self._tells_ready = True
        self._tokenizes = self._jinja = False
        self._clearings = 0  # of the cache, as its events tell
        self._window: int | None = None  # tokens of the model's sliding window, if it is followed
        self._windows: Windows | None = None

    @override
    async def connect(self) -> EngineInfo:
        return self._describe(await self._look())

    @override
    async def load(self) -> EngineLoad:
        """LoRA adapters can be loaded and unloaded while the server runs."""
        await self._check_ready()
        load = await self._loads.read()
        info = self._info
        if info is None or not info.lora:
            return load
        model = read_models(await self._control.get("/v1/models"))
        is_same = (model.loras, model.lora_paths) == (info.loras, info.lora_paths)
        return replace(load, outdated=not is_same)

    @override
    def _hold(self, path: str, body: JsonBody, prompt: KvTarget | None) -> Hold:
        if self._info is None:
            return Hold(body)
        if self._windows is not None and prompt is not None and prompt.token_ids is not None:
            self._windows.asked(prompt.token_ids)
        return hold_request(self._info, path, body, prompt, jinja=self._jinja)

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """Namespaces, LoRA adapters and ranks are kept apart, also without reuse. Raises EngineRejected for
        what the server would not answer."""
        if isinstance(body, JsonBody) and self._info is not None:
            check_is_one(self._info, route_of(path), body)
            body = kept_apart(self._info, route_of(path), body, self.spec.options.dp_rank)
        request = super().prepare(method, path, headers, body)
        sent = [pair for pair in request.headers if not pair[0].startswith(_OVERRIDES)]
        return structs.replace(request, headers=sent)

    @override
    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        return await tokenize(self._control, path, body)

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        info = self._info or await self._look()
        endpoints = event_endpoints(info, self.spec)
        if endpoints is None:
            raise self.not_supported(Capability.KV_EVENTS)
        self._subscriber = KvEventSubscriber(endpoints, read_keys=read_sglang_keys, since=since)
        windows = self._windows = self._follow_windows(info)
        async with aclosing(self._subscriber.events()) as events:
            async for sent in events:
                self._clearings += isinstance(sent, CacheCleared)
                for event in (sent,) if windows is None else windows.follow(sent):
                    yield event

    @override
    def event_position(self) -> EventPosition | None:
        """None for models with several kinds of attention: what their windows hold is not kept."""
        return None if self._info is None or self._info.is_hybrid else super().event_position()

    def _follow_windows(self, info: ServerInfo) -> Windows | None:
        """What follows the sliding windows of its model; None for models with full attention alone."""
        if not info.is_hybrid or info.page_size is None:
            return None
        return Windows(self._window, info.page_size, info.window_tokens if info.drops_windows else None)

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Flushes everything, on all data-parallel ranks, once they are idle for a moment. What a HiCache
        storage backend keeps outside the server stays. SGLang does not report how many blocks it dropped."""
        if verb is not KvVerb.FLUSH:
            raise self.not_supported(Capability(verb.value))
        self.check_flushes_all(target)
        before = self._clearings
        try:
            await self._control.fetch("POST", f"/flush_cache?timeout={_FLUSH_S}")
            is_flushed = await self._is_cleared(before)
        except EngineRejected as error:
            if error.status != HTTPStatus.BAD_REQUEST:
                raise
            is_flushed = False
        if is_flushed:
            yield KvProgress(0, 0)
        else:
            load = await self._loads.read()
            yield KvProgress(0, 0, left={"busy": max(load.running + load.waiting, 1)})

    async def _is_cleared(self, before: int) -> bool:
        """True if the cache was cleared since its `before`-th time. Of several ranks, the server answers as
        the one does that answers first: then the rank's own events tell."""
        if self.spec.options.dp_rank is None or self._subscriber is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLEARED_S):
                while self._clearings == before:  # noqa: ASYNC110 - events come in another task
                    await asyncio.sleep(_LOOK_S)
        return self._clearings > before

    @override
    async def stats(self) -> dict[str, Any]:
        load = await self._loads.read()
        info = self._info or await self._look()
        return {
            "page_size": info.page_size,
            "capacity_tokens": info.capacity_tokens,
            "gpu_usage": load.gpu_usage,
            "cache_hit_rate": self._loads.cache_hit_rate,
        }

    async def _look(self) -> ServerInfo:
        """Reads what the server reports, and the findings."""
        self._tells_ready = True
        await self._check_ready()
        answer, models = await self._server_info(), await self._control.get("/v1/models")
        info = self._info = read_server_info(answer, models, api_key=self.spec.api_key)
        rank = self.spec.options.dp_rank
        if rank is not None and rank >= info.dp_ranks:
            raise EngineUnavailable(f"it has no dp_rank {rank}, only {info.dp_ranks} rank(s)")
        self.rendezvous = rendezvous_of(info, self.spec)
        self._loads.forget()
        self._window = None
        if info.follows_windows:
            self._window = await asyncio.to_thread(window_of, self.spec.tokenizer or info.tokenizer)
        self._tokenizes = await tokenizes_chats(self._control)
        self._jinja = self._tokenizes and await uses_jinja(self._control, info)
        self._findings = find(
            info, self.spec, jinja=self._jinja, tokenizes=self._tokenizes, window=self._window
        )
        return info

    async def _check_ready(self) -> None:
        """Raises EngineUnavailable while the server starts, is paused or is not healthy. `/health` would take
        a second and make the model compute a token. Servers before 0.5.20 have no `/ready`."""
        if not self._tells_ready:
            return
        try:
            await self._control.fetch("GET", "/ready")
        except EngineRejected as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise EngineUnhealthy(f"/ready answered {error.status}: {error}") from error
            self._tells_ready = False

    async def _server_info(self) -> object:
        try:
            answer: object = await self._control.get("/server_info")
        except EngineRejected as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return await self._control.get("/get_server_info")
            raise
        return answer

    def _describe(self, info: ServerInfo) -> EngineInfo:
        has = {
            Capability.CACHE_SALT: True,
            Capability.KV_EVENTS: event_endpoints(info, self.spec) is not None,
            Capability.CACHED_TOKENS: tells_cached_tokens(info),
            Capability.TOKENIZE: self._tokenizes,
            Capability.FLUSH: not info.lacks_admin_key,
        }
        blocks = info.capacity_tokens // info.page_size if info.capacity_tokens and info.page_size else None
        return EngineInfo(
            model=info.model,
            instance=info.instance,
            rendering=info.rendering,
            capabilities=frozenset(capability for capability, there in has.items() if there),
            tokens_per_block=info.page_size,
            max_model_len=info.max_model_len,
            tokenizer=self.spec.tokenizer or info.tokenizer,
            gpu_blocks=blocks,
            host_blocks=int(blocks * info.host_ratio) or None if blocks is not None else None,
            version=f"SGLang {info.version}",
            loras=info.loras,
            lora_paths=info.lora_paths,
            loads_loras=info.lora,
            template_input=SGLANG_INPUT,
            served_as_chats=TRANSLATED_ROUTES,
            runs_several=not info.is_half,
            role=ROLES.get(info.disaggregation),
            ranks=tuple(range(info.dp_ranks)) if info.release >= _RANKS_SINCE else (),
            routes=ROUTES,
            card=info.card,
        )
