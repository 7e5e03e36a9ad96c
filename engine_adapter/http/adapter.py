"""The base of all adapters: every engine is reached over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.errors import EngineRejected, EngineUnavailable, EngineUnhealthy
from engine_adapter.events.fields import KeyReader
from engine_adapter.events.subscriber import EventEndpoints, KvEventSubscriber
from engine_adapter.hold import Hold, RequestBody
from engine_adapter.http.control import WANTS_KEY, ControlClient
from engine_adapter.http.prepare import HeaderPairs, Headers, OutgoingRequest, prepare_request
from engine_adapter.types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Capability,
    EngineSpec,
    EventPosition,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    Tier,
    ViewCurrent,
    ViewLost,
    ViewResumed,
)

# --- reads what an engine says of its models at `/v1/models` --------------------------------------------

# Fields of a model's card that kvpin sets itself, or that differ each time. A `root` may be a path.
_NOT_THE_ENGINES = frozenset({"id", "object", "created", "owned_by", "root", "parent", "permission"})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The base model of an engine.

    Attributes:
        max_model_len: its context in tokens, None if the engine does not say.
        root: directory or hub id, None if the engine does not say.
        card: the engine's own fields of it, without those that kvpin sets itself.
        loras: names of the LoRA adapters beside it.
        lora_paths: where the engine read each of them from, as far as it says.
        others: names of the other base models: more names of this one, or LoRA adapters of an engine that
            names no parents.
    """

    name: str
    max_model_len: int | None
    root: str | None
    card: Mapping[str, Any] = field(repr=False)
    loras: frozenset[str]
    lora_paths: Mapping[str, str]
    others: frozenset[str] = frozenset()


def read_models(answer: object, wanted: str | None = None) -> ServedModel:
    """The base model named `wanted`, or the first base model if there is none of that name.

    Raises:
        EngineUnavailable: the answer names no base model.
    """
    match answer:
        case {"data": [*entries]}:
            named = [each for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]
        case _:
            named = []
    bases = [each for each in named if each.get("parent") is None]
    if not bases:
        raise EngineUnavailable("/v1/models names no model")
    adapters = [each for each in named if each.get("parent") is not None]
    base = next((each for each in bases if each["id"] == wanted), bases[0])
    length, root = base.get("max_model_len"), base.get("root")
    return ServedModel(
        name=base["id"],
        max_model_len=length if isinstance(length, int) else None,
        root=root if isinstance(root, str) else None,
        card={name: value for name, value in base.items() if name not in _NOT_THE_ENGINES},
        loras=frozenset(each["id"] for each in adapters),
        lora_paths={each["id"]: each["root"] for each in adapters if isinstance(each.get("root"), str)},
        others=frozenset(each["id"] for each in bases) - {base["id"]},
    )


# --- adapter --------------------------------------------------------------------------------------------


def rank_headers(rank: int | None) -> dict[str, str]:
    """The headers that send a request to a data-parallel rank; none where the server is left to choose."""
    return {} if rank is None else {"x-data-parallel-rank": str(rank)}


class EventWatch:
    """The blocks known to lie on the GPU, and how often the cache was cleared.

    Engines such as vLLM report a block when it is stored, and again on reuse if the request asks for that.
    While the view is incomplete, kvpin's requests ask, so reused blocks become known. That ends when the
    cache was cleared, or when as many blocks are known as the cache holds.

    Attributes:
        capacity: of the GPU, in the engine's blocks; None where unknown.
        clearings: how often the cache was cleared.
        is_followed: somebody reads the events now.
        tokens_per_block: the block size; None until blocks show it.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self._known: set[int | bytes] = set()
        self._learned: int | None = None  # newly known blocks while the view is incomplete, else None
        self.clearings = 0
        self.is_followed = False
        self.tokens_per_block: int | None = None
        self._cleared = asyncio.Event()

    @property
    def blocks(self) -> int:
        """Blocks known to lie on the GPU."""
        return len(self._known)

    @property
    def wants_reuse_told(self) -> bool:
        """True if requests should ask the engine to report reused blocks."""
        return self._learned is not None

    def note(self, event: KvEvent) -> None:
        """Notes an event that its reader has processed."""
        match event:
            case BlocksStored(tier=Tier.GPU, hashes=hashes, group=None):
                self.tokens_per_block = event.tokens_per_block
                self._store(hashes)
            case BlocksRemoved(tier=Tier.GPU, hashes=hashes, group=None):
                self._known.difference_update(hashes)
            case ViewCurrent(complete=complete):
                self._learned = None if complete else 0
            case ViewLost() | ViewResumed():
                self._forget()
            case CacheCleared():
                self._forget()
                self.clearings += 1
                self._cleared.set()

    def _store(self, hashes: tuple[int | bytes, ...]) -> None:
        before = len(self._known)
        self._known.update(hashes)
        if self._learned is not None:
            self._learned += len(self._known) - before
            if self.capacity is not None and self._learned >= self.capacity:
                self._learned = None

    def _forget(self) -> None:
        self._known.clear()
        self._learned = None

    async def wait_for_clearing(self, after: int, timeout_s: float) -> bool:
        """Waits until the cache was cleared more than `after` times; False after the time-out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.clearings <= after:
                    self._cleared.clear()
                    await self._cleared.wait()
        return self.clearings > after


