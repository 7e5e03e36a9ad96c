"""A llama-server in router mode: one address, many models, of which it runs a few at a time.

The router tells the state of each model at `/models`, and at `/models/sse` that one has changed. Left to
itself, it unloads the model that was used least recently, and the KV of its slots is lost. Here kvpin changes
models itself before it sends a request to one that is not loaded:

    requests of the model that leaves end → its slots are saved → it is unloaded → the other one is loaded

A load that fails is remembered for a while: the next request for that model puts no other model out. A load
that tells nothing for `load_s` seconds has failed, too: a preset without a model loads for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, ClassVar
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec
from typing_extensions import override

from engine_adapter.errors import (
    EngineError,
    EngineRejected,
    EngineSpecError,
    EngineUnavailable,
    ModelFailed,
    ModelNotLoaded,
)
from engine_adapter.http.adapter import read_models
from engine_adapter.http.control import ControlClient
from engine_adapter.llama_server.options import LlamaServerSpec
from engine_adapter.llama_server.slot_io import Pulse
from engine_adapter.types import EngineSpec, ModelState

# Between attempts to follow the router's events, and between looks at its models where these do not come.
_LOOK_S = 1.0
# Between attempts to load a model while the router has no room for it, at first and at the most; and how long
# it is tried.
_RETRY_S, _MAX_RETRY_S, _ROOM_S = 0.2, 5.0, 60.0
# What the router says when it has none. Any other error of a load is the model's.
_NO_ROOM = "limit reached"
# A model that failed to load is not tried again before: at first, and at the most. It doubles in between.
_PAUSE_S, _MAX_PAUSE_S = 10.0, 600.0
# How long a model that is to leave takes no further request, at first and at the most. If its requests take
# longer, it serves others again for as long, and the next wait is twice as long.
_DRAIN_S, _MAX_DRAIN_S = 5.0, 60.0
# The longest that a model which leaves waits for kvpin's own questions to it.
_QUESTIONS_S = 5.0
# What a model's card does not show: how the router starts it.
_PRIVATE = frozenset({"args", "preset"})
_IN_MEMORY = (ModelState.LOADED, ModelState.SLEEPING)


class _Status(msgspec.Struct, frozen=True):
    """The status of a model; `args` is the command line of its process."""

    value: str
    args: list[str] = []
    failed: bool = False
    exit_code: int = 0


class RouterModel(msgspec.Struct, frozen=True):
    """One of the models, as the router tells it."""

    id: str
    status: _Status

    @property
    def state(self) -> ModelState:
        """Its state."""
        return ModelState.FAILED if self.status.failed else ModelState.of(self.status.value)

    @property
    def process(self) -> str | None:
        """The address of its process; None if there is none."""
        return self.flag("--port") if self.state in (*_IN_MEMORY, ModelState.LOADING) else None

    def flag(self, name: str) -> str | None:
        """The value of a flag of its process; None without it."""
        args = self.status.args
        return args[args.index(name) + 1] if name in args[:-1] else None

    @property
    def flags(self) -> tuple[str, ...]:
        """The command line of each of its processes, without the port."""
        args = self.status.args
        at = args.index("--port") if "--port" in args else len(args)
        return (*args[:at], *args[at + 2 :])


class _Models(msgspec.Struct, frozen=True):
    data: list[RouterModel]


# Prompts that the server renders and tokenises at once. Its HTTP server has four threads more than slots at
# first, and a connection that comes beyond them may wait until another one has been idle for 5 s.
MAX_TOKENISING = 4
_TOKENISING = ("/tokenize", "/apply-template")


class ServerClient(ControlClient):
    """Calls a llama-server's own routes."""

    model: str | None = None  # of a router: the one that each call is about; no call loads it

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineSpecError as ControlClient does."""
        super().__init__(spec)
        self._tokenising = asyncio.Semaphore(MAX_TOKENISING)

    @override
    async def fetch(
        self, method: str, path: str, content: bytes | None = None, *rest: Any, **more: Any
    ) -> bytes:
        if self.model is not None:
            name = quote(self.model, safe="")
            path = f"{path}{'&' if '?' in path else '?'}autoload=false&model={name}"
            if content is not None:
                fields = content.lstrip()[1:].lstrip()
                comma = b"" if fields.startswith(b"}") else b","
                content = b'{"model":' + msgspec.json.encode(self.model) + comma + fields
        async with self._tokenising if path.startswith(_TOKENISING) else nullcontext():
            return await super().fetch(method, path, content, *rest, **more)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a model failed to load, `times` times in a row. It is not tried again before `until`."""

    why: str
    times: int
    until: float


EndSession = Callable[..., Awaitable[None]]
"""Told that a model's process has ended; with `farewell`, that it is about to: its slots are saved first."""


