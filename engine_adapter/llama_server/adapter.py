"""llama-server as an engine: slots are leased, prompts pinned to them, their KV saved and restored.

connect → what the server is (discovery.py) → a scheduler for its slots, or none if they cannot be managed;
          nothing is asked of a model that is not in memory (router.py): its first request comes before that
hold    → a slot for the request (requests.py) → body with id_slot → what the answer left (answer.py)
"""

from __future__ import annotations

import os
from asyncio import CancelledError, Lock
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import structs
from typing_extensions import override

from engine_adapter.base import EngineAdapter
from engine_adapter.body import JsonBody
from engine_adapter.errors import (
    EngineError,
    EngineRejected,
    EngineSpecError,
    EngineTaken,
    EngineUnavailable,
    ModelNotLoaded,
)
from engine_adapter.hold import Forecast, Hold, RequestBody
from engine_adapter.http.adapter import read_models
from engine_adapter.http.prepare import OutgoingRequest
from engine_adapter.http.web_pages import is_loopback
from engine_adapter.llama_server.command import FLAG_ALONE
from engine_adapter.llama_server.discovery import MOVES, ServerFacts, discover, findings_of
from engine_adapter.llama_server.mirror_events import MirrorEvents
from engine_adapter.llama_server.options import LOAD, OF_ROUTER, PINNED_ROUTES, ROUTES, LlamaServerSpec
from engine_adapter.llama_server.plan import SlotRates
from engine_adapter.llama_server.requests import ask_of, hold_request
from engine_adapter.llama_server.router import Router, RouterModel, ServerClient
from engine_adapter.llama_server.saved import Saved, SavedEvent, SavedPlace, SavedPrefixes
from engine_adapter.llama_server.scheduler import SlotScheduler
from engine_adapter.llama_server.server_files import ServerLock
from engine_adapter.llama_server.session import ServerSession, absent, info_of
from engine_adapter.llama_server.slot_io import Pulse, read_pulse, tokenize
from engine_adapter.llama_server.verbs import SlotVerbs
from engine_adapter.options import READ
from engine_adapter.types import (
    Capability,
    EngineInfo,
    EngineLoad,
    EventPosition,
    Finding,
    KvEvent,
    KvProgress,
    KvTarget,
    KvVerb,
    ModelState,
    Pinned,
    TokenIds,
)

DEFAULT_CACHE_BYTES = 4 * 2**30
# The server keeps the stream of a conversation that this header names, and generates on when its client has
# left: the slot would not be free.
_CONVERSATION = "x-conversation-id"
# Of a router's models: the directory where their processes save.
_SAVES_TO = "--slot-save-path"
_FLAGS_UNKNOWN = "its flags are not known before its model is first in memory: send a request for it first"
_SALT_UNKNOWN = (
    "it is not known yet whether it has a prompt cache of its own, which would serve every tenant (none with "
    "--cache-ram 0): kvpin serve finds out on an idle slot, kvpin doctor with --probe"
)
_INSTEAD = {
    Capability.CACHE_SALT: _SALT_UNKNOWN,
    **dict.fromkeys((Capability.PIN, Capability.FLUSH, *MOVES), _FLAGS_UNKNOWN),
}


