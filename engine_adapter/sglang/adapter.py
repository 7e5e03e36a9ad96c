"""The adapter of SGLang: its OpenAI routes, its own routes and its KV events.

It rests on the code of SGLang 0.5.23; docs/engines/sglang.md lists the facts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, cast

from msgspec import structs
from typing_extensions import override

from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.events.keys import read_sglang_keys
from engine_adapter.events.options import EventSpec
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.http.adapter import HealthRoute, HttpAdapter, read_models
from engine_adapter.http.prepare import route_of
from engine_adapter.http.transport import OutgoingRequest
from engine_adapter.sglang.findings import event_endpoints, find
from engine_adapter.sglang.rendezvous import ROLES, check_is_one, rendezvous_of
from engine_adapter.sglang.requests import (
    SGLANG_INPUT,
    hold_request,
    kept_apart,
    tells_cached_tokens,
    tokenize,
    tokenizes_chats,
    uses_jinja,
)
from engine_adapter.sglang.routes import ROUTES
from engine_adapter.sglang.server_info import Loads, ServerInfo, read_server_info
from engine_adapter.sglang.windows import Windows, window_of
from engine_adapter.types import (
    TRANSLATED_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    KvEvent,
    KvTarget,
    TokenIds,
)

_INSTEAD = {
    Capability.KV_EVENTS: "kvpin learns what it holds from its answers; start it with --kv-events-config",
    Capability.CACHED_TOKENS: "start it with --enable-cache-report",
    Capability.FLUSH: "give the server's --admin-api-key to kvpin as api_key, or restart the server",
    Capability.OFFLOAD: "with --enable-hierarchical-cache SGLang copies to its host tier by itself",
    Capability.RESTORE: 'SGLang loads from its host tier by itself; "fallback": "warm" computes again',
}
# Headers by which other servers of a deployment, not its clients, replace fields of a request: the rank, the
# priority, the server that did the prefill.
_OVERRIDES = b"x-override-"
# Seconds that a flush waits for the server to be idle; and then for the event of it.
_FLUSH_S, _CLEARED_S = 5, 1.0
_RANKS_SINCE = (0, 5, 10)  # before, requests cannot name one


class SglangAdapter(HttpAdapter):
    """`EngineAdapter` of SGLang, or with `dp_rank` of one data-parallel rank of it."""

    spec: EventSpec
    instead = _INSTEAD
    _read_keys = staticmethod(read_sglang_keys)

    def __init__(self, spec: EventSpec) -> None:
        """Raises EngineSpecError for an invalid address."""
        super().__init__(spec)
        # `/health` would take a second and make the model compute a token. Servers before 0.5.20 lack this.
        self._health = HealthRoute(self._control, "/ready")
        self._loads = Loads(self._control, spec.options.dp_rank)
        self._info: ServerInfo | None = None
        self._tokenizes = self._jinja = False
        self._window: int | None = None  # tokens of the model's sliding window, if it is followed
        self._windows: Windows | None = None

    @override
    async def connect(self) -> EngineInfo:
        self._health = HealthRoute(self._control, "/ready")
        await self._health.check()
        answer = await self._control.read_optional(dict[str, Any], "/server_info")
        if answer is None:  # an older version
            answer = await self._control.get("/get_server_info")
        models = await self._control.get("/v1/models")
        info = read_server_info(answer, models, api_key=self.spec.api_key)
        rank = self.spec.options.dp_rank
        if rank is not None and rank >= info.dp_ranks:
            raise EngineUnavailable(f"it has no dp_rank {rank}, only {info.dp_ranks} rank(s)")
        self._info, self._endpoints = info, event_endpoints(info, self.spec)
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
        return self._describe(info)

    @override
    async def load(self) -> EngineLoad:
        """LoRA adapters can be loaded and unloaded while the server runs."""
        await self._health.check()
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
    def _reading(self) -> Callable[[KvEvent], Iterable[KvEvent]]:
        """Follows the sliding windows of its model; nothing more of models with full attention alone."""
        info = self._info
        if info is None or not info.is_hybrid or info.page_size is None:
            self._windows = None
            return super()._reading()
        capacity = info.window_tokens if info.drops_windows else None
        self._windows = Windows(self._window, info.page_size, capacity)
        return self._windows.follow

    @override
    def event_position(self) -> EventPosition | None:
        """None for models with several kinds of attention: what their windows hold is not kept."""
        return None if self._info is None or self._info.is_hybrid else super().event_position()

    @override
    async def _reset(self) -> bool:
        """Waits until all ranks are idle for a moment. What a HiCache storage backend keeps outside the
        server stays."""
        cleared = self._watch.clearings
        try:
            await self._control.fetch("POST", f"/flush_cache?timeout={_FLUSH_S}")
        except EngineRejected as error:
            if error.status != HTTPStatus.BAD_REQUEST:
                raise
            return False
        if self.spec.options.dp_rank is None or not self._watch.is_followed:
            return True
        # Of several ranks, the server answers as the one does that answers first: the rank's own events tell.
        return await self._watch.wait_for_clearing(cleared, _CLEARED_S)

    @override
    async def stats(self) -> dict[str, Any]:
        if self._info is None:
            await self.connect()
        info, load = cast("ServerInfo", self._info), await self._loads.read()
        return {
            "page_size": info.page_size,
            "capacity_tokens": info.capacity_tokens,
            "gpu_usage": load.gpu_usage,
            "cache_hit_rate": self._loads.cache_hit_rate,
        }

    def _describe(self, info: ServerInfo) -> EngineInfo:
        has = {
            Capability.CACHE_SALT: True,
            Capability.KV_EVENTS: self._endpoints is not None,
            Capability.CACHED_TOKENS: tells_cached_tokens(info),
            Capability.TOKENIZE: self._tokenizes,
            Capability.FLUSH: not info.lacks_admin_key,
        }
        self.capabilities = frozenset(capability for capability, there in has.items() if there)
        blocks = info.capacity_tokens // info.page_size if info.capacity_tokens and info.page_size else None
        return EngineInfo(
            model=info.model,
            instance=info.instance,
            rendering=info.rendering,
            capabilities=self.capabilities,
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
