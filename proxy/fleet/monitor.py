"""Runs the life of each engine: connect, join a pool, follow events, check health, leave, start again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from time import monotonic
from zlib import crc32

import structlog

from engine_adapter import (
    Capability,
    EngineError,
    EngineInfo,
    EngineRejected,
    EngineSpecError,
    EngineTaken,
    EngineUnavailable,
    EngineUnhealthy,
    Finding,
    Role,
)
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.pool import Pool
from proxy.fleet.tokenisation import Renderings
from proxy.prompt import RegisteredTables
from proxy.runtime import Supervisor, within

log = structlog.get_logger(__name__)

# Between attempts to connect. Short at first: a restarted engine answers at once.
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
# An engine is lost when that many health checks in a row have failed. One is enough where it shows that the
# process is gone: a connection that is refused or breaks, or another process.
FAILURES = 3
_FAILED = (EngineUnhealthy, EngineRejected, TimeoutError)
# Between looks at an engine that another kvpin uses.
TAKEN_S = 1.0
# Between looks for LoRA adapters that are asked for and not known.
LOOK_UP_S = 1.0
# If a check's time limit strikes this late, kvpin was held up: paused, or without a CPU.
HELD_UP_S = 0.5

Split = Callable[[Engine, EngineInfo], bool]


@dataclass(eq=False, repr=False)
class Monitor:
    """Watches the engines of a fleet."""

    _fleet: Fleet
    _tasks: Supervisor  # runs one watch per engine
    _ingest: Ingest | None  # follows the events of engines that are ready; None without reuse
    _tables: RegisteredTables  # p-tuning tables every engine must know before it gets requests
    _: KW_ONLY
    interval_s: float  # time between health checks of a ready engine
    timeout_s: float  # how long one check may take
    # There are several tenants: an engine that cannot keep their KV apart is refused, unless its `share_kv`
    # allows it.
    isolated: bool = False
    # Called with each engine that connects, and what it declares: the data-parallel ranks or the models of
    # its server. True if these replace the engine.
    split: Split = field(default_factory=lambda: lambda _engine, _info: False, init=False)
    _findings: dict[str, tuple[Finding, ...]] = field(default_factory=dict, init=False)  # logged, by engine

    def __post_init__(self) -> None:
        self._renderings = Renderings(self._tasks, self._tables)
        self._looked_up, self._looks_up = -inf, asyncio.Lock()
        self._fleet.look_up = self.look_up

    def isolate(self, *, isolated: bool) -> None:
        """Sets whether there are several tenants. This changes which engines may be used."""
        self.isolated = isolated
        for engine in self._fleet.engines.values():
            if engine.state in (EngineState.READY, EngineState.SUSPECT) and not self.allows(engine):
                self._refuse(engine)
            elif engine.state is EngineState.REFUSED and self.allows(engine):
                engine.state = EngineState.SUSPECT
                engine.check_now.set()

    async def look_up(self) -> bool:
        """A model is asked for that nobody serves: asks the engines that load LoRA adapters while they run
        which they have now, at most once a second: requests that come meanwhile wait for the next answer.
        Returns whether there are such engines."""
        ready = [each for each in self._fleet.engines.values() if each.state is EngineState.READY]
        able = [each for each in ready if each.info is not None and each.info.loads_loras]
        asked = monotonic()
        async with self._looks_up:
            if able and self._looked_up < asked:
                await asyncio.sleep(self._looked_up + LOOK_UP_S - monotonic())
                began = monotonic()
                await asyncio.gather(*map(self._look_up_at, able))
                self._looked_up = began
        return bool(able)

    async def _look_up_at(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._recheck(engine)
        except (EngineError, TimeoutError) as error:
            # The check compares it with what was known before. Its adapter may have taken a new process for
            # granted, so the load alone does not show that.
            is_other = isinstance(error, EngineUnavailable) and not isinstance(error, EngineUnhealthy)
            if self._fleet.pool_of(engine) is not None:  # else nobody checks it any more
                engine.doubt(was_asked=is_other)

    def watch(self, engine: Engine) -> None:
        """Starts watching an engine of the fleet."""
        self._tasks.keep(f"watch {engine.id}", lambda: self._watch(engine))

    def forget(self, engine: Engine) -> None:
        """Stops watching an engine, and forgets what was logged of it."""
        self._tasks.cancel(f"watch {engine.id}")
        self._findings.pop(engine.id, None)
        self._renderings.leave(engine)
        engine.adapter.on_closed(lambda: None)
        engine.sure.set()  # nobody checks it any more
        if self._ingest is not None:
            self._ingest.leave(engine)

    async def _watch(self, engine: Engine) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            await engine.mine.wait()
            try:
                await self._connect(engine)
                backoff_s = FIRST_BACKOFF_S
                await self._until_lost(engine)
            except EngineTaken as error:
                self._lose(engine, error)
                await engine.adapter.leave()
                await asyncio.sleep(TAKEN_S)
            except (EngineError, TimeoutError) as error:
                self._lose(engine, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect(self, engine: Engine) -> None:
        async with asyncio.timeout(self.timeout_s):
            info = await engine.adapter.connect()
        _require_mine(engine)
        if self.split(engine, info):
            await asyncio.Event().wait()  # until it has left
        if not info.model:
            raise EngineSpecError(f"its server has several models: name one of {', '.join(info.models)}")
        engine.owner = self._fleet.name if engine.adapter.one_owner else None
        before = engine.info
        pool = await self._join(engine, info)
        engine.adapter.on_closed(engine.doubt)
        _log_changes(engine, before, info)
        engine.last_error = None
        self._findings.pop(engine.id, None)
        self._log_findings(engine)
        self._admit(engine)
        if engine.state is EngineState.READY:
            part = {} if engine.role is Role.BOTH else {"role": engine.role.value}
            log.info("engine is ready", engine=engine.id, model=pool.model, version=info.version, **part)

    async def _join(self, engine: Engine, info: EngineInfo) -> Pool:
        pool = self._fleet.join(engine, info)
        for table in self._tables.list() if engine.can(Capability.PROMPT_TABLES) else ():
            await engine.adapter.put_prompt_table(table)
        self._renderings.join(engine, info, pool)
        if self._ingest is not None:
            self._ingest.follow(engine, pool)
        else:
            engine.audit.lost("reuse is off")
        return pool

    async def _until_lost(self, engine: Engine) -> None:
        """Checks a connected engine until it is gone, or `FAILURES` checks in a row have failed."""
        # Engines that connected together get another place in the interval each.
        pause_s, failures = self.interval_s * crc32(engine.id.encode()) / 2**32, 0
        while True:
            if failures:
                await asyncio.sleep(self.interval_s)  # failed requests do not shorten this wait
            else:
                await within(pause_s, engine.check_now.wait())
                pause_s = self.interval_s
            # Cleared before the check: a request that fails during the check asks for another one.
            engine.check_now.clear()
            _require_mine(engine)
            try:
                await self._check_in_time(engine)
            except _FAILED as error:
                computes = engine.process is not None and engine.process.computing
                if computes and isinstance(error, TimeoutError):
                    continue  # its process is watched: it ends if it is stuck
                failures += 1
                if failures == FAILURES:
                    raise
                self._doubt(engine, error)
            else:
                failures = 0
            _require_mine(engine)

    async def _check_in_time(self, engine: Engine) -> None:
        """Checks the engine's health. Repeats a late check if kvpin itself was held up. Raises EngineError or
        TimeoutError if it failed."""
        while True:
            began = monotonic()
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await self._check(engine)
            except TimeoutError:
                if monotonic() - began < self.timeout_s + HELD_UP_S:
                    raise

    async def _check(self, engine: Engine) -> None:
        """One health check; a suspect engine, one that changed, or one whose process may be another one, is
        also asked what it is and can do."""
        load = await engine.adapter.load()
        if load.counted:
            engine.ledger.reported(monotonic(), load.running + load.waiting)
            engine.ledger.backlog.reported(load.waiting)
        if load.emptied and (pool := self._fleet.pool_of(engine)) is not None:
            pool.wipe(engine)
        is_sure, doubts = engine.sure.is_set(), engine.doubts
        may_differ = load.outdated or engine.was_cut_short or engine.model_failed or not is_sure
        if may_differ or engine.state is EngineState.SUSPECT:
            await self._recheck(engine)
            if not is_sure:
                engine.is_same(doubts)
        if engine.heals_at is not None and monotonic() >= engine.heals_at:
            engine.heals_at = None
            engine.audits.healed += 1
            if (pool := self._fleet.pool_of(engine)) is not None:
                self._renderings.prove_again(engine, pool)

    async def _recheck(self, engine: Engine) -> None:
        """Asks the engine again what it is and can do. Raises EngineUnavailable if it is another process, or
        serves another model."""
        engine.was_cut_short = False
        try:
            info = await engine.adapter.connect()
        except BaseException:
            engine.was_cut_short = True
            raise
        before = engine.info
        if before is None or info.instance != before.instance:
            raise EngineUnavailable("the engine was restarted")
        if before.is_another(info):
            raise EngineUnavailable(f"the engine has changed: {', '.join(changes_of(before, info))}")
        self.split(engine, info)
        if (pool := self._fleet.pool_of(engine)) is None:
            return  # it was lost or removed meanwhile
        _log_changes(engine, before, info)
        size, size_before = info.tokens_per_block, before.tokens_per_block
        if size and size_before and size != size_before:  # its events show it
            pool.placer.resize(engine.id, size_before, size)
            if info.gpu_blocks is not None:
                engine.learned.capacity = info.gpu_blocks * size // pool.tokens_per_block
        tells = Capability.KV_EVENTS in info.capabilities - before.capabilities
        if tells or info.gpu_blocks != before.gpu_blocks or info.tokenizer != before.tokenizer:
            pool = await self._join(engine, info)  # its model was loaded for the first time, or tried out
        elif not (info.names_process or engine.sure.is_set()):
            engine.connections += 1  # what was prepared for it may be another process's
            self._renderings.prove_again(engine, pool)
        engine.info = info
        pool.note_loras(engine.id, info)
        pool.refresh()
        self._log_findings(engine)
        self._admit(engine)

    def allows(self, engine: Engine) -> bool:
        """True if a connected engine may be used: it keeps tenants' KV apart where there are several."""
        can_isolate = engine.can(Capability.CACHE_SALT) or engine.adapter.spec.share_kv
        return can_isolate or not self.isolated

    def _admit(self, engine: Engine) -> None:
        """Lets a connected engine take requests, unless it is draining or tenants would share its KV."""
        if engine.state is EngineState.DRAINING or not engine.mine.is_set():
            return
        if self.allows(engine):
            engine.state = EngineState.SUSPECT if engine.model_failed else EngineState.READY
            engine.last_error = "its model failed to load" if engine.model_failed else engine.last_error
        elif engine.state is not EngineState.REFUSED:
            self._refuse(engine)

    def _refuse(self, engine: Engine) -> None:
        engine.state = EngineState.REFUSED
        engine.last_error = (
            f"tenants would share its KV: {engine.adapter.not_supported(Capability.CACHE_SALT)}; "
            "or let them: share_kv=true on this engine"
        )
        log.warning("engine is not used", engine=engine.id, reason=engine.last_error)
        if all(each.state is EngineState.REFUSED for each in self._fleet.engines.values()):
            log.error(
                "no engine is used: there are several tenants, and no engine keeps their KV apart",
                remedy="set share_kv=true on each engine whose KV tenants may share",
            )

    def _log_findings(self, engine: Engine) -> None:
        before, now = self._findings.get(engine.id, ()), engine.adapter.findings()
        self._findings[engine.id] = now
        for finding in now:
            if finding not in before:
                log.warning("engine is not used fully", engine=engine.id, finding=str(finding))
        for finding in before:
            if finding not in now:
                log.info("finding is gone", engine=engine.id, finding=finding.problem)

    def _lose(self, engine: Engine, error: Exception) -> None:
        owner = error.holder if isinstance(error, EngineTaken) else None
        reason, away = self._reason(error), [EngineState.DOWN, EngineState.CONNECTING]
        engine.refuses = isinstance(error, EngineRejected)
        if self._fleet.pool_of(engine) is None:
            away.append(EngineState.DRAINING)
        if owner is not None:
            if engine.mine.is_set() and engine.last_error != str(error):
                log.warning("engine is not used", engine=engine.id, reason=str(error))
        elif engine.state not in away:
            log.warning("engine is lost", engine=engine.id, error=reason)
        elif engine.last_error != reason and not engine.is_own:
            log.warning(
                "engine refuses kvpin; kvpin keeps trying"
                if engine.refuses
                else "engine is not reachable; kvpin keeps trying",
                engine=engine.id,
                url=engine.adapter.spec.url,
                error=reason,
            )
        if engine.mine.is_set():  # otherwise its owner is known
            if engine.state is not EngineState.DRAINING and not engine.is_starting:
                engine.state = EngineState.DOWN if owner is None else EngineState.ELSEWHERE
            engine.owner = owner
            engine.last_error = reason
        engine.has_gone()
        self._renderings.leave(engine)
        engine.audit.lost("the engine is down")
        engine.ledger.backlog.reported(0)
        if self._ingest is not None:
            self._ingest.leave(engine)
        self._fleet.leave(engine)
        engine.abandon()

    def _doubt(self, engine: Engine, error: Exception) -> None:
        """A health check of an engine failed. Until one succeeds, other engines are preferred."""
        engine.last_error = self._reason(error)
        if engine.state is EngineState.READY:
            engine.state = EngineState.SUSPECT
            log.warning("a health check failed: checking again", engine=engine.id, error=engine.last_error)

    def _reason(self, error: Exception) -> str:
        """Why a check or a connection failed. One that takes too long has no words of its own."""
        return str(error) or f"no answer within {self.timeout_s:g} s (health.timeout_s)"


