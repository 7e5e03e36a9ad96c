"""The contract of every engine adapter, and what all inherit. `tests/contract` tests each against it.

Read it from top to bottom, then `EngineInfo` and `Capability` in types.py; docs/add-an-engine.md is the way
through both. An adapter inherits `EngineAdapter` and writes `connect` and `load`. All other methods have a
default: those of a capability refuse, and say what to do instead.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

from engine_adapter.body import JsonBody
from engine_adapter.errors import ModelNotLoaded, NotSupported
from engine_adapter.events.fields import KeyReader
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.hold import Forecast, Hold, Rendezvous, RequestBody, Transfer
from engine_adapter.http.adapter import EventWatch, rank_headers
from engine_adapter.http.control import ControlClient
from engine_adapter.http.prepare import Headers, OutgoingRequest, prepare_request
from engine_adapter.types import (
    BelowGpu,
    Capability,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    EventPosition,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    ModelState,
    Pinned,
    PromptTable,
    RenderedPrompt,
    TokenIds,
)

_FLUSHES_ALL = "it can only flush everything: flush the whole engine, or leave unused KV to eviction"
_WARMS = '"fallback": "warm" computes a prefix again by a one-token prefill'
_ANY_ENGINE: Mapping[Capability, str] = MappingProxyType(
    {
        Capability.KV_EVENTS: "kvpin learns what it holds from its answers",
        Capability.CACHED_TOKENS: "the usage in its answers may tell",
        Capability.TOKENIZE: "kvpin tokenises prompts with the engine's tokenizer setting",
        Capability.RENDER: "prompts with images are forwarded but not followed",
        Capability.CACHE_SALT: "serve tenants that must not share KV from engines of their own",
        Capability.EXTRA_IDS: "this engine can only warm text prompts",
        Capability.PROMPT_TABLES: "serve the model with the embedded engine to use prompt tables",
        Capability.FLUSH: "restart the engine, or let eviction take the KV",
        Capability.OFFLOAD: "its own eviction decides what stays",
        Capability.RESTORE: _WARMS,
        Capability.PIN: "warm the prefix again when it is needed",
    }
)


class EngineAdapter(ABC):
    """One engine of any framework, at its HTTP address.

    Every method that talks to the engine raises EngineUnavailable if it is not reachable and EngineRejected
    if it answers an error. A method whose capability is not in `EngineInfo.capabilities` raises NotSupported.

    An engine that manages its cache by itself and publishes events over ZMQ gives `connect` the addresses to
    set, `_read_keys`, and `_reset` if its cache can be emptied.

    Attributes:
        spec: the engine as the operator described it.
        one_owner: only one kvpin at a time may use the engine: the adapter manages its cache, and a second
            kvpin would change that unseen.
        has_lock: `connect` finds out by itself that another kvpin uses the engine [`one_owner`].
        may_try: `connect` may try out what the engine can do, at the cost of some of its KV. False where
            another kvpin may use the engine: facts that only a trial tells are unknown then.
        capabilities: those of the last `connect`, for `require`; None before the first.
        transfer: how the engine, which has a role, moves KV to or from others; None if it cannot.
        rendezvous: how the engine, which serves only half of a request, meets the one that serves the other
            half; None if it answers alone.
        instead: advice for missing capabilities that no finding names, where this kind has other advice than
            any engine.

    Attributes for adapters:
        _control: calls the engine's own routes.
        _own_headers: headers of every request of a client, in place of the client's own of the same name:
            those that name its rank.
        _findings: what `connect` found, for `findings`.
        _endpoints: the addresses of its events, as of the last `connect`; None if they cannot be followed.
        _read_keys: reads the keys beside its blocks' tokens.
        _silent_s: seconds that its replay socket may be silent.
        _subscriber: follows its events.
        _watch: what these have told.
    """

    spec: EngineSpec[Any]
    one_owner: ClassVar[bool] = False
    has_lock: bool = False
    may_try: bool = True
    capabilities: frozenset[Capability] | None = None
    transfer: Transfer | None = None
    rendezvous: Rendezvous | None = None
    instead: ClassVar[Mapping[Capability, str]] = MappingProxyType({})
    _findings: tuple[Finding, ...] = ()
    _endpoints: EventEndpoints | None = None
    _read_keys: KeyReader | None = None
    _silent_s = 30.0
    _subscriber: KvEventSubscriber | None = None

    def __init__(self, spec: EngineSpec[Any]) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        self.spec = spec
        self._control = ControlClient(spec)
        self._own_headers = Headers.pairs_of(rank_headers(spec.options.rank))
        self._watch = EventWatch()

    @abstractmethod
    async def connect(self) -> EngineInfo:
        """Asks the engine what it is; called again after each outage or call that was cut short. It does not
        affect others. Once for each process, it may try it out, by a few requests for one token [`may_try`].

        Raises:
            EngineUnavailable: the engine is gone, not ready, or too busy to be tried out.
            EngineRejected: it wants another key, or is not of this kind.
            EngineTaken: another kvpin uses the engine, and only one may.
        """

    @abstractmethod
    async def load(self) -> EngineLoad:
        """Running and waiting requests; also the health check.

        Raises:
            EngineUnhealthy, EngineRejected: the engine is not healthy, but the process is the same.
            EngineUnavailable: its KV is gone: the process was replaced since `connect`, sleeps or is gone.
        """

    def findings(self) -> tuple[Finding, ...]:
        """The findings that keep kvpin from using the engine fully, as of the last `connect`."""
        return self._findings

    async def stats(self) -> dict[str, Any]:
        """The engine's own KV statistics, for people: blocks per tier, pins, hits; {} if unknown."""
        return {}

    def on_closed(self, call: Callable[[], None]) -> None:
        """Calls back when the engine closes an idle connection: another process may answer from now on. While
        kvpin checks the engine often, it keeps a connection open, so this is soon known."""
        self._control.on_closed = call

    async def aclose(self) -> None:
        """Closes connections; the engine keeps running."""
        await self._control.aclose()

    # --- requests -------------------------------------------------------------------------------------

    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        """The client's request for this engine: its address, key and headers, and the client's headers
        without hop-by-hop ones. A JSON body keeps its bytes unless a field was changed with
        `JsonBody.replace`. An upload is streamed unread. None is a request without a body."""
        return prepare_request(self.spec, method, path, headers, body, self._own_headers)

    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        """Makes room for a request before it is sent, and holds it until the answer is over.

        Args:
            path: the request's route.
            body: its body.
            prompt: its tokens, and how long to keep its KV; None if unknown.

        Raises:
            EngineRejected: the engine cannot serve this (400), e.g. token ids where it takes only text.
        """
        return nullcontext(self._hold(path, body, prompt) if isinstance(body, JsonBody) else Hold(body))

    def _hold(self, path: str, body: JsonBody, prompt: KvTarget | None) -> Hold:  # noqa: ARG002 - as above
        """The hold of a request with a JSON body, of an engine that has room for any."""
        return Hold(body)

    def cached_tokens(self, headers: Mapping[str, str]) -> int | None:  # noqa: ARG002 - as above
        """Reused prompt tokens, if the engine reports them in response headers; else None."""
        return None

    def priced_by(
        self,
        prefill_s: Callable[[int], float],  # noqa: ARG002 - of adapters that plan
        returns: Callable[[float], float],  # noqa: ARG002
    ) -> None:
        """The engine has joined a pool. Each call gives what the pool has learned by then. `prefill_s`:
        prompt tokens → seconds to compute them. `returns`: idle seconds of a prompt → probability that it is
        requested again."""
        return

    def forecast(self, prompt: KvTarget) -> Forecast | None:  # noqa: ARG002 - of adapters that can tell
        """The cost of the prompt now, if the adapter manages the engine's cache itself; None if the index and
        the learned rates give it. No I/O, no side effects."""
        return None

    # --- what an engine lacks -------------------------------------------------------------------------

    async def require(self, capability: Capability) -> None:
        """Connects if that has not happened yet. Raises NotSupported for a missing capability."""
        if self.capabilities is None:
            await self.connect()
        if capability not in (self.capabilities or ()):
            raise self.not_supported(capability)

    def not_supported(self, capability: Capability) -> NotSupported:
        """The error for a missing capability. It tells the finding of what costs it, or else what to do
        instead."""
        found = next((str(each) for each in self.findings() if capability in each.lacks), None)
        if found is not None and capability is Capability.RESTORE:
            found = f"{found}; {_WARMS}"
        advice = found or self.instead.get(capability, _ANY_ENGINE[capability])
        return NotSupported(capability.value, engine=self.spec.id, instead=advice)

    # --- capabilities: each raises NotSupported where it is not declared ------------------------------

    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:  # noqa: ARG002 - as above
        """Token ids of a request, exactly as the engine would serve it [Capability.TOKENIZE]. `path` is the
        request's own. `/v1/chat/completions` and `/v1/completions` always work; a route that the engine
        cannot tokenise raises EngineRejected."""
        raise self.not_supported(Capability.TOKENIZE)

    async def tokenize_if_loaded(self, path: str, body: JsonBody) -> TokenIds[int]:
        """As `tokenize`, for a question of kvpin's own. Raises ModelNotLoaded where that would load
        or wake the model."""
        return await self.tokenize(path, body)

    async def render(self, path: str, body: JsonBody) -> RenderedPrompt:  # noqa: ARG002 - as above
        """Token ids of a request with images, and where each image lies [Capability.RENDER]; or of one with
        prompt embeddings, and what identifies them [`EngineInfo.renders_embeds`]. Raises EngineRejected for a
        request that the engine would refuse, or whose prompt is not known."""
        raise self.not_supported(Capability.RENDER)

    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        """Yields what the engine stores and removes, while the caller iterates [Capability.KV_EVENTS].

        First comes ViewLost, then what the engine already holds (as far as known), then ViewCurrent, then
        changes. After a gap that cannot be filled, it starts again with ViewLost. Raises EngineUnavailable if
        the engine goes away.

        `since` is where an earlier reader stopped. If the engine proves that nothing is missing since then,
        ViewResumed replaces the first ViewLost, and only what came later follows."""
        if self.capabilities is None:
            await self.connect()
        if self._endpoints is None:
            raise self.not_supported(Capability.KV_EVENTS)
        subscriber = self._subscriber = KvEventSubscriber(
            self._endpoints,
            read_keys=self._read_keys,
            idle_timeout_s=self._silent_s,
            since=since,
            between=self._between,
        )
        read, watch = self._reading(), self._watch
        watch.is_followed = True
        try:
            async with aclosing(subscriber.events()) as events:
                async for sent in events:
                    for event in read(sent):
                        yield event
                        watch.note(event)  # its reader has processed it
        finally:
            watch.is_followed = False

    def _between(self) -> Iterable[KvEvent]:
        """Events before each message of the event socket; see `KvEventSubscriber.between`."""
        return ()

    def _reading(self) -> Callable[[KvEvent], Iterable[KvEvent]]:
        """What turns the engine's events into those of its cache, from the start of a stream on."""
        return lambda event: (event,)

    def event_position(self) -> EventPosition | None:
        """The place after all events that `events` yielded and its caller took; None if nobody could go on
        there."""
        return self._subscriber.position if self._subscriber is not None else None

    async def lookup(self, prompt: KvTarget) -> BelowGpu | None:  # noqa: ARG002 - as above
        """The part of a prompt that the tiers below the GPU hold now, for engines with
        `EngineInfo.tokens_per_chunk`. None if the tiers do not answer in time. Never raises."""
        return None

    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Flushes, offloads or restores. Yields progress; the last item is the result. Works in slices, so
        that running requests keep their blocks and their speed.

        By default it flushes everything, on all ranks of the server: an engine that manages its cache by
        itself does no more. It tells the blocks that its events have shown."""
        await self.require(Capability(verb.value))
        if (target.token_ids, target.cache_salt, target.lora) != (None, None, None):
            raise NotSupported(Capability.FLUSH.value, engine=self.spec.id, instead=_FLUSHES_ALL)
        blocks = self._known_blocks
        if await self._reset():
            yield KvProgress(blocks, blocks)
        else:
            yield KvProgress(0, blocks, left={"busy": max(blocks, 1)})

    @property
    def _known_blocks(self) -> int:
        """Blocks that its events have shown to be held."""
        return self._watch.blocks

    async def _reset(self) -> bool:
        """Empties the engine's cache, and waits until its events, if somebody reads them, say so. False if
        running requests keep it from that [Capability.FLUSH]."""
        raise self.not_supported(Capability.FLUSH)

    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:  # noqa: ARG002 - as above
        """Protects a prefix from eviction for `ttl_s` seconds [Capability.PIN]."""
        raise self.not_supported(Capability.PIN)

    async def unpin(self, pin_id: str) -> bool:  # noqa: ARG002 - as above
        """Ends a pin; False if there is none with that id [Capability.PIN]."""
        raise self.not_supported(Capability.PIN)

    def holds_pin(self, pin_id: str) -> bool:  # noqa: ARG002 - as above
        """False for a pin that ended with the adapter that made it. Most engines keep their own pins."""
        return True

    async def put_prompt_table(self, table: PromptTable) -> None:  # noqa: ARG002 - as above
        """Registers a p-tuning table [Capability.PROMPT_TABLES]; registering it twice is fine."""
        raise self.not_supported(Capability.PROMPT_TABLES)

    async def delete_prompt_table(self, table_id: str) -> None:  # noqa: ARG002 - as above
        """Removes a table [Capability.PROMPT_TABLES]; an unknown id is fine."""
        raise self.not_supported(Capability.PROMPT_TABLES)

    # --- engines that load and unload their model, or that only one kvpin may use ---------------------

    @property
    def model_state(self) -> ModelState | None:
        """The state of its model, if the engine loads and unloads it; else None. kvpin's own questions must
        neither load nor wake a model."""
        return None

    async def is_loaded(self) -> bool:
        """True if its model is in memory now, by the engine's own word: a question loads or wakes none."""
        return self.model_state in (None, ModelState.LOADED)

    @asynccontextmanager
    async def kept_loaded(self, within_s: float) -> AsyncIterator[None]:
        """Waits until its model is in memory, and keeps it there, if it can, until the block ends. Raises
        ModelNotLoaded if no request has loaded or woken it within `within_s` seconds."""
        if not await self.is_loaded():
            await asyncio.sleep(within_s)
            if not await self.is_loaded():
                raise ModelNotLoaded("the model is not in memory")
        yield

    async def leave(self) -> None:
        """Forgets the engine's cache: another kvpin uses the engine now. `connect` starts again."""
        return  # several kvpins may use it