class LlamaServerAdapter(EngineAdapter):
    """`EngineAdapter` of llama.cpp's llama-server."""

    spec: LlamaServerSpec
    instead = _INSTEAD
    one_owner = True

    def __init__(self, spec: LlamaServerSpec) -> None:
        """Raises EngineSpecError for an invalid address, or directories that contradict each other."""
        super().__init__(spec)
        self._control: ServerClient = ServerClient(spec)
        self._mirror = MirrorEvents()
        self._rates = SlotRates()
        self._registry: SavedPrefixes | None = None
        self._found: str | None = None  # the directory where it saves, if the settings name none
        self._save_to(_place(spec))
        self._lock = ServerLock(self._directory, spec.url)
        self._session: ServerSession | None = None
        self._router: Router | None = None
        self._known: EngineInfo | None = None  # as of its last session
        self._told: EngineInfo | None = None  # by `connect`
        self._latest: dict[tuple[object, ...], ServerSession] = {}  # its latest session, by `_alike`
        self._flags: tuple[str, ...] | None = None  # of a router's model, when `_known` was begun
        self._too_slow = ""  # the identity of a process that was too slow for the probe
        self._pulse = Pulse()  # as it was told last, where there are no managed slots
        self._is_emptied = False  # such slots have lost their KV; `load` has not told it yet
        self._connecting = Lock()

    # --- what it is -----------------------------------------------------------------------------------

    @property
    @override
    def has_lock(self) -> bool:  # type: ignore[override]  # a constant where no kvpin may be kept off
        return self._lock.is_possible

    @property
    @override
    def model_state(self) -> ModelState | None:
        if self._router is not None:
            return self._router.state(self.spec.model or "")
        scheduler = self._scheduler
        sleeps = self._pulse.is_sleeping if scheduler is None else scheduler.sleeps
        return ModelState.SLEEPING if sleeps else None

    @override
    async def connect(self) -> EngineInfo:
        await self._control.fetch("GET", "/health")
        async with self._connecting:
            if self._session is not None:
                control = self._control if self._router is None else self._router.control
                if ((await read_pulse(control)).role == "router") != (self._router is not None):
                    await self.end_session(farewell=False)  # a plain server took the place of a router
            if self._session is None:
                await self._meet()
            if self._router is not None and self.spec.model is None:
                return EngineInfo("", self.spec.server, frozenset(), models=self._router.states)
            if self.may_try:  # who only looks takes no slots
                self._lock.take()
            name = self._control.model
            if self.model_state is None:
                await self._take_up(is_check=True)
            elif (
                self._router and name and self._router.is_open(name) and self.model_state is ModelState.LOADED
            ):
                with self._router.keeping(name):
                    await self._take_up(is_check=True)
            self._told = self._info()
            return self._told

    async def _meet(self) -> None:
        """Finds out whether a router answers, and whether the server sleeps. Wakes and loads nothing."""
        self._control.model, name = None, self.spec.model
        self._pulse = await read_pulse(self._control)
        router = Router.at(self.spec, self._pulse)
        if router is not self._router:
            if self._router is not None:
                await self._router.leave(name or "", self.end_session)
            self._router, self._known = router, None
            if router is not None:
                router.join(name or "", self.end_session)
            else:  # a plain server took its place: it has a lock of its own, and saves elsewhere
                if self._registry is not None and self._found is not None:
                    self._registry.unsubscribe(self._on_saved)
                    self._registry = self._found = None
                self._lock.free()
                self._lock = ServerLock(self._directory, self.spec.url)
        if router is None:
            if self._pulse.is_sleeping:
                model = read_models(await self._control.get("/v1/models"))
                self._known = absent(name or model.name, self._pulse.instance or "", model.card)
            return
        await router.refresh()
        self._control.model = name
        flags = router.flags(name or "")
        if name is not None and (self._known is None or flags not in (None, self._flags)):
            # Each model of the router has a lock of its own.
            self._lock.free()
            self._lock = ServerLock(self._directory, self._place.url)
            self._find_directory(router.model(name))
            keeps_none = router.model(name).flag("--cache-ram") == "0"
            self._flags, self._known = flags, absent(name, self._place.url, {}, keeps_none=keeps_none)

    @property
    def _place(self) -> LlamaServerSpec:
        """The engine, under an address that no other model of its server has."""
        model = self._control.model
        if model is None:
            return self.spec
        found = {"host_cache_dir": self._found} if self._found is not None else {}
        options = structs.replace(self.spec.options, **found)
        return replace(self.spec, url=f"{self.spec.url}#{model}", options=options)

    @property
    def _directory(self) -> Path | None:
        """Where its saved files lie, as kvpin sees them; None if nothing is saved."""
        return self._registry.place.host if self._registry is not None else None

    def _save_to(self, place: SavedPlace | None) -> None:
        """Saves prefixes there from now on. EngineSpecError means that it contradicts another engine."""
        if place is not None:
            self._registry = SavedPrefixes.shared(place, self.spec.id)
            self._registry.subscribe(self._on_saved, self.spec.id)

    def _find_directory(self, model: RouterModel) -> None:
        """Learns from a router of this machine where a model's process will save, if no setting names that.
        The probe of the process finds out whether its files really arrive there."""
        directory, host = model.flag(_SAVES_TO), urlsplit(self.spec.url).hostname or ""
        if self._registry is not None or directory is None or not is_loopback(host):
            return
        if not Path(directory).is_absolute() or not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            return
        lock = ServerLock(Path(directory), self._place.url)
        try:
            if self.may_try:
                lock.take()
            self._found = directory
            self._save_to(_place(self._place))
        except (EngineTaken, EngineSpecError):  # another kvpin saves there, or an engine with other sizes
            self._found = None
            lock.free()
        else:
            self._lock = lock

    async def _take_up(self, *, is_check: bool = False) -> None:
        """Begins the session of the process that answers, unless it has begun."""
        session = self._session
        if session is not None and await session.is_busy_moving():
            return
        known = session.facts_now if session is not None else None
        facts = await discover(self._control, self.spec, known, may_try=self.may_try)
        facts = replace(facts, cache_reuse=self.spec.options.cache_reuse)
        if session is None or session.is_lost or session.facts.identity != facts.identity:
            await self.end_session(farewell=False)
            alike = self._alike(facts)
            latest = self._latest.get(alike) if alike else None
            told = latest.probed if latest is not None else None
            if told and latest and not told.continues and latest.facts.instance != facts.instance:
                told = None  # it was probed late: the key of its files is its own
            session = ServerSession(
                self._place,
                self._control,
                facts,
                may_try=self.may_try,
                told=told,
                is_too_slow=self._too_slow == facts.identity,
                rates=self._rates,
            )
            try:
                await session.begin(self._registry, self._mirror)
            except CancelledError:
                if is_check and session.is_probing:  # no client has left: the time of the check was over
                    self._too_slow = facts.identity  # the next time it is used as it is
                raise
            self._session, self._latest = session, {alike: session}
            if session.scheduler is not None:
                for entry in session.scheduler.contents.all_entries():
                    self._on_saved(SavedEvent.ADDED, entry)

    def _alike(self, facts: ServerFacts) -> tuple[object, ...]:
        """A key of the processes that one probe tells of, empty if it cannot be named. A router's model with
        the same file and flags has processes that are alike; of any other server, there is this one."""
        if self._router is None:
            return (facts.identity,) if facts.instance else ()
        return facts.fingerprint, self._router.flags(self.spec.model or "")

    def _info(self) -> EngineInfo:
        """The facts about the server. While its model is not in memory, those of the last time."""
        router, session = self._router, self._session
        info = self._known if session is None else info_of(self.spec, session)
        assert info is not None  # noqa: S101 - `_meet` has set it
        if router is not None and self.spec.model is not None:
            info = replace(
                info,
                instance=self._place.url,
                names_process=False,
                any_model=False,
                routes=OF_ROUTER,
                models=router.states,
                card=router.card(self.spec.model),
            )
        self._known, self.capabilities = info, info.capabilities
        return info

    @override
    async def leave(self) -> None:
        """Saves nothing: the other kvpin moves KV already."""
        await self.end_session(farewell=False)
        self._lock.free()

    @override
    async def load(self) -> EngineLoad:
        await self._control.fetch("GET", "/health")
        session, scheduler = self._session, self._scheduler
        try:
            await self._look()
        except EngineError:
            if session is not None and self._session is not session:
                return EngineLoad(running=0, waiting=0, counted=False)  # it was unloaded meanwhile
            raise
        if session is None or scheduler is None:
            # A model in memory is met, so that its first request finds its tokenizer, and again to be probed.
            is_new = self.model_state in (None, ModelState.LOADED) and not self._connecting.locked()
            if is_new and session is not None:
                is_new = await session.can_be_probed() and self._session is session
                if is_new:
                    was_emptied = self._is_emptied
                    await self.end_session(farewell=False)  # requests wait until the next one has begun
                    self._is_emptied = was_emptied  # a probe takes the content of one slot alone
            is_emptied, self._is_emptied = self._is_emptied, False
            is_new = is_new or self._is_outdated
            return EngineLoad(running=0, waiting=0, counted=False, outdated=is_new, emptied=is_emptied)
        # Only after requests: reading the slots regularly would keep the server from falling asleep.
        if scheduler.has_worked and not (scheduler.streams or scheduler.moves_kv or scheduler.sleeps):
            await scheduler.reconcile()
            await session.try_out()
            if session.verbs is not None:
                session.verbs.protect()  # what is pinned may have come back since kvpin was killed
            self.capabilities = session.capabilities
        return EngineLoad(running=scheduler.streams, waiting=scheduler.waiting, outdated=self._is_outdated)

    @override
    async def is_loaded(self) -> bool:
        if self._router is None:
            await self._look()
        return await super().is_loaded()

    @override
    @asynccontextmanager
    async def kept_loaded(self, within_s: float) -> AsyncIterator[None]:
        router, name = self._router, self._control.model
        visit = router.visiting(name, within_s) if router and name else super().kept_loaded(within_s)
        async with visit:
            yield

    async def _look(self) -> None:
        """Learns whether the server sleeps. A router tells the states of its models itself."""
        if self._scheduler is not None:
            await self._scheduler.look()
        elif self._router is None:
            before, self._pulse = self._pulse, await read_pulse(self._control)
            self._is_emptied |= self._pulse.is_sleeping and not before.is_sleeping

    @property
    def _is_outdated(self) -> bool:
        """True if a request has loaded or woken the model, or if its router has other models by now."""
        if self._connecting.locked():
            return False  # a request is about to meet it
        told, router = self._told, self._router
        has_others = router is not None and told is not None and told.models.keys() != router.states.keys()
        return self._known is not told or has_others

    @override
    async def tokenize(self, path: str, body: JsonBody) -> TokenIds[int]:
        router, name = self._router, self._control.model
        if router is None or name is None:
            return await tokenize(self._control, path, body)
        try:
            with router.keeping(name):
                return await tokenize(self._control, path, body)
        except EngineRejected as error:
            if await router.has(name):
                raise
            raise ModelNotLoaded(f"the model {name!r} is not loaded") from error

    @override
    async def tokenize_if_loaded(self, path: str, body: JsonBody) -> TokenIds[int]:
        if not await self.is_loaded():
            raise ModelNotLoaded("the model is not in memory")
        return await self.tokenize(path, body)

    # --- requests -------------------------------------------------------------------------------------

    @override
    def priced_by(self, prefill_s: Callable[[int], float], returns: Callable[[float], float]) -> None:
        self._rates.prefill_s, self._rates.returns = prefill_s, returns

    @override
    def forecast(self, prompt: KvTarget) -> Forecast | None:
        session, scheduler = self._session, self._scheduler
        if session is None and self._router is not None:
            return Forecast(0, firm=False, wait_s=self._router.load_s(self.spec.model or ""))
        if session is None or scheduler is None:
            return None
        forecast = scheduler.forecast(ask_of(prompt, self._mirror))
        return forecast if session.facts.keeps_none_itself else replace(forecast, firm=False)

    @override
    def hold(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AbstractAsyncContextManager[Hold]:
        if self._pulse.is_sleeping and ROUTES.get(path) is not READ:  # it wakes it; managed slots tell
            self._pulse = structs.replace(self._pulse, is_sleeping=False)
        if self._router is not None or (self._session is None and ROUTES.get(path) is not READ):
            return self._hold_in_session(path, body, prompt)
        return hold_request(self._session, path, body, prompt)

    @asynccontextmanager
    async def _hold_in_session(
        self, path: str, body: RequestBody, prompt: KvTarget | None
    ) -> AsyncIterator[Hold]:
        """Loads or wakes the model first, where it is not in memory. Waits while a server is tried out."""
        name = self._control.model
        if path == LOAD and self._router and name:
            self._router.try_again(name)
            async with self._router.room_for(name):
                yield Hold(body)
            return
        async with self._router.using(name) if self._router and name else nullcontext():
            is_there = self._router is None or self.model_state in (ModelState.LOADED, ModelState.SLEEPING)
            if self._session is None and is_there:
                async with self._connecting:
                    try:
                        if self._session is None:
                            await self._take_up()
                    except EngineRejected as error:
                        raise EngineUnavailable(f"the model was unloaded meanwhile: {error}") from error
                told = self._told
                if told is not None and told.is_another(self._info()):
                    prompt = None  # it was made for another file of this name
                if prompt is None and isinstance(body, JsonBody) and path in PINNED_ROUTES:
                    # The prompt could not be tokenised before. Where the server was thought to take no salts,
                    # the body has the client's own alone: then one tenant uses the server, or all share it.
                    with suppress(EngineRejected):
                        prompt = KvTarget(await self.tokenize(path, body), cache_salt=body.get("cache_salt"))
            async with hold_request(self._session, path, body, prompt) as hold:
                yield hold

    @override
    def prepare(
        self, method: str, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> OutgoingRequest:
        request = super().prepare(method, path, headers, body)
        if _CONVERSATION in headers:
            kept = [pair for pair in request.headers if pair[0] != _CONVERSATION.encode()]
            request = structs.replace(request, headers=kept)
        if isinstance(body, JsonBody) and body.get("stream") is True:
            # The server closes the connection after each stream without saying so: a next request on it would
            # be lost. With this header both sides know.
            request = structs.replace(request, headers=[*request.headers, (b"connection", b"close")])
        return request

    # --- KV -------------------------------------------------------------------------------------------

    @override
    async def events(self, since: EventPosition | None = None) -> AsyncGenerator[KvEvent, None]:
        await self.require(Capability.KV_EVENTS)
        async with aclosing(self._mirror.follow()) as events:
            async for event in events:
                yield event

    @override
    async def operate(self, verb: KvVerb, target: KvTarget) -> AsyncGenerator[KvProgress, None]:
        verbs = await self._verbs(Capability(verb.value))
        async with aclosing(verbs.operate(verb, target)) as progress:
            async for step in progress:
                yield step

    @override
    async def pin(self, target: KvTarget, ttl_s: float) -> Pinned:
        return (await self._verbs(Capability.PIN)).pin(target, ttl_s)

    @override
    async def unpin(self, pin_id: str) -> bool:
        return (await self._verbs(Capability.PIN)).unpin(pin_id)

    @override
    def findings(self) -> tuple[Finding, ...]:
        session, scheduler, router = self._session, self._scheduler, self._router
        if session is None:
            named = [] if router is None else [self.spec.model] if self.spec.model else list(router.states)
            failures = [Finding(why) for name in named if router and (why := router.failure(name))]
            return (*failures, *self._unsaved())
        facts, seen = session.facts_now, scheduler.contents.findings if scheduler is not None else []
        name = self.spec.model or ""
        flag = router.model(name).flag("--cache-reuse") if router and name in router.states else None
        if flag not in (None, "0") and not facts.cache_reuse:
            seen = [*seen, Finding(FLAG_ALONE)]
        return (*findings_of(facts), *session.findings, *seen)

    def _unsaved(self) -> Iterator[Finding]:
        """Why a router's model loses its KV when it leaves: this is told before the first one does."""
        router, name = self._router, self._control.model
        if router is None or name not in router.states or self._registry is not None:
            return
        directory = router.model(name).flag(_SAVES_TO)
        if directory is None:
            remedy = f"start the router with {_SAVES_TO} DIR, an absolute path, best in memory"
        else:
            remedy = f"set host_cache_dir to the router's {_SAVES_TO}, {directory}, as kvpin sees it"
        yield Finding(
            "nothing is saved: whenever the router ends this model, all its KV is lost", remedy, MOVES
        )

    @override
    async def stats(self) -> dict[str, Any]:
        scheduler = self._scheduler
        if scheduler is None:
            return {} if self._session is None else {"slots": []}
        contents = scheduler.contents
        return {
            "slots": contents.describe(),
            "waiting": scheduler.waiting,
            "violations": contents.table.violations,
            "most_in_flight": contents.table.most_in_flight,
            "counts": asdict(contents.counts),
            "rates": contents.rates.measured,
            "files": self._registry.stats() if self._registry is not None else {},
        }

    @override
    async def aclose(self) -> None:
        """Saves the slots first, so that a restart loses nothing."""
        await self.end_session(farewell=True)
        if self._router is not None:
            await self._router.leave(self.spec.model or "", self.end_session)
        self._lock.free()
        if self._registry is not None:
            self._registry.unsubscribe(self._on_saved)
            if self._told is not None:  # else an adapter with other settings may be using its server
                self._registry.unpin(self.spec.id)
        await super().aclose()

    async def end_session(self, *, farewell: bool) -> None:
        """The process is gone, another kvpin has it, or, with `farewell`, its slots are to be saved first."""
        session, self._session, self.capabilities = self._session, None, None
        self._is_emptied |= session is not None and session.scheduler is None
        try:
            if session is not None:
                await session.end(farewell=farewell)
        finally:
            self._mirror.clear()

    # --- inside ---------------------------------------------------------------------------------------

    @property
    def _scheduler(self) -> SlotScheduler | None:
        return self._session.scheduler if self._session is not None else None

    async def _verbs(self, capability: Capability) -> SlotVerbs:
        await self.require(capability)
        session = self._session
        if session is None or session.verbs is None or capability not in session.capabilities:
            raise self.not_supported(capability)
        return session.verbs

    def _on_saved(self, event: SavedEvent, entry: Saved) -> None:
        """Mirrors a change of the shared registry: this server can restore what another one saved."""
        session = self._session
        if session is None or session.scheduler is None or entry.key != session.facts_now.key:
            return
        if event is SavedEvent.REMOVED:
            self._mirror.drop(entry.name)
            session.scheduler.contents.note_files(session.scheduler.contents.table)
        else:
            self._mirror.put(entry.name, entry.tier, entry.tokens, entry.salt)


def _place(spec: LlamaServerSpec) -> SavedPlace | None:
    """The directories of the server's saved prefixes, and their caps; None if nothing is saved."""
    options = spec.options
    if not options.host_cache_dir:
        return None
    disk = Path(options.disk_cache_dir).expanduser() if options.disk_cache_dir else None
    return SavedPlace(
        host=Path(options.host_cache_dir).expanduser(),
        # Plain numbers: msgspec cannot encode a Size, and the statistics show the caps as JSON.
        host_bytes=int(options.host_cache_bytes or DEFAULT_CACHE_BYTES),
        disk=disk,
        disk_bytes=int(options.disk_cache_bytes or DEFAULT_CACHE_BYTES) if disk else 0,
    )