class HttpAdapter(EngineAdapter):
    """Sends requests to the engine's address; `_control` calls its own routes.

    An engine that manages its cache by itself and publishes events over ZMQ gives `connect` the addresses to
    set, `_read_keys`, and `_reset` if its cache can be emptied.

    Attributes:
        _own_headers: headers of every request of a client, in place of the client's own of the same name:
            those that name its rank.
        _findings: what `connect` found, for `findings`.
        _endpoints: the addresses of its events, as of the last `connect`; None if they cannot be followed.
        _read_keys: reads the keys beside its blocks' tokens.
        _silent_s: seconds that its replay socket may be silent.
        _subscriber: follows its events.
        _watch: what these have told.
    """

    _findings: tuple[Finding, ...] = ()
    _endpoints: EventEndpoints | None = None
    _read_keys: KeyReader | None = None
    _silent_s = 30.0
    _subscriber: KvEventSubscriber | None = None
    _control: ControlClient

    def __init__(self, spec: EngineSpec[Any]) -> None:
        """Raises EngineSpecError for an address, a header or a TLS file that cannot be used."""
        self.spec = spec
        self._control = ControlClient(spec)
        self._own_headers: HeaderPairs = Headers.pairs_of(rank_headers(spec.options.rank))
        self._watch = EventWatch()

    @override
    def findings(self) -> tuple[Finding, ...]:
        return self._findings

    @override
    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        return nullcontext(self._hold(path, body, prompt) if isinstance(body, JsonBody) else Hold(body))

    def _hold(self, path: str, body: JsonBody, prompt: KvTarget | None) -> Hold:  # noqa: ARG002
        """The hold of a request with a JSON body, of an engine that has room for any."""
        return Hold(body)

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        return prepare_request(self.spec, method, path, headers, body, self._own_headers)

    @override
    def on_closed(self, call: Callable[[], None]) -> None:
        self._control.on_closed = call

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
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

    @override
    def event_position(self) -> EventPosition | None:
        return self._subscriber.position if self._subscriber is not None else None

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        """Flushes everything, on all ranks of the server: an engine that manages its cache by itself does no
        more. Tells the blocks that its events have shown."""
        await self.require(Capability(verb.value))
        self.check_flushes_all(target)
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

    @override
    async def aclose(self) -> None:
        await self._control.aclose()


class HealthRoute:
    """A route that answers 2xx while the engine is well. A server without it is not asked again."""

    def __init__(self, control: ControlClient, path: str, *lacks: int) -> None:
        """`lacks`: further statuses, beside 404, by which servers answer that lack the route."""
        self._control, self._path = control, path
        self._lacks = (HTTPStatus.NOT_FOUND, *lacks)
        self._is_there = True

    async def check(self) -> None:
        """Raises EngineUnhealthy if the engine is not well, EngineUnavailable if it is not reachable, and
        EngineRejected if it wants a key."""
        if not self._is_there:
            return
        try:
            await self._control.fetch("GET", self._path)
        except EngineRejected as error:
            if error.status not in self._lacks:
                if error.status in WANTS_KEY:
                    raise
                raise EngineUnhealthy(f"{self._path} answered {error.status}: {error}") from error
            self._is_there = False
