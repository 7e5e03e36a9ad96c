"""Gives each pool its tokenizer: loaded once, in the background, and checked against one of its engines.

    first engine joins → the engines tokenise → tokenizer loaded → same ids as the engine? → kvpin tokenises

Engines that join later, or again, find what the pool has.
"""

from __future__ import annotations

import asyncio
from itertools import count

import structlog

from engine_adapter import Capability, EngineError, EngineInfo, ModelNotLoaded
from engine_adapter.prompt.tokenizer_process import load_tokenizer
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool
from proxy.prompt import Exactness, Load, PromptBuilder, PromptTables, verify_exactness
from proxy.runtime.interpreter import settle
from proxy.runtime.tasks import Supervisor

log = structlog.get_logger(__name__)

# Between attempts to check a tokenizer, while the engine does not answer.
RETRY_S = 1.0
# Between attempts to load a tokenizer whose source is away. Each attempt costs about 2 s of a core.
RELOAD_S = 300.0


class PoolTokenizers:
    """Loads and checks the tokenizers of all pools.

    Args:
        tasks: runs the loading.
        tables: p-tuning tables that prompts may name.
        load: gives the tokenizer of a directory or hub id; raises EngineSpecError, or
            EngineUnavailable if it may succeed later.
    """

    def __init__(self, tasks: Supervisor, tables: PromptTables, load: Load = load_tokenizer) -> None:
        self._tasks = tasks
        self._tables = tables
        self._load = load
        self._tried: dict[str, set[str]] = {}  # directories and hub ids, by model

    def join(self, engine: Engine, info: EngineInfo, pool: Pool) -> None:
        """An engine joined the pool: prompts can be built from now on. Does not wait for the tokenizer."""
        is_new = pool.prompts is None
        builder = pool.prompts = pool.prompts or PromptBuilder(
            info,
            tables=self._tables,
            engines=pool.tokenisers,
            renderers=pool.renderers,
            embedders=pool.embedders,
        )
        if builder.info.gpu_blocks is None:
            builder.info = info  # its model may have been loaded since
        source = engine.adapter.spec.tokenizer or info.tokenizer
        if is_new:  # also a pool whose model was served before: its tokenizer went with the old pool
            self._tried[pool.model] = set()
        tried = self._tried[pool.model]
        if source is not None and source not in tried and builder.local is None:
            tried.add(source)
            work = self._load_and_check(pool, builder, engine, source)
            self._tasks.start(f"tokenizer {pool.model} {source}", work)
        elif is_new:
            self._tasks.start(f"tokenizer {pool.model}", self._check(pool, builder, engine))

    async def _load_and_check(self, pool: Pool, builder: PromptBuilder, engine: Engine, source: str) -> None:
        builder.reason = f"the tokenizer {source!r} is being loaded"
        await verify_exactness(builder, engine.adapter)  # with no tokenizer here, no engine is asked
        is_settled = await builder.load(source, self._load)
        settle()
        await self._check(pool, builder, engine)
        while not is_settled and (pool.engines or pool.away):
            await asyncio.sleep(RELOAD_S)
            is_settled = await builder.load(source, self._load)
            if builder.local is not None:
                await self._check(pool, builder, engine)

    async def _check(self, pool: Pool, builder: PromptBuilder, engine: Engine) -> None:
        """Compares the tokenizer with an engine of the pool, and logs what came of it."""
        must_ask = builder.local is not None and Capability.TOKENIZE in builder.info.capabilities
        for attempt in count():
            if not (pool.engines or pool.away):
                return
            adapters = pool.tokenisers() or ([] if must_ask else [engine.adapter])
            try:
                if adapters:
                    # In turn: any of them may be the one whose model a request loads.
                    adapter = adapters[attempt % len(adapters)]
                    async with adapter.kept_loaded(within_s=RETRY_S):
                        _log(pool, builder, await verify_exactness(builder, adapter))
                        return
            except ModelNotLoaded:
                continue  # it has waited
            except EngineError:
                pass
            await asyncio.sleep(RETRY_S)


def _log(pool: Pool, builder: PromptBuilder, exactness: Exactness) -> None:
    is_as_hoped = exactness.ok and (builder.local is None) == (exactness.source != "local")
    level = log.info if is_as_hoped else log.warning
    level(exactness.event, model=pool.model, detail=exactness.detail)
