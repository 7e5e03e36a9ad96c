"""The life of one engine: connect, join its pool, follow its events, check its health, leave, begin again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

import structlog

from engine_adapter import Capability, EngineError, EngineInfo, EngineUnavailable, Finding
from proxy.fleet.engine import Engine, EngineState
from proxy.fleet.fleet import Fleet
from proxy.fleet.ingest import Ingest
from proxy.fleet.pool import Pool
from proxy.prompt import PromptBuilder, PromptTables, verify_exactness
from proxy.tasks import Supervisor

log = structlog.get_logger(__name__)

# Between attempts to connect: short at first, as a restarted engine is there already.
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class Monitor:
    """Watches the engines of a fleet.

    Args:
        fleet: the engines.
        tasks: runs one watch per engine.
        ingest: follows the events of engines that are ready; None without reuse.
        tables: p-tuning tables every engine must know before it gets requests.
        interval_s: time between health checks of a ready engine.
        timeout_s: how long one check may take.
        isolated: tenants' KV is to be kept apart; engines that cannot are told of.
    """

    def __init__(
        self,
        fleet: Fleet,
        tasks: Supervisor,
        ingest: Ingest | None,
        tables: PromptTables,
        *,
        interval_s: float,
        timeout_s: float,
        isolated: bool = False,
    ) -> None:
        self._fleet = fleet
        self._tasks = tasks
        self._ingest = ingest
        self._tables = tables
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._isolated = isolated
        self._told: dict[str, tuple[Finding, ...]] = {}

    def watch(self, engine: Engine) -> None:
        """Starts looking after an engine of the fleet."""
        self._tasks.keep(f"watch {engine.id}", lambda: self._watch(engine))

    def forget(self, engine: Engine) -> None:
        """Stops looking after it."""
        self._tasks.cancel(f"watch {engine.id}")
        if self._ingest is not None:
            self._ingest.leave(engine)

    async def _watch(self, engine: Engine) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._connect(engine)
                backoff_s = FIRST_BACKOFF_S
                await self._until_lost(engine)
            except (EngineError, TimeoutError) as error:
                self._lose(engine, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect(self, engine: Engine) -> None:
        """From unreachable to ready."""
        async with asyncio.timeout(self._timeout_s):
            info = await engine.adapter.connect()
        pool = self._fleet.join(engine, info)
        await self._give_tables(engine)
        if pool.prompts is None:
            pool.prompts = await self._make_prompts(engine, info, pool)
        if self._ingest is not None:
            self._ingest.follow(engine, pool)
        if engine.state is not EngineState.DRAINING:
            engine.state = EngineState.READY
        engine.last_error = None
        self._told.pop(engine.id, None)
        self._tell_findings(engine)
        if self._isolated and not engine.can(Capability.CACHE_SALT):
            why = str(engine.adapter.not_supported(Capability.CACHE_SALT))
            log.warning("tenants share the KV of this engine", engine=engine.id, why=why)
        log.info("engine is ready", engine=engine.id, model=pool.model, version=info.version)

    async def _until_lost(self, engine: Engine) -> None:
        """Checks a connected engine until it fails a check or turns out to be another process."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await engine.check_now.wait()
            # Before the check: a request that fails while it runs asks for another one.
            engine.check_now.clear()
            async with asyncio.timeout(self._timeout_s):
                if engine.state is EngineState.SUSPECT:
                    await self._recheck(engine)
                    engine.state = EngineState.READY
                    continue
                load = await engine.adapter.load()
                if load.counted:
                    engine.ledger.reported(monotonic(), load.running + load.waiting)
                if load.outdated:
                    await self._recheck(engine)

    async def _recheck(self, engine: Engine) -> None:
        """A request failed, or what it can do has changed: is it the same process, and what can it do?"""
        info = await engine.adapter.connect()
        if engine.info is None or info.instance != engine.info.instance:
            raise EngineUnavailable("the engine was restarted")
        engine.info = info
        self._tell_findings(engine)

    def _tell_findings(self, engine: Engine) -> None:
        """Logs what is found wanting, and what no longer is, each once."""
        before, now = self._told.get(engine.id, ()), engine.adapter.findings()
        self._told[engine.id] = now
        for finding in now:
            if finding not in before:
                log.warning("engine is not used fully", engine=engine.id, finding=str(finding))
        for finding in before:
            if finding not in now:
                log.info("no longer so", engine=engine.id, finding=finding.problem)

    def _lose(self, engine: Engine, error: Exception) -> None:
        """The engine is gone, and with it all that was known of its KV."""
        if engine.state not in (EngineState.DOWN, EngineState.CONNECTING):
            log.warning("engine is lost", engine=engine.id, error=str(error) or "no answer in time")
        elif engine.state is EngineState.CONNECTING and engine.process is None:
            log.warning(
                "engine is not reachable; kvpin keeps trying",
                engine=engine.id,
                url=engine.adapter.spec.url,
                error=str(error) or "no answer in time",
            )
        starting = engine.process is not None and engine.process.starting
        if engine.state is not EngineState.DRAINING and not starting:
            engine.state = EngineState.DOWN
        engine.last_error = str(error) or "no answer in time"
        engine.audit.lost("the engine is down")
        if self._ingest is not None:
            self._ingest.leave(engine)
        self._fleet.leave(engine)
        engine.abandon()

    async def _give_tables(self, engine: Engine) -> None:
        if engine.can(Capability.PROMPT_TABLES):
            for table in self._tables.list():
                await engine.adapter.put_prompt_table(table)

    async def _make_prompts(self, engine: Engine, info: EngineInfo, pool: Pool) -> PromptBuilder:
        """The pool's tokeniser, checked against the engine once."""
        builder = await asyncio.to_thread(
            PromptBuilder,
            info,
            tables=self._tables,
            tokenizer=engine.adapter.spec.tokenizer,
            engines=pool.tokenisers,
            renderers=pool.renderers,
        )
        exactness = await verify_exactness(builder, engine.adapter)
        level = log.info if exactness.ok else log.warning
        level("tokenisation checked against the engine", model=pool.model, detail=exactness.detail)
        return builder