# What the lines of `EngineInfo.rendering` tell.
_OF_RENDERINGS = {"model": "its model's files", "template": "its chat template"}


def _log_changes(engine: Engine, before: EngineInfo | None, now: EngineInfo) -> None:
    if before is not None and (changed := changes_of(before, now)):
        log.warning("engine has changed", engine=engine.id, changed=changed)


def changes_of(before: EngineInfo, now: EngineInfo) -> list[str]:
    """What an engine tells of itself otherwise than before, for people. Where it was unknown, nothing has
    changed."""
    pairs = {
        "model": (before.model, now.model),
        "version": (before.version, now.version),
        "tokenizer": (before.tokenizer, now.tokenizer),
        "context": (before.max_model_len, now.max_model_len),
        "block size": (before.tokens_per_block, now.tokens_per_block),
        "vocabulary": (before.vocab_size, now.vocab_size),
    }
    found = [f"{name} {old} → {new}" for name, (old, new) in pairs.items() if old and new and old != new]
    if before.rendering and now.rendering:
        lines = set(before.rendering.splitlines()) ^ set(now.rendering.splitlines())
        names = {line.partition(" ")[0] for line in lines}
        found += [word for name, word in _OF_RENDERINGS.items() if name in names and not found]
    found += [f"LoRA adapter {name} loaded" for name in sorted(now.loras - before.loras)]
    found += [f"LoRA adapter {name} unloaded" for name in sorted(before.loras - now.loras)]
    moved = [name for name, path in now.lora_paths.items() if before.lora_paths.get(name, path) != path]
    return [*found, *(f"LoRA adapter {name} loaded from another path" for name in sorted(moved))]


def _require_mine(engine: Engine) -> None:
    """Raises EngineTaken if another kvpin uses the engine by now."""
    if not engine.mine.is_set():
        raise EngineTaken(engine.last_error or "another kvpin uses it", holder=engine.owner or "")
