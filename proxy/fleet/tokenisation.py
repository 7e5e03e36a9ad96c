"""Gives each connection of an engine the builder of its prompts, and proves it on the engine itself.

    engine joins → the builder of its pool with the same key, or a new one; nothing is proven
                 → tokenizer loaded once → this engine's tokens of all probes
                 → the builder whose outcome is equal

Engines that make other tokens have another builder: each request is then rendered once for each builder, and
an engine gets only its own. Until an engine is proven, it gets no token ids in place of a text, and
predictions for it are not firm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

import structlog

from engine_adapter import Capability, EngineError, EngineInfo, Finding, ModelNotLoaded
from engine_adapter.prompt.template_trials import MessageShape
from engine_adapter.prompt.tokenizer_process import load_tokenizer, version_of
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool
from proxy.prompt import FormTable, Load, PromptBuilder, RegisteredTables, compare, lost_by
from proxy.runtime import Supervisor

log = structlog.get_logger(__name__)

# Between attempts to compare a tokenizer, while the engine does not answer.
RETRY_S = 1.0
# Between attempts to load a tokenizer whose source is away. Each attempt costs about 2 s of a core.
RELOAD_S = 300.0
_Lost = frozenset[MessageShape] | None


@dataclass(frozen=True, slots=True)
class Renderings:
    """Loads the tokenizers of all pools, and compares them with each engine."""

    _tasks: Supervisor
    _tables: RegisteredTables  # p-tuning tables that prompts may name
    # Gives the tokenizer of a directory or hub id. Raises EngineSpecError, or EngineUnavailable if it may
    # succeed later.
    _load: Load = load_tokenizer

    def join(self, engine: Engine, info: EngineInfo, pool: Pool) -> None:
        """An engine joined the pool: prompts can be built from now on. Does not wait for the tokenizer."""
        source = engine.adapter.spec.tokenizer or info.tokenizer
        key = (
            (pool.model, pool.tokens_per_block),  # known chats have their hashes
            (source, version_of(source or ""), info.rendering, info.template_input, info.renders_alike),
            (info.vocab_size, info.hidden_size, Capability.TOKENIZE in info.capabilities, info.cuts_prompts),
        )
        before, known = engine.prompts, [each for each in pool.renderings if each.key == key]
        known = [each for each in known if each.is_proven] or known
        builder = known[0] if known else self._made(info, pool, key)
        if not known and before is not None and before.key == key:
            builder.take_over(before)
        builder.forget_media()
        pool.render(engine, builder)
        self._tasks.start(f"tokenizer {engine.id}", self._settle(engine, pool, builder, source, before))

    def leave(self, engine: Engine) -> None:
        """The engine is gone."""
        self._tasks.cancel(f"tokenizer {engine.id}")

    def prove_again(self, engine: Engine, pool: Pool) -> None:
        """Perhaps another process answers than the one that was compared, or lost forms are right again."""
        engine.audits.begin()
        if engine.prompts is not None and engine.info is not None:
            self.join(engine, engine.info, pool)

    async def _settle(
        self,
        engine: Engine,
        pool: Pool,
        builder: PromptBuilder,
        source: str | None,
        before: PromptBuilder | None,
    ) -> None:
        """Loads the tokenizer, unless that was done, and finds the builder whose outcome is the engine's."""
        is_final, lost = False, await self._lost_by(engine, pool, builder)
        while not is_final:
            is_final = source is None or await builder.load(source, self._load)
            if builder.is_blank and pool.renderings[0] is not builder:
                pool.render(engine, pool.renderings[0])  # of the same model: most likely it makes the same
                return
            own = await self._other_like(engine, pool, builder, lost)
            own = own or await self._own(engine, pool, builder, lost)
            is_told = before is not None and before.info.rendering != own.info.rendering
            is_same = before is None or not before.is_proven or before.forms.outcome == own.forms.outcome
            if before is not None and not (is_told or is_same):
                log.warning("engine has changed", engine=engine.id, changed=[_change(before, own)])
            if before is not None and (
                back := [form for form in before.forms.lost if form not in own.forms.lost]
            ):
                log.info("tokens of these forms are made here again", engine=engine.id, forms=back)
            pool.render(engine, own, is_proven=True)
            for other in pool.engines.values():
                if not other.is_proven and not other.can(Capability.TOKENIZE):
                    pool.render(other, pool.renderings[0])
            before = lost = None  # what is loaded later is no change of the engine
            if not is_final:
                await asyncio.sleep(RELOAD_S)

    async def _lost_by(self, engine: Engine, pool: Pool, builder: PromptBuilder) -> _Lost:
        """What the engine's template loses; None if it cannot be asked now. Requests come before its
        tokenizer is loaded and compared, which takes seconds: their messages are repaired by this."""
        if not builder.can_ask:
            return None
        try:
            async with engine.adapter.kept_loaded(within_s=0.0):
                lost = await lost_by(engine.adapter, builder.info.model)
        except EngineError:
            return None
        if lost and not builder.is_proven:
            builder.lost_early = lost
            pool.render(engine, builder)
        return lost

    async def _own(self, engine: Engine, pool: Pool, builder: PromptBuilder, lost: _Lost) -> PromptBuilder:
        """The builder with the same key whose outcome is the engine's: one of the pool, or a new one."""
        table = await self._compared(engine, builder, lost)
        for each in pool.renderings:
            is_like = each.is_proven and each.key == builder.key and not each.forms.lost
            if is_like and each.forms.outcome == table.outcome:
                return each
        own, others = builder, [each for each in pool.engines.values() if each is not engine]
        if builder.is_proven or any(each.prompts is builder for each in others):
            # Prompts that another engine of the builder made may be on their way to this one.
            own = self._made(builder.info, pool, builder.key)
            own.take_over(builder)
        own.prove(table)
        _log(pool, own)
        _warn_of_others(engine, pool, own)
        if own.local is not None:
            for other in others:
                if other.prompts is not None and other.prompts.local is None:
                    self.prove_again(other, pool)  # it may make the same
        return own

    async def _other_like(
        self, engine: Engine, pool: Pool, builder: PromptBuilder, lost: _Lost
    ) -> PromptBuilder | None:
        """For an engine whose tokenizer is nowhere: a builder of the pool that makes the same tokens."""
        if builder.local is not None or not builder.can_ask:
            return None
        for each in pool.renderings:
            if each.local is not None and each.is_proven:
                table = await self._compared(engine, each, lost)
                if table.outcome == each.forms.outcome:
                    return each
        return None

    async def _compared(self, engine: Engine, builder: PromptBuilder, lost: _Lost) -> FormTable:
        """The outcome for the engine, once it answers. It is neither loaded nor woken for that."""
        while True:
            try:
                if not builder.can_ask:
                    return await compare(builder, engine.adapter, lost)
                async with engine.adapter.kept_loaded(within_s=RETRY_S):
                    return await compare(builder, engine.adapter, lost)
            except ModelNotLoaded:
                continue  # it has waited
            except EngineError:
                await asyncio.sleep(RETRY_S)

    def _made(self, info: EngineInfo, pool: Pool, key: Hashable) -> PromptBuilder:
        return PromptBuilder(
            info,
            tables=self._tables,
            key=key,
            context=lambda: pool.context,
            engines=pool.tokenisers,
            renderers=pool.renderers,
            embedders=pool.embedders,
        )


