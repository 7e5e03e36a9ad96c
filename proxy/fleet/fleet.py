"""The engines as the proxy sees them now, in pools of the same model.

State only: `monitor.py` changes it when engines come and go, `ingest.py` when their caches change, `flow.py`
when requests begin and end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import structlog

from engine_adapter import EngineAdapter, EngineInfo, Role
from engine_adapter.causes import Code
from proxy.core.admission import Needs
from proxy.core.books import EngineBook
from proxy.core.peers.messages import OwnRequests
from proxy.core.retention import PinBook
from proxy.errors import NoEngine, NotFound
from proxy.fleet.engine import TOKENS_PER_BLOCK, Engine, EngineState
from proxy.fleet.managed_engine import ProcessState
from proxy.fleet.pool import Pool
from proxy.settings import LimitSettings

log = structlog.get_logger(__name__)

# Engines with smaller pages than this get a pool of normal blocks: tiny blocks cost too many look-ups.
PAGES_BELOW = 4
# Characters of a client's model name that an error repeats.
MAX_NAME = 200
_ALL_REFUSE = "the engines refuse kvpin: the operator has to act, and `kvpin engines` says how"


async def _nothing_new() -> bool:
    return False


class Fleet:
    """All engines and their pools."""

    def __init__(
        self,
        aliases: Mapping[str, str] | None = None,
        default_model: str | None = None,
        queue: LimitSettings | None = None,
        name: str = "this kvpin",
        secret: bytes = b"",
    ) -> None:
        """`aliases`: further names of models and LoRA adapters. `default_model`: serves all other names.
        `queue`: the bounds of each pool's queue. `secret`: the key of namespace roots."""
        self.name = name  # of this kvpin, for people
        self._secret = secret
        # Tells the secrets of kvpins apart, and nothing else about them.
        self.secret_name = blake2b(secret, digest_size=8, person=b"kvpin group").digest()
        self._queue = queue
        self.aliases = aliases or {}
        self.default_model = default_model
        self.engines: dict[str, Engine] = {}
        self.pools: dict[str, Pool] = {}
        # Tells other kvpins of requests, in pools made from now on; None without other kvpins.
        self.told: OwnRequests | None = None
        self.claims_engines = False  # an engine that only one kvpin may use waits until it is claimed
        self.book = EngineBook()  # what operators have ordered about engines, at any kvpin of the group
        self.pins = PinBook()  # the pins that this kvpin holds
        # Requests that other kvpins answered for this one so far, by the names of these kvpins.
        self.passed_on: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._an_engine_is_ready = asyncio.Event()
        self._has_started = False
        # Asks engines for LoRA adapters that are not known; returns whether it asked any.
        self.look_up: Callable[[], Coroutine[Any, Any, bool]] = _nothing_new

    def add(self, adapter: EngineAdapter) -> Engine:
        """Adds an engine, whose id is free. It joins a pool when it has connected."""
        engine = self.engines[adapter.spec.id] = Engine(adapter, self._wake)
        if self.claims_engines and adapter.one_owner:
            engine.give_to(None)
        return engine

    def is_drained(self, engine: Engine) -> bool:
        """True if an operator has drained the engine."""
        return self.book.is_drained(engine.order)

    def bound_queues(self, queue: LimitSettings) -> None:
        """Other bounds of each pool's queue."""
        self._queue = queue
        for pool in self.pools.values():
            pool.line.bound(queue)

    def has(self, engine: Engine) -> bool:
        """True if an engine was added and not removed. Another one may have its id."""
        return self.engines.get(engine.id) is engine

    def remove(self, engine: Engine) -> None:
        """Removes an engine and all that is known of it, if the fleet has it."""
        if self.has(engine):
            self.leave(engine)
            del self.engines[engine.id]
            self._not_away(engine.id)

    def replace(self, old: Engine, adapter: EngineAdapter) -> Engine:
        """Replaces the engine with the same id. The old engine finishes its requests. Until the new one has
        connected, requests for the model wait."""
        self.leave(old)
        return self.add(adapter)

    def engine(self, engine_id: str) -> Engine:
        """The engine with that id. Raises NotFound."""
        if (engine := self.engines.get(engine_id)) is None:
            known = ", ".join(self.engines) or "none"
            raise NotFound(f"there is no engine {engine_id!r}; known: {known}", param="engine")
        return engine

    def engines_of(self, pool: Pool) -> list[Engine]:
        """The engines of a pool, in the order in which they were named. They may join it in any order."""
        return [engine for engine in self.engines.values() if pool.engines.get(engine.id) is engine]

    def pool_of(self, engine: Engine) -> Pool | None:
        """The pool of an engine; None while it is not connected."""
        for pool in self.pools.values():
            if pool.engines.get(engine.id) is engine:
                return pool
        return None

    def join(self, engine: Engine, info: EngineInfo) -> Pool:
        """The engine has connected: adds it to the pool of its model. Makes the pool if needed."""
        model = engine.adapter.spec.model or info.model
        pool = self.pools.get(model)
        tokens_per_block = min(info.tokens_per_block or TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
        if tokens_per_block < PAGES_BELOW:
            tokens_per_block = TOKENS_PER_BLOCK
        if pool is None or (not pool.engines and pool.tokens_per_block != tokens_per_block):
            pool = self.pools[model] = Pool(model, tokens_per_block, self._queue, self.told, self._secret)
        pool.note_loras(engine.id, info)
        engine.has_connected(info)
        if info.gpu_blocks is not None and info.tokens_per_block is not None:
            engine.learned.capacity = info.gpu_blocks * info.tokens_per_block // pool.tokens_per_block
        size, gpu, host = info.tokens_per_block, info.gpu_blocks, info.host_blocks
        gpu, host = (gpu, host) if size is not None else (None, None)
        pool.placer.add(engine.id, engine.ledger, tokens_per_block=size, gpu_blocks=gpu, host_blocks=host)
        engine.adapter.priced_by(pool.placer.books[engine.id].rates.prefill_s, pool.placer.demand.returns)
        pool.join(engine)
        self._not_away(engine.id)
        self._warn_of_names()
        return pool

    def leave(self, engine: Engine) -> None:
        """The engine is gone: forgets its KV."""
        if (pool := self.pool_of(engine)) is not None:
            pool.wipe(engine)
            pool.placer.books[engine.id].is_lost = True
            pool.placer.remove(engine.id)
            pool.leave(engine)
            if engine.info is not None:
                pool.away[engine.id] = engine.info
                pool.refresh()

    def _not_away(self, engine_id: str) -> None:
        """Forgets a lost engine that came back or was removed. Ends pools without present or lost engines."""
        for pool in list(self.pools.values()):
            if pool.away.pop(engine_id, None) is not None:
                pool.refresh()
            if not pool.engines and not pool.away:
                del self.pools[pool.model]

    def _warn_of_names(self) -> None:
        for alias in sorted((self.aliases.keys() & self.pools.keys()) - self._warned):
            self._warned.add(alias)
            log.warning("an alias is not used: a model has the same name", alias=alias)
        for pool in self.pools.values():
            for name in sorted((pool.loras & self.pools.keys()) - self._warned):
                self._warned.add(name)
                event = "a LoRA adapter is not served: a model has the same name"
                log.warning(event, lora=name, parent=pool.model)

    def is_ready(self) -> bool:
        """True if requests can be taken, here or at another kvpin, and all engines of the start were tried.
        One that joins later is not waited for."""
        states = {engine.state for engine in self.engines.values()}
        self._has_started |= self.serves and EngineState.CONNECTING not in states
        return self.serves and self._has_started

    @property
    def serves(self) -> bool:
        """True if requests for some model can be taken, here or at another kvpin."""
        pools, engines = self.pools.values(), self.engines.values()
        return any(pool.serves for pool in pools) or any(each.is_served_there for each in engines)

    @property
    def all_refuse(self) -> bool:
        """True if every engine can be reached and refuses kvpin, e.g. because it wants a key."""
        engines = self.engines.values()
        return bool(engines) and all(each.refuses and each.state is EngineState.DOWN for each in engines)

    @property
    def stands_by(self) -> bool:
        """True if another kvpin owns all engines."""
        return {engine.state for engine in self.engines.values()} == {EngineState.ELSEWHERE}

    async def until_ready(self) -> None:
        """Waits until an engine becomes ready."""
        await self._an_engine_is_ready.wait()

    def _wake(self) -> None:
        self._an_engine_is_ready.set()
        self._an_engine_is_ready = asyncio.Event()

    def served(self) -> dict[str, str]:
        """Names that clients may send as `model` → the model of the pool. If a model and a LoRA adapter of
        another model have the same name, the model gets it."""
        pools = self.pools.values()
        adapters = {name: pool.model for pool in pools for name in sorted(pool.loras)}
        return {pool.model: pool.model for pool in pools} | {
            name: model for name, model in adapters.items() if name not in self.pools
        }

    def served_aliases(self) -> dict[str, str]:
        """Aliases that clients may send as `model` → the model or LoRA adapter that each stands for."""
        served = self.served()
        return {alias: own for alias, own in self.aliases.items() if own in served and alias not in served}

    def names_of(self, model: str) -> set[str]:
        """The names that clients may send for a model or LoRA adapter: its own, and its aliases."""
        return {model, *(alias for alias, own in self.aliases.items() if own == model)}

    def lost_names(self) -> dict[str, str]:
        """Models that nothing serves, though settings name them → the aliases or settings that do."""
        lost = {own: f"alias {alias!r}" for alias, own in self.aliases.items() if self._named(alias) is None}
        if self.default_model is not None and self._named(self.default_model) is None:
            lost[self.default_model] = "default model"
        return lost

    @property
    def has_choice(self) -> bool:
        """True if the `model` of a request makes a difference to kvpin. If not, it need not be read."""
        if len(self.pools) > 1 or self.aliases or self.default_model is not None:
            return True
        return any(pool.loras for pool in self.pools.values())

    def pool(self, model: str | None) -> Pool:
        """The pool that serves `model`; see `find`."""
        return self.find(model)[0]

    def find(self, model: str | None) -> tuple[Pool, str | None]:
        """The pool that serves a request's `model`, and the engines' name of that model.

        In this order: the model or LoRA adapter of that name; the one that an alias of that name stands for;
        the only pool that takes any name; the default model. A request without a name goes to the only pool,
        with no name, or to the default model.

        Raises:
            NotFound: nothing serves that model.
            NoEngine: no engine has connected yet, or an engine that may serve the model is still connecting.
        """
        if model is not None:
            if model in self.pools:
                return self.pools[model], model
            if (found := self._named(model)) is not None:
                return found
        elif len(self.pools) == 1:
            return next(iter(self.pools.values())), None
        if not self.pools:
            raise NoEngine(self.why_none())
        self._require_all_known(model)
        if model not in self.aliases:
            takers = [pool for pool in self.pools.values() if model is not None and pool.any_model]
            if len(takers) == 1:
                return takers[0], takers[0].model
            if self.default_model is not None and (found := self._named(self.default_model)) is not None:
                return found
        raise self.not_served(model)

    def why_none(self) -> str:
        """The error's text while no engine has connected."""
        processes = [engine.process for engine in self.engines.values()]
        if processes and all(each is not None and each.state is ProcessState.FAILED for each in processes):
            return "no engine runs: kvpin has given up starting them, and `kvpin engines` says why"
        if self.all_refuse:
            return _ALL_REFUSE
        if self.stands_by:
            return "only one kvpin may use the engine, and another one does: `kvpin engines` says which"
        if not self.engines and self.book.removals():
            return "there is no engine: `kvpin engines` lists those that an operator has removed"
        return "no engine is connected yet; try again shortly"

    def has_model(self, name: str) -> bool:
        """True if requests for the model of that name are served."""
        try:
            return bool(self.find(name))
        except (NotFound, NoEngine):
            return False

    def unserved(self, names: Iterable[str] = ()) -> list[str]:
        """Models and LoRA adapters, also of these names, that no engine takes requests for now. None while
        another kvpin uses engines for this one: it knows what they serve."""
        if any(engine.is_served_there for engine in self.engines.values()):
            return []
        served = self.served()
        known = {**dict.fromkeys(names), **served}
        return [name for name, model in known.items() if not self._takes(name, model)]

    def _takes(self, name: str, model: str | None) -> bool:
        """True if an engine takes requests for this name, of this model's pool."""
        needs = Needs(lora=name if name != model else None)
        return model is not None and bool(self.pools[model].engines_for(needs))

    def none_ready(self, pool: Pool | None, lora: str | None) -> NoEngine:
        """The error of a request whose pool has no engine that can take it now; None for an unknown pool."""
        if self.all_refuse:
            return NoEngine(_ALL_REFUSE)
        what = "this model" if lora is None else f"the LoRA adapter {lora!r}"
        if pool is not None and pool.engines and all(map(self.is_drained, pool.engines.values())):
            return NoEngine(
                f"all engines that serve {what} are drained: none takes requests before an operator "
                "undoes it (kvpin engines drain NAME --undo)",
                lasts=True,
            )
        states = {each.state for each in pool.engines.values()} if pool is not None else set()
        if EngineState.REFUSED in states and states <= {EngineState.REFUSED, EngineState.DRAINING}:
            return NoEngine(
                f"the engines that serve {what} are not used: tenants would share their KV. An operator has "
                "to change that; kvpin engines says how",
                lasts=True,
            )
        missing = pool.missing_half(Needs(lora=lora)) if pool is not None else None
        if missing is None:
            return NoEngine(f"no engine is ready for {what}; try again shortly")
        other = Role.DECODE if missing is Role.PREFILL else Role.PREFILL
        return NoEngine(
            f"no engine that does the {missing} half of requests is ready for {what}, and those for the "
            f"{other} half cannot answer alone; try again shortly"
        )

    def not_served(self, model: str | None) -> NotFound:
        """The error of a request for a model that nothing serves."""
        if model is None:
            reason = "model must be named, in the body or as ?model=NAME"
        elif model in self.aliases:
            reason = f"the model {model!r} is an alias of {self.aliases[model]!r}, which is not served"
        else:
            reason = f"the model {model[:MAX_NAME]!r} does not exist"
        if self.default_model is not None and self._named(self.default_model) is None:
            reason += f", and the default model {self.default_model!r} is not served"
        known = ", ".join(sorted({*self.served(), *self.served_aliases()}))
        return NotFound(f"{reason}; served: {known}", param="model", code=Code.MODEL_NOT_FOUND)

    def _named(self, model: str) -> tuple[Pool, str] | None:
        """The pool that serves the model, LoRA adapter or alias of that name, and the name behind the alias.

        None if there is none.
        """
        for own in (model, self.aliases.get(model)):
            if own is None:
                continue
            if own in self.pools:
                return self.pools[own], own
            for pool in self.pools.values():
                if pool.lora_of(own) is not None:
                    return pool, own
        return None

    def _require_all_known(self, model: str | None) -> None:
        """Raises NoEngine while an engine starts for the first time: it may serve the model."""
        what = "no model is named" if model is None else f"the model {model[:MAX_NAME]!r} is not served yet"
        for engine in self.engines.values():
            if engine.state is EngineState.CONNECTING:
                raise NoEngine(f"{what}, and engine {engine.id!r} is still connecting; try again shortly")
