"""The adapter of trtllm-serve.

connect → what the server is (discovery.py)      load   → health, and now and then load figures
hold    → only fields that it takes (requests.py)  events → pushed or polled (poller.py, events.py)
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any, cast

import msgspec
from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected
from engine_adapter.events.fields import read_vllm_keys
from engine_adapter.events.options import EventAddresses
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.http.adapter import read_models
from engine_adapter.http.openai_answer import hold_openai
from engine_adapter.http.prepare import OutgoingRequest, route_of
from engine_adapter.tensorrt_llm.discovery import (
    BLOCK_SIZE_UNKNOWN,
    DEFAULT_TOKENS_PER_BLOCK,
    EVENTS,
    Discovered,
    ServerFigures,
    discover,
    read_stats,
)
from engine_adapter.tensorrt_llm.events import PolledEventReader
from engine_adapter.tensorrt_llm.poller import CONFIG, NOTHING_PUSHED, EventPoller
from engine_adapter.tensorrt_llm.requests import (
    CHAT,
    COMPLETIONS,
    PROMPT_ROUTES,
    SALT,
    ContextPhase,
    RequestFields,
)
from engine_adapter.types import (
    CacheCleared,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    EventPosition,
    Finding,
    KvEvent,
    KvTarget,
    Role,
    Tier,
    TokenIds,
    ViewCurrent,
    ViewLost,
)

# The figures are for people, and reading them may take them away from another reader.
STATS_EVERY_S = 15.0
_INSTEAD = {
    Capability.RENDER: "prompts with images are followed up to the first message with one",
    Capability.EXTRA_IDS: "its HTTP routes take no prompt tables: only text prompts can be warmed",
    Capability.OFFLOAD: "it offloads evicted KV by itself, with host_cache_size in its kv_cache_config",
    Capability.RESTORE: "it restores KV from host memory by itself when a request needs it; "
    'warm computes a prefix that is gone; "fallback": "warm" does so',
    Capability.PIN: "its HTTP routes take no priorities: warm the prefix again when it is needed",
}
_USUAL_FIELDS = RequestFields()
NO_HOST_TIER = Finding(
    "it has no host memory for KV: evicted KV is lost", CONFIG + "{host_cache_size: BYTES}"
)
EVENTS_LOST = Finding(
    "KV events were lost: predictions are lower bounds until its cache is reset",
    "let nobody else read /kv_cache_events, and raise event_buffer_max_size in its kv_cache_config",
)
NO_NUMBERS = Finding(
    "it cannot give the two phases of a request one number, without which KV may go to another request: it "
    "is in no pair",
    "use a version whose disaggregated_params have disagg_request_id",
)
SEVERAL_WINDOWS = Finding(
    "it has several attention windows, and its events do not tell what each holds: it may reuse less than "
    "predicted"
)


class _Rendered(msgspec.Struct, frozen=True):
    """A prompt in the answer of a render route."""

    token_ids: list[int]
    tokens_trusted: bool = True


_RENDERED: Any = _Rendered | list[_Rendered]
"""One object for a chat, one per prompt for a completion."""


class _EndedError(Exception):
    """Pushed events no longer show what the server holds, with the finding that says why; without one, the
    server served prompts, but pushed nothing."""

    def __init__(self, finding: Finding | None) -> None:
        super().__init__()
        self.finding = finding


class TensorRTLLMAdapter(EngineAdapter):
    """`EngineAdapter` of trtllm-serve."""

    spec: EngineSpec[EventAddresses]
    instead = _INSTEAD
    _read_keys = staticmethod(read_vllm_keys)

    def __init__(self, spec: EngineSpec[EventAddresses]) -> None:
        super().__init__(spec)
        self.transfer = None if spec.role is Role.BOTH else ContextPhase()
        self._instance = uuid.uuid4().hex
        self._server: Discovered | None = None
        self._measured: int | None = None
        self._seen: tuple[int, tuple[Finding, ...]] | None = None
        self._stats, self._next_stats = ServerFigures(), 0.0
        self._poller = EventPoller(lambda: self._control.fetch("POST", EVENTS), self._new_reader)
        self._polls_instead = self._was_reset = False

    @override
    async def connect(self) -> EngineInfo:
        """The process has no identity; its events show a restart."""
        server = self._server = await discover(self._control, self._instance)
        if self.spec.role is not Role.BOTH:
            self.transfer = ContextPhase() if server.fields.numbers_phases else None
        self.capabilities = server.info.capabilities
        self._seen = self._tokens_per_block, self.findings()
        levels, info = self._poller.reader.blocks_per_level, server.info
        return replace(
            info,
            model=self.spec.model or info.model,
            tokens_per_block=self._tokens_per_block,
            tokenizer=self.spec.tokenizer or info.tokenizer,
            gpu_blocks=next(iter(levels), info.gpu_blocks),
            host_blocks=sum(levels[1:]) if levels else None,
        )

    @override
    async def load(self) -> EngineLoad:
        """The counts are of the last `STATS_EVERY_S` seconds."""
        await self._control.fetch("GET", "/health")
        model = read_models(await self._control.get("/v1/models")).name
        if time.monotonic() >= self._next_stats:
            self._next_stats = time.monotonic() + STATS_EVERY_S
            self._stats = await read_stats(self._control)
        stats, seen_now = self._stats, (self._tokens_per_block, self.findings())
        is_another = self._server is not None and model != self._server.info.model
        outdated = is_another or self._seen not in (None, seen_now)
        counted = stats.running is not None
        return EngineLoad(stats.running or 0, stats.waiting or 0, stats.gpu_usage, outdated, counted)

    @override
    def findings(self) -> tuple[Finding, ...]:
        """Includes what its events have shown since."""
        reader = self._poller.reader
        is_measured = self._tokens_per_block == self._measured
        of_server = self._server.findings if self._server is not None else ()
        found = [
            *(each for each in of_server if not (is_measured and each is BLOCK_SIZE_UNKNOWN)),
            self._polls_instead and NOTHING_PUSHED,
            self._poller.doubt,
            reader.gaps and EVENTS_LOST,
            reader.blocks_per_level and not any(reader.blocks_per_level[1:]) and NO_HOST_TIER,
            self.spec.role is not Role.BOTH and self.transfer is None and NO_NUMBERS,
            not reader.follows_all and SEVERAL_WINDOWS,
        ]
        return tuple(finding for finding in found if isinstance(finding, Finding))

    @override
    async def stats(self) -> dict[str, Any]:
        reader, pushed = self._poller.reader, self._subscriber
        if pushed is not None:
            return {
                "blocks": {"known": {Tier.GPU.value: self._watch.blocks}},
                "events": asdict(pushed.counts),
            }
        return {
            "blocks": {
                "capacity": list(reader.blocks_per_level),
                "known": {tier.value: count for tier, count in reader.blocks().items()},
            },
            "events": {"skipped": reader.skipped, "gaps": reader.gaps, "restarts": reader.restarts},
        }

    # --- requests -------------------------------------------------------------------------------------

    @override
    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        """Raises EngineRejected (400) for a prompt that would run without its required salt."""
        if not isinstance(body, JsonBody):
            return nullcontext(Hold(body))
        self._fields.check_salt(path, body)
        dropped = self._fields.droppable(path, body)
        hold = hold_openai(
            path,
            body,
            changes=self._fields.as_token_ids(path, body, prompt),
            drop=dropped,
            ask_usage=True,
            note=f"left out, as TensorRT-LLM does not take it: {', '.join(dropped)}" if dropped else "",
        )
        return self._counted(hold, body, prompt) if path in PROMPT_ROUTES else nullcontext(hold)

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """No salted prompt runs unsalted, and every prompt names its model, also without reuse."""
        if isinstance(body, JsonBody):
            route = route_of(path)
            self._fields.check_salt(route, body)
            if named := self._named(route, body):
                body = body.replace(**named)
        return super().prepare(method, path, headers, body)

    @override
    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        """Raises EngineRejected for a prompt the server is not sure of."""
        await self._able(Capability.TOKENIZE)
        if path not in (CHAT, COMPLETIONS):
            raise EngineRejected(f"{path} is not rendered", status=404)
        # Tokens do not depend on the salt, and the render route of completions refuses it.
        left_out = dict.fromkeys((SALT, *self._fields.droppable(path, body)))
        sent = body.replace(**left_out, **self._named(path, body))
        answer = await self._control.read(_RENDERED, "POST", f"{path}/render", content=sent.raw)
        prompts: list[_Rendered] = answer if isinstance(answer, list) else [answer]
        if len(prompts) != 1 or not prompts[0].tokens_trusted:
            raise EngineRejected("the engine cannot tokenise this request", status=422)
        return array("i", prompts[0].token_ids)

    # --- KV -------------------------------------------------------------------------------------------

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        """As the server pushes them, else polled, which removes them from it: see poller.py.

        Servers with KVCacheManagerV2 and a `kv_events_config` push, and have nothing to poll; others reject
        that setting or ignore it. So kvpin polls where nothing is pushed:

            served enough, nothing came    the stream ends: poll instead
            a request has a salt or LoRA   ViewLost for good: pushed events name neither
            reset                          CacheCleared before the next message

        Frames are vLLM's, and events are maps. Only whole blocks of the largest attention window come,
        without salts, LoRA adapters, media or moves between tiers: an offloaded block stays on the GPU in the
        view."""
        await self._able(Capability.KV_EVENTS)
        poller = self._poller
        poller.doubt, self._polls_instead = None, False
        self._endpoints = self.spec.options.endpoints(self.spec.url, None, None)
        if self._endpoints is not None:
            poller.traffic.prompts.clear()
            try:
                async with aclosing(super().events(since)) as events:
                    async for event in events:
                        yield event
            except _EndedError as ended:
                if ended.finding is not None:
                    poller.doubt = ended.finding
                    yield ViewLost(ended.finding.problem)
                    await asyncio.Event().wait()
            self._subscriber = None
            self._polls_instead = True
        async with aclosing(poller.events()) as events:
            async for event in events:
                yield event

    @override
    def _between(self) -> Iterable[KvEvent]:
        """Checks the requests before each pushed message: one with blocks of a salted request is not read."""
        traffic, pushed = self._poller.traffic, self._subscriber
        hidden = traffic.hidden_from(lacks_salt=True, lacks_lora=True)
        nothing_came = traffic.is_enough and pushed is not None and not pushed.counts.batches
        if hidden is not None or nothing_came:
            raise _EndedError(hidden)
        was_reset, self._was_reset = self._was_reset, False
        return (CacheCleared(),) if was_reset else ()

    @override
    def _reading(self) -> Callable[[KvEvent], Iterable[KvEvent]]:
        """A view of pushed events is complete only if the server reuses whole blocks alone."""
        if self._server is not None and self._server.whole_blocks_only:
            return super()._reading()
        never = ViewCurrent(complete=False)
        instead = {ViewCurrent: (never,), CacheCleared: (CacheCleared(), never)}
        return lambda event: instead.get(type(event), (event,))

    @property
    @override
    def _known_blocks(self) -> int:
        return self._watch.blocks if self._subscriber is not None else self._poller.reader.blocks().total()

    @override
    async def _reset(self) -> bool:
        server = await self._able(Capability.FLUSH)

        async def act() -> None:
            await self._control.fetch("POST", server.reset_path or "")

        if self._subscriber is None:
            await self._poller.reset(act)
        else:
            await act()
            self._was_reset = True
        return True

    # --- inside ---------------------------------------------------------------------------------------

    async def _able(self, capability: Capability) -> Discovered:
        await self.require(capability)
        return cast("Discovered", self._server)

    def _named(self, path: str, body: JsonBody) -> dict[str, str]:
        """The model name, for a body that must have one: clients of a single model may leave it out."""
        if self._server is None or path not in (CHAT, COMPLETIONS) or body.get("model") is not None:
            return {}
        return {"model": self._server.info.model}

    @property
    def _fields(self) -> RequestFields:
        return self._server.fields if self._server is not None else _USUAL_FIELDS

    @property
    def _tokens_per_block(self) -> int:
        """The block size that events showed, else the reported one."""
        reader = self._poller.reader
        if self._watch.tokens_per_block is not None:
            self._measured = self._watch.tokens_per_block
        elif reader.is_measured:
            self._measured = reader.tokens_per_block
        if self._measured is not None or self._server is None:
            return self._measured or DEFAULT_TOKENS_PER_BLOCK
        return self._server.tokens_per_block

    @asynccontextmanager
    async def _counted(self, hold: Hold, body: JsonBody, prompt: KvTarget | None) -> AsyncIterator[Hold]:
        """Counts a request that runs a prompt. When it ends there may be events."""
        traffic = self._poller.traffic
        traffic.salted |= body.get(SALT) is not None
        traffic.lora |= body.get("lora_request") is not None
        traffic.in_flight += 1
        try:
            yield hold
            traffic.served(prompt.token_ids if prompt is not None else None, self._tokens_per_block)
        finally:
            traffic.in_flight -= 1
            self._poller.wake()

    def _new_reader(self) -> PolledEventReader:
        if self._server is None:
            return PolledEventReader(DEFAULT_TOKENS_PER_BLOCK, exact=False)
        return PolledEventReader(self._tokens_per_block, exact=self._server.whole_blocks_only)