def of_tokens(engine: Engine, pool: Pool | None) -> tuple[Finding, ...]:
    """The finding about an engine that makes other tokens than the first ones of its pool."""
    own, main = engine.prompts, pool.prompts if pool is not None else None
    if pool is None or own is None or main is None or own is main or not engine.is_proven:
        return ()
    others = [each.id for each in pool.engines.values() if each.is_proven and each.prompts is main]
    if not others:
        return ()
    other, differs = ", ".join(others), _change(main, own)
    return (
        Finding(
            f"it differs from {other}, of the same model, in {differs}: each request is rendered twice",
            "start them with the same model, flags, chat template and default arguments of it",
        ),
    )


def _change(before: PromptBuilder, after: PromptBuilder) -> str:
    """What differs between two builders, in words."""
    if before.info.cuts_prompts is not after.info.cuts_prompts:
        return "whether it cuts long prompts"
    if before.key != after.key:
        return "its model's files or its chat template"
    then, now = before.forms.sources, after.forms.sources
    forms = [form.value for form in now if then[form] != now[form]]
    return f"the tokens of {', '.join(forms)}" if forms else "the tokens of some prompts"


def _warn_of_others(engine: Engine, pool: Pool, builder: PromptBuilder) -> None:
    for other in pool.engines.values():
        if other.is_proven and other is not engine and other.prompts is not None:
            log.warning(
                "engines of one model make different tokens of the same prompt: each gets its own",
                engines=[other.id, engine.id],
                differs=_change(other.prompts, builder),
            )
            return


def _log(pool: Pool, builder: PromptBuilder) -> None:
    exactness = builder.exactness
    is_as_hoped = exactness.ok and (builder.local is None) == (exactness.source != "local")
    level = log.info if is_as_hoped else log.warning
    level(exactness.event, model=pool.model, detail=exactness.detail)