class Router:
    """The models of one router, for all their adapters in this process."""

    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], Router]] = WeakValueDictionary()

    def __init__(self, spec: LlamaServerSpec) -> None:
        self.loads = True  # when a request names a model
        self.load_limit_s = spec.options.load_s  # a load that tells nothing for so long has failed
        self._most = 0
        self.control = ControlClient(spec)  # asks the router itself, not one of its models
        self._models: dict[str, RouterModel] = {}
        self._cards: dict[str, dict[str, Any]] = {}
        self._residents: dict[str, EndSession] = {}  # who uses a model
        self._requests = Counter[str]()
        self._questions = Counter[str]()  # kvpin's own
        self._used_at: dict[str, float] = {}
        self._load_s: dict[str, float] = {}
        self._failures: dict[str, _Failure] = {}  # until it is loaded
        self._began: dict[str, float] = {}  # loads that kvpin asked for
        self._heard: dict[str, float] = {}  # the last news of models that are loading
        self._leaving: str | None = None  # takes no further request
        self._drains: dict[str, tuple[float, float]] = {}  # serves until then, and how long the next wait is
        self._ending: str | None = None  # its slots are saved
        self._swap = asyncio.Lock()
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None

    @classmethod
    def at(cls, spec: LlamaServerSpec, pulse: Pulse) -> Router | None:
        """The router that answered so; None if a server with one model did."""
        if pulse.role != "router":
            return None
        key = (spec.server, spec.api_key or "", repr(sorted(spec.headers.items())))
        if (router := cls._shared.get(key)) is None:
            router = cls._shared[key] = cls(spec)
        router.loads, router._most = pulse.models_autoload, pulse.max_instances
        return router

    # --- what there is --------------------------------------------------------------------------------

    @property
    def states(self) -> dict[str, ModelState]:
        """The state of each model, by name."""
        return {name: model.state for name, model in self._models.items()}

    def model(self, name: str) -> RouterModel:
        """One of the models. Raises EngineSpecError if there is none of that name."""
        if name not in self._models:
            known = ", ".join(self._models) or "none"
            raise EngineSpecError(f"the router has no model {name!r}; it has {known}")
        return self._models[name]

    def flags(self, name: str) -> tuple[str, ...] | None:
        """The command line of each process of a model, without its port; None if there is no such model."""
        return self._models[name].flags if name in self._models else None

    def state(self, name: str) -> ModelState:
        """The state of a model. One that the router no longer has is unloaded, and one that it is ending. One
        that is not to be tried again yet has failed, whatever the router calls it."""
        model = self._models.get(name)
        if model is None or name == self._ending:
            return ModelState.UNLOADED
        return ModelState.FAILED if self._is_remembered(name) else model.state

    def _is_remembered(self, name: str) -> bool:
        return name in self._failures and monotonic() < self._failures[name].until

    def failure(self, name: str) -> str | None:
        """Why a model failed to load; None if it did not."""
        if self._is_remembered(name):
            return self._failures[name].why
        if self.state(name) is not ModelState.FAILED:
            return None
        ended = f"its llama-server ended with status {self.model(name).status.exit_code}"
        return f"the model {name!r} failed to load: {ended}, and the router's log says why"

    def card(self, name: str) -> Mapping[str, Any]:
        """The router's own fields of a model, without the command line of its process. They stay current."""
        return self._cards.setdefault(name, {})

    def load_s(self, name: str) -> float:
        """Seconds until a request to the model can begin: 0 if it is loaded. A model that was never loaded
        takes as long as the slowest other."""
        if self.state(name) in _IN_MEMORY:
            return 0.0
        return self._load_s.get(name, max(self._load_s.values(), default=0.0))

    async def refresh(self) -> None:
        """Asks the router for the states. Tells the adapters of models whose process has ended."""
        answer = await self.control.get("/models")
        before = self._models
        try:
            self._models = {model.id: model for model in msgspec.convert(answer, _Models).data}
        except msgspec.ValidationError as error:
            raise EngineUnavailable(f"GET /models: the answer is not as expected: {error}") from error
        for name, card in self._cards.items():
            fresh = {**read_models(answer, name).card} if name in self._models else {}
            if isinstance(status := fresh.get("status"), dict):
                fresh["status"] = {key: value for key, value in status.items() if key not in _PRIVATE}
            card.clear()
            card.update(fresh)
        self._note_loads(before)
        self._wake()
        for name, model in before.items():
            now, resident = self._models.get(name), self._residents.get(name)
            has_ended = model.process is not None and (now is None or now.process != model.process)
            if has_ended and resident is not None:
                await resident(farewell=False)

    async def has(self, name: str) -> bool:
        """Asks whether a model is in memory now."""
        await self.refresh()
        return self.is_open(name)

    # --- who uses it ----------------------------------------------------------------------------------

    def join(self, name: str, resident: EndSession) -> None:
        """An adapter uses a model from now on; "" is the router itself."""
        self._residents[name] = resident
        self._cards.setdefault(name, {})
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def leave(self, name: str, resident: EndSession) -> None:
        """An adapter no longer uses a model. The last one ends the connection to the router."""
        if self._residents.get(name) == resident:
            del self._residents[name]
        if not self._residents and self._follower is not None:
            follower, self._follower = self._follower, None
            for key in [key for key, router in self._shared.items() if router is self]:
                del self._shared[key]
            follower.cancel()
            await asyncio.wait([follower])
            await self.control.aclose()

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Loads a model, and keeps it loaded until the block ends. A request for a model that is to leave
        waits until the other one was served, so that no model waits for ever. Raises ModelFailed for a model
        that fails to load, or has failed lately."""
        with ExitStack() as use:
            while self.loads and not self.is_open(name):
                if self.state(name) is not ModelState.LOADING:
                    await self._begin(name)
                    continue
                # It does not leave before it has served this one.
                use.enter_context(self._counted(self._requests, name))
                await self._until_loaded(name)
                if self.state(name) in _IN_MEMORY:
                    break
                use.close()
            else:
                use.enter_context(self._counted(self._requests, name))
            self._used_at[name] = monotonic()
            yield

    @contextmanager
    def _counted(self, uses: Counter[str], name: str) -> Iterator[None]:
        uses[name] += 1
        try:
            yield
        finally:
            uses[name] -= 1
            self._wake()

    @asynccontextmanager
    async def room_for(self, name: str) -> AsyncIterator[None]:
        """Makes room for a model, which the caller has the router load before the block ends. Raises
        ModelFailed for a model that has failed lately, and EngineRejected for one that is gone, or if the
        other models load or serve for longer than `load_limit_s`."""
        since = monotonic()
        while True:
            async with self._swap:
                self._refuse(name)
                if await self._make_room(name):
                    self._used_at[name] = monotonic()
                    yield
                    return
            self._check_wait(name, since, self.load_limit_s)
            await self._change()

    def _check_wait(self, name: str, since: float, limit_s: float) -> None:
        """Raises EngineRejected if there has been no room for a model for `limit_s` seconds."""
        if monotonic() - since > limit_s:
            raise _unavailable(f"the router has had no room for the model {name!r} for {limit_s:g} s")

    def try_again(self, name: str) -> None:
        """An operator wants a model loaded that may have failed lately."""
        self._failures.pop(name, None)

    def keeping(self, name: str) -> AbstractContextManager[None]:
        """Keeps kvpin from unloading a model until the block ends. A swap waits for that only briefly."""
        return self._counted(self._questions, name)

    @asynccontextmanager
    async def visiting(self, name: str, within_s: float) -> AsyncIterator[None]:
        """Keeps a model that somebody else has loaded until the block ends, but others wait for that only
        briefly. Raises ModelNotLoaded if nobody loads it within `within_s` seconds."""
        try:
            async with asyncio.timeout(within_s):
                while not (self.is_open(name) and self.state(name) is ModelState.LOADED):
                    await self._changed.wait()
        except TimeoutError:
            raise ModelNotLoaded(f"the model {name!r} is not loaded") from None
        with self.keeping(name):
            yield

    def is_open(self, name: str) -> bool:
        """True if requests to a model need not wait: it is in memory, and is not to leave."""
        return self.state(name) in _IN_MEMORY and name != self._leaving

    # --- a swap ---------------------------------------------------------------------------------------

    def _refuse(self, name: str) -> None:
        if name not in self._models:
            raise _unavailable(f"the router no longer has the model {name!r}")
        if self._is_remembered(name):
            raise ModelFailed(self._failures[name].why)

    async def _begin(self, name: str) -> None:
        """Has the router begin to load a model, for which another one may have to leave."""
        pause_s, came, refused = _RETRY_S, monotonic(), 0.0
        while True:
            async with self.room_for(name):
                if self.state(name) in (*_IN_MEMORY, ModelState.LOADING) or await self._load(name, came):
                    return
            refused = refused or monotonic()
            self._check_wait(name, refused, _ROOM_S)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _load(self, name: str, came: float) -> bool:
        """Asks the router to load a model; False if it has no room yet. Raises ModelFailed."""
        try:
            await self.control.call("POST", "/models/load", json={"model": name})
        except EngineRejected as error:
            await self.refresh()
            if self.state(name) in (*_IN_MEMORY, ModelState.LOADING):
                return True  # another client was faster
            if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and _NO_ROOM in str(error):
                return False
            self._remember(name, f"the model {name!r} cannot be loaded: {error}")
            self._refuse(name)
        self._began[name] = came
        await self.refresh()
        return True

    async def _until_loaded(self, name: str) -> None:
        """Waits until a load has ended, well or not. Ends one that tells nothing for too long."""
        while self.state(name) is ModelState.LOADING:
            silent_s = monotonic() - self._heard[name]
            if silent_s < self.load_limit_s:
                await self._change(min(self.load_limit_s - silent_s, _LOOK_S))
                continue
            self._remember(
                name,
                f"the model {name!r} failed to load: its llama-server has told no progress for "
                f"{self.load_limit_s:g} s; look for it in the router's presets, or raise load_s",
            )
            with suppress(EngineRejected):  # it has ended by itself
                await self.control.call("POST", "/models/unload", json={"model": name})

    def _remember(self, name: str, why: str) -> None:
        """A model failed to load: it is not tried again before some time has passed."""
        times = self._failures[name].times + 1 if name in self._failures else 1
        pause_s = min(_PAUSE_S * 2 ** min(times - 1, 10), _MAX_PAUSE_S)
        self._failures[name] = _Failure(why, times, monotonic() + pause_s)

    def _note_loads(self, before: Mapping[str, RouterModel]) -> None:
        """Notes which loads have begun and ended since the router told `before`."""
        now = monotonic()
        for name, model in self._models.items():
            if name not in before or before[name].flags != model.flags:
                self._failures.pop(name, None)  # its operator may have mended it
            if model.state is ModelState.LOADING:
                if name not in before or before[name].process != model.process:
                    self._heard[name] = now
                continue
            if model.state in _IN_MEMORY:
                self._failures.pop(name, None)
            came = self._began.pop(name, None)
            if came is not None and model.state in _IN_MEMORY:
                self._load_s[name] = now - came
            elif came is not None and (why := self.failure(name)) and not self._is_remembered(name):
                self._remember(name, why)

    async def _make_room(self, name: str) -> bool:
        """Puts out another model if there is no room. False if none can leave yet: they load, or serve."""
        others = [other for other in self._models.values() if other.process is not None and other.id != name]
        if self._models[name].process is not None or not self._most or len(others) < self._most:
            return True
        free = [o.id for o in others if o.state is not ModelState.LOADING or not self._requests[o.id]]
        # Of those that serve nothing, the one that was used least recently.
        least = min(
            free, key=lambda id_: (self._requests[id_] > 0, self._used_at.get(id_, 0.0)), default=None
        )
        return least is not None and await self._put_out(least)

    async def _put_out(self, name: str) -> bool:
        """Unloads a model once its requests have ended and its slots are saved. False if they take long: one
        slow stream must not stop all others."""
        serves_until, wait_s = self._drains.get(name, (0.0, _DRAIN_S))
        if self._requests[name] and monotonic() < serves_until:
            return False
        self._leaving = name
        try:
            end = monotonic() + wait_s
            while self._requests[name] and (left_s := end - monotonic()) > 0:
                await self._change(min(left_s, _LOOK_S))
            if self._requests[name]:
                self._drains[name] = monotonic() + wait_s, min(2 * wait_s, _MAX_DRAIN_S)
                return False
            self._drains.pop(name, None)
            with suppress(TimeoutError):
                async with asyncio.timeout(_QUESTIONS_S):
                    while self._questions[name]:
                        await self._change()
            if name in self._residents:
                await self._residents[name](farewell=True)
            self._ending = name
            with suppress(EngineRejected):  # it has ended by itself
                await self.control.call("POST", "/models/unload", json={"model": name})
            await self.refresh()
            while name in self._models and self._models[name].process is not None:
                await self._change()
        finally:
            self._leaving = self._ending = None
            self._wake()
        return True

    async def _change(self, within_s: float | None = None) -> None:
        """Waits until something has changed, and looks again where nothing tells that."""
        try:
            async with asyncio.timeout(_LOOK_S if within_s is None else within_s):
                await self._changed.wait()
        except TimeoutError:
            await self.refresh()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _follow(self) -> None:
        """Looks at the models whenever the router says that one has changed."""
        while True:
            with suppress(EngineError, TimeoutError):
                async with self.control.stream("/models/sse") as events:
                    await self.refresh()
                    while news := await events.receive():
                        # A chunk of events names the loading models that told of their progress.
                        named = [name for name in self._heard if msgspec.json.encode(name) in news]
                        self._heard |= dict.fromkeys(named, monotonic())
                        await self.refresh()
            await asyncio.sleep(_LOOK_S)


def _unavailable(message: str) -> EngineRejected:
    return EngineRejected(message, status=HTTPStatus.SERVICE_UNAVAILABLE, type="unavailable_error")
