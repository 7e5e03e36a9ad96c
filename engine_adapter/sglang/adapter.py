"""The adapter of SGLang: its OpenAI routes, its own routes, its KV events, and findings about the server.

It rests on the code of SGLang 0.5.23; docs/engines/sglang.md lists the facts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, cast

from msgspec import structs
from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.events.fields import read_sglang_keys
from engine_adapter.events.options import RANKS, EventSpec
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.http.adapter import HealthRoute, read_models
from engine_adapter.http.prepare import OutgoingRequest, route_of
from engine_adapter.sglang.requests import (
    ROLES,
    ROUTES,
    SGLANG_INPUT,
    check_is_one,
    hold_request,
    kept_apart,
    rendezvous_of,
    tells_cached_tokens,
    tokenize,
    tokenizes_chats,
    uses_jinja,
)
from engine_adapter.sglang.server_info import (
    EVENTS_CARRY_LORA,
    EVENTS_CARRY_SALTS,
    Loads,
    ServerInfo,
    read_server_info,
)
from engine_adapter.sglang.windows import Windows, window_of
from engine_adapter.types import (
    TRANSLATED_ROUTES,
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    Finding,
    KvEvent,
    KvTarget,
    TokenIds,
)

# --- findings, with the flags that fix them -------------------------------------------------------------

_EVENTS_FLAG = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)

_LEARNED = "kvpin learns what it holds from its answers"


def event_endpoints(info: ServerInfo, spec: EventSpec) -> tuple[EventEndpoints | None, Finding | None]:
    """The addresses at which this machine reads the server's KV events, None if it cannot follow them; and
    what they lack, or why."""
    publisher, events, replay, topic = info.publisher, None, None, ""
    if publisher is not None and publisher.binds:
        (events, replay), topic = publisher.endpoints(spec.options.dp_rank or 0), publisher.topic
    endpoints = spec.options.endpoints(spec.url, events, replay, topic)
    flaw = next(_why_not_followed(info, spec), None)
    if flaw is None and endpoints is None:
        problem = "it publishes no KV events"
        if publisher is not None:
            place = f"tcp://{publisher.host}:{publisher.port}"
            problem = f"its KV events at {place} cannot be reached from here"
        flaw = Finding(f"{problem}, so {_LEARNED}", f"start it with {_EVENTS_FLAG}")
    if flaw is not None or endpoints is None:
        return None, flaw
    if endpoints.replay is None:
        flaw = Finding(
            "without a replay socket, kvpin does not know what it held before, and one lost event means "
            "starting over",
            'add "replay_endpoint": "tcp://*:5657" to --kv-events-config',
        )
    return endpoints, flaw


def _why_not_followed(info: ServerInfo, spec: EventSpec) -> Iterator[Finding]:
    """Why its KV events, wherever they are, do not show what it holds."""
    if not info.radix_cache:
        yield Finding("it reuses no prefixes", "start it without --disable-radix-cache")
    if info.page_size is None:
        yield Finding(f"it does not report its page size, so {_LEARNED}")
    if (ranks := info.dp_ranks) > 1 and spec.options.dp_rank is None:
        yield Finding(
            f"it has {ranks} data-parallel ranks and chooses one itself, so {_LEARNED}",
            f"{RANKS}, or add it {ranks} times, with dp_rank=0 to {ranks - 1}",
        )
    if info.pairs_tokens:
        yield Finding(
            f"with --speculative-algorithm {info.speculative} its events hold pairs of tokens, "
            f"which kvpin cannot follow, so {_LEARNED}"
        )
    lacks_lora = info.lora and not info.events_carry_lora
    for is_wrong, keys, since, instead in (
        (not info.events_carry_salts, "cache salts", EVENTS_CARRY_SALTS, ""),
        (lacks_lora, "LoRA adapters", EVENTS_CARRY_LORA, ", or serve without LoRA"),
    ):
        if is_wrong:
            yield Finding(
                f"the KV events of SGLang {info.version} do not carry {keys}, so {_LEARNED}",
                f"use {'.'.join(map(str, since))} or later{instead}",
            )


def find(
    info: ServerInfo, of_events: Finding | None, *, jinja: bool, tokenizes: bool, window: int | None = None
) -> Iterator[Finding]:
    """All findings, with the one about its events. The server `tokenizes` messages, and renders chats with a
    Jinja template (`jinja`). Its model's sliding windows have `window` tokens; None if they are not
    followed."""
    # A decode half without cache computes no prompts, and keeps none.
    if of_events is not None and (info.radix_cache or info.disaggregation != "decode"):
        yield of_events
    if info.radix_cache and not info.cache_report:
        yield Finding(
            "its usage does not report cached tokens: kvpin asks chats and completions in another way",
            "start it with --enable-cache-report",
            (Capability.CACHED_TOKENS,),
        )
    if info.radix_cache and not info.hicache:
        yield Finding(
            "what its GPU evicts is lost", "start it with --enable-hierarchical-cache to give it a host tier"
        )
    if not tokenizes:
        yield Finding("it does not tokenise chats for others: kvpin cannot check its own tokens")
    elif not jinja:
        yield Finding("kvpin sends it chats as text, so every prompt is tokenised twice")
    if info.completion_template is not None:
        yield Finding(
            "it renders text completions with a template: kvpin does not follow them",
            "start it without --completion-template",
        )
    if info.lacks_admin_key:
        yield Finding(
            "it cannot be flushed: that needs its --admin-api-key",
            "use the same key as its --api-key, and give it to kvpin as api_key",
            (Capability.FLUSH,),
        )
    if info.radix_cache and info.is_hybrid:
        yield from _of_hybrids(info, window)


def _of_hybrids(info: ServerInfo, window: int | None) -> Iterator[Finding]:
    """Why predictions for a model with several kinds of attention are not exact."""
    less = "it may reuse less than predicted"
    if info.keeps_states:
        yield Finding(f"no event tells which states of its linear attention or Mamba layers it keeps: {less}")
    elif info.hicache:
        yield Finding(f"no event tells what its sliding windows hold on the host tier: {less}")
    elif not info.follows_windows:
        yield Finding(
            f"its pages are too small to follow its sliding windows: {less}", "start it with --page-size 16"
        )
    elif window is None:
        yield Finding(
            f"no config.json here says how long its sliding windows are: {less}",
            "copy the model's directory here, without the weights, and name it: tokenizer=DIR",
        )
    elif info.drops_windows:
        yield Finding(
            "its sliding windows have less memory than full attention, and no event tells which it drops: "
            f"once {info.window_tokens} tokens of windows were kept, {less}",
            "start it with --swa-full-tokens-ratio 1",
        )


# --- the adapter ----------------------------------------------------------------------------------------

_INSTEAD = {
    Capability.KV_EVENTS: "kvpin learns what it holds from its answers; start it with --kv-events-config",
    Capability.OFFLOAD: "with --enable-hierarchical-cache SGLang copies to its host tier by itself",
    Capability.RESTORE: 'SGLang loads from its host tier by itself; "fallback": "warm" computes again',
}
# Headers by which other servers of a deployment, not its clients, replace fields of a request: the rank, the
# priority, the server that did the prefill.
_OVERRIDES = b"x-override-"
# Seconds that a flush waits for the server to be idle; and then for the event of it.
_FLUSH_S, _CLEARED_S = 5, 1.0
_RANKS_SINCE = (0, 5, 10)  # before, requests cannot name one


class SglangAdapter(EngineAdapter):
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
        self._info = info
        self._endpoints, of_events = event_endpoints(info, self.spec)
        self.rendezvous = rendezvous_of(info, self.spec)
        self._loads.forget()
        self._window = None
        if info.follows_windows:
            self._window = await asyncio.to_thread(window_of, self.spec.tokenizer or info.tokenizer)
        self._tokenizes = await tokenizes_chats(self._control)
        self._jinja = self._tokenizes and await uses_jinja(self._control, info)
        found = find(info, of_events, jinja=self._jinja, tokenizes=self._tokenizes, window=self._window)
        self._findings = tuple(found)
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
            model=info.served.name,
            instance=info.instance,
            rendering=f"model {info.model_path}\ntemplate {info.chat_template}",
            capabilities=self.capabilities,
            tokens_per_block=info.page_size,
            max_model_len=info.max_model_len,
            cuts_prompts=info.cuts_prompts,
            tokenizer=self.spec.tokenizer or info.tokenizer,
            gpu_blocks=blocks,
            host_blocks=int(blocks * info.host_ratio) or None if blocks is not None else None,
            version=f"SGLang {info.version}",
            loras=info.served.loras,
            lora_paths=info.served.lora_paths,
            loads_loras=info.lora,
            template_input=SGLANG_INPUT,
            served_as_chats=TRANSLATED_ROUTES,
            runs_several=not info.is_half,
            role=ROLES.get(info.disaggregation),
            ranks=tuple(range(info.dp_ranks)) if info.release >= _RANKS_SINCE else (),
            routes=ROUTES,
            card=info.served.card,
        )

    @override
    async def load(self) -> EngineLoad:
        """LoRA adapters can be loaded and unloaded while the server runs."""
        await self._health.check()
        load = await self._loads.read()
        info = self._info
        if info is None or not info.lora:
            return load
        model = read_models(await self._control.get("/v1/models"))
        known = info.served
        is_same = (model.loras, model.lora_paths) == (known.loras, known.lora_paths)
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
        info, load = cast("ServerInfo", self._info), await self._loads.read(judges=False)
        return {
            "page_size": info.page_size,
            "capacity_tokens": info.capacity_tokens,
            "gpu_usage": load.gpu_usage,
            "cache_hit_rate": self._loads.cache_hit_rate,
        }
