"""Targets resolved: which engines an operation concerns, and what it means on each.

A prefix is tokenised by the pool's own prompt builder, so it is exactly what a client's request would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from engine_adapter import Capability, KvTarget
from proxy.control.operations import PREFIXES, OperationPart, OperationState, Target, kind_of, request_of
from proxy.core.audit import Trust
from proxy.core.index.blocks import Chain
from proxy.errors import BadRequest, NoEngine, NotFound
from proxy.fleet.engine import Engine
from proxy.fleet.fleet import Fleet
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt, PromptBuilder
from proxy.request.records import RequestRecords
from proxy.request.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix as the engines of a pool know it; with a `rendering`, those of that builder alone."""

    pool: Pool
    prompt: Prompt
    chain: Chain
    label: str
    rendering: PromptBuilder | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's share of an operation: its targets there, done one after the other."""

    engine: Engine
    pool: Pool
    targets: tuple[KvTarget, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """A target, resolved."""

    label: str  # the target in a word or two, without prompt text
    shares: tuple[Share, ...]  # engines that can do the operation
    unable: tuple[Share, ...] = ()  # engines that hold some of the target and cannot do it
    prefix: Prefix | None = None  # set when the target is a prefix
    note: str | None = None  # why no engine is concerned, or what the operation may miss
    away: tuple[Engine, ...] = ()  # engines that are not connected and may still hold what is to be flushed


@dataclass(frozen=True, slots=True)
class Targets:
    """Resolves targets."""

    _fleet: Fleet
    _tenants: Tenants
    _requests: RequestRecords
    has_views: bool  # False without reuse: nothing is known of what engines hold, and all are asked

    async def prefix_of(self, target: Target) -> Prefix:
        """The prefix a target names.

        Raises:
            BadRequest: the target is no prefix, or a field of it is wrong.
            NotFound: no such model, engine, tenant or key.
            NoEngine: the pool is not connected yet.
        """
        kind = kind_of(target)
        if kind not in PREFIXES:
            raise BadRequest(f"this needs a prefix: one of {', '.join(PREFIXES)}", param=kind)
        if kind == "prompt_cache_key":
            return self._last_prefix(target)
        if kind == "request_id":
            return self._prefix_of_request(target)
        salt = self._salt_of(target)
        pool, own = self._pool_of(target, target.model)
        salt = target.cache_salt if pool.shares_kv else salt
        lora = pool.lora_of(own)
        path, body = request_of(target, lora or pool.model)
        named = pool.engines.get(target.engine) if target.engine is not None else None
        rendering = named.prompts if named is not None else pool.prompts
        if rendering is None:
            raise NoEngine("prompts cannot be tokenised yet; try again shortly")
        adapter = None if lora is None else pool.identity_of(lora)
        is_whole = not rendering.info.cuts_prompts  # else the engine keeps the beginning of a longer one
        prompt = await rendering.build(path, body, salt=salt, lora=lora, adapter=adapter, bounded=is_whole)
        if prompt is None and rendering.can_ask:
            raise NoEngine(
                "no engine tokenised this prefix: none answered in time, or they refused it, or it is more "
                "than text; try again, or use token_ids, which always work"
            )
        if prompt is None:
            raise BadRequest(
                "kvpin cannot tokenise this prefix: no tokenizer is known for the model, or the prefix is "
                "more than text; use token_ids, which always work",
                param=kind,
            )
        return _prefix(pool, prompt, kind, None if prompt.source == "client" else rendering)

    async def select(self, target: Target, capability: Capability) -> Selection:
        """The engines that an operation which needs `capability` concerns, and what it means on each. Raises
        as `prefix_of`, and BadRequest for a prefix so short that no cache keeps it."""
        kind = kind_of(target)
        if kind in PREFIXES:
            prefix = await self.prefix_of(target)
            engines = self._holders(prefix, target, capability)
            # They act on its full blocks.
            shares = [Share(engine, prefix.pool, (prefix.prompt.kv,)) for engine in engines]
            if not shares and not prefix.chain.hashes:
                raise BadRequest(
                    f"caches keep full blocks of {prefix.pool.tokens_per_block} tokens, and the prefix has "
                    f"only {prefix.chain.n_tokens}",
                    param=kind,
                )
            note = None if shares else "no engine holds any of it"
            own, every = prefix.rendering, prefix.pool.engines.values()
            unlike = ", ".join(each.id for each in every if each.prompts not in (own, None))
            if unlike and own is not None and target.engine is None:
                note = f"left out, because they make other tokens of it: {unlike}; name each (--engine ID)"
            away = self._away(target, capability, prefix.pool.model)
            return Selection(prefix.label, *_divided(shares, capability), prefix, note, away)
        label = {"engine": f"engine {target.engine}", "tenant": f"tenant {target.tenant}"}.get(kind, "all")
        pools = self._pools(target)
        shares = [
            Share(engine, pool, self._whole(target, engine))
            for pool in pools
            for engine in pool.engines.values()
            if target.engine in (None, engine.id)
        ]
        note = _what_may_be_missed(target, shares, capability) if shares else "no engine is connected"
        away = self._away(target, capability, pools[0].model if target.model is not None else None)
        return Selection(label, *_divided(shares, capability), None, note, away)

    def _away(self, target: Target, capability: Capability, model: str | None) -> tuple[Engine, ...]:
        """Engines that are not connected and may still hold what is to be flushed. `model`: None for any."""
        if capability is not Capability.FLUSH or target.engine is not None:
            return ()
        away = list[Engine]()
        for engine in self._fleet.engines.values():
            served = engine.adapter.spec.model or (engine.info and engine.info.model)
            is_of_model = None in {model, served} or served == model
            # The KV of a process that kvpin runs ends with it.
            if self._fleet.pool_of(engine) is None and not engine.is_own and is_of_model:
                away.append(engine)
        return tuple(away)

    def _holders(self, prefix: Prefix, target: Target, capability: Capability) -> list[Engine]:
        """Engines that hold any of the prefix, or may hold it unseen. A named engine counts in any case.
        Raises NoEngine if it left, or makes other tokens, since the prefix was tokenised."""
        lora = prefix.prompt.lora
        engines = {
            name: engine
            for name, engine in prefix.pool.engines.items()
            if (lora is None or lora in engine.loras) and prefix.rendering in (None, engine.prompts)
        }
        if target.engine is not None:
            if target.engine not in engines:
                raise NoEngine(f"engine {target.engine!r} has changed meanwhile; try again shortly")
            return [engines[target.engine]]
        if not prefix.chain.hashes:
            return []
        matches = prefix.pool.index.match(prefix.chain.hashes)
        return [
            engine
            for engine in engines.values()
            if engine.id in matches or (engine.can(capability) and self._may_hold_unseen(engine))
        ]

    def _may_hold_unseen(self, engine: Engine) -> bool:
        """True if an engine may hold KV that the index does not know of."""
        is_seen = self.has_views and engine.audit.trust is Trust.PRECISE
        # A tier that stores chunks sends no events.
        return not is_seen or (engine.info is not None and bool(engine.info.tokens_per_chunk))

    def _whole(self, target: Target, engine: Engine) -> tuple[KvTarget, ...]:
        """A target that is no prefix: all KV, that of one salt, or of every salt of a tenant."""
        if target.tenant is None:
            return (KvTarget(cache_salt=target.cache_salt),)
        own = self._salt_of(target)
        if target.cache_salt is not None:
            return (KvTarget(cache_salt=own),)
        salts = engine.salts.of(target.tenant) | {own}
        return tuple(KvTarget(cache_salt=salt) for salt in sorted(filter(None, salts)))

    def _last_prefix(self, target: Target) -> Prefix:
        key = target.prompt_cache_key or ""
        self._check_tenant(target)
        found = self._requests.last_prompt(key, target.tenant or next(iter(self._tenants.names), None))
        if found is None:
            raise NotFound(f"no recent request has prompt_cache_key {key!r}", param="prompt_cache_key")
        model, prompt = found
        if target.model is not None and self._pool_of(target, target.model)[1] != model:
            raise BadRequest(f"the request with that key was for {model!r}", param="model")
        return _prefix(self._pool_of(target, model)[0], prompt, "prompt_cache_key")

    def _prefix_of_request(self, target: Target) -> Prefix:
        if (record := self._requests.get(target.request_id or "", target.tenant)) is None:
            problem = f"no recent request has the id {target.request_id!r}, or several begin so"
            raise NotFound(problem, param="request_id")
        if record.prompt is None or record.served_as is None:
            raise BadRequest("the prompt of this request is not known here", param="request_id")
        own = record.lora or record.served_as
        if target.model is not None and self._pool_of(target, target.model)[1] != own:
            raise BadRequest(f"the request was for {own!r}", param="model")
        n_tokens = len(record.prompt.token_ids) if target.tokens is None else target.tokens
        if n_tokens > len(record.prompt.token_ids):
            raise BadRequest(f"its prompt has only {len(record.prompt.token_ids)} tokens", param="tokens")
        extra_ids = record.prompt.extra_ids and record.prompt.extra_ids[:n_tokens]
        token_ids = record.prompt.token_ids[:n_tokens]
        prompt = replace(record.prompt, token_ids=token_ids, extra_ids=extra_ids, beginning=None)
        return _prefix(self._pool_of(target, own)[0], prompt, "request_id")

    def _salt_of(self, target: Target) -> str | None:
        tenants = self._tenants
        self._check_tenant(target)
        if target.tenant is None:
            return target.cache_salt
        if not tenants.isolated and kind_of(target) == "tenant":
            raise BadRequest("there is only one tenant, so all KV is its own: use all: true", param="tenant")
        return tenants.salt(target.tenant, target.cache_salt)

    def _check_tenant(self, target: Target) -> None:
        """Raises NotFound for an unknown tenant, BadRequest if one has to be named."""
        if target.tenant is not None and target.tenant not in self._tenants.names:
            raise NotFound(f"there is no tenant {target.tenant!r}", param="tenant")
        if target.tenant is None and self._tenants.isolated:
            text = "each tenant's KV is kept apart: name the tenant whose prefix this is"
            raise BadRequest(text, param="tenant")

    def _pool_of(self, target: Target, model: str | None) -> tuple[Pool, str | None]:
        """The pool that serves `model`, and the name by which its engines know that."""
        if target.engine is None:
            return self._fleet.find(model)
        if (pool := self._fleet.pool_of(self._fleet.engine(target.engine))) is None:
            raise NoEngine(f"engine {target.engine!r} is not connected")
        names = (pool.model, *sorted(pool.engines[target.engine].loras))
        own = model if model in names else self._fleet.aliases.get(model or "", model)
        if own not in (None, *names):
            served = ", ".join(map(repr, names))
            raise BadRequest(f"engine {target.engine!r} serves {served}", param="model")
        return pool, own

    def _pools(self, target: Target) -> list[Pool]:
        if target.engine is None and target.model is None:
            return list(self._fleet.pools.values())
        pool, own = self._pool_of(target, target.model)
        if pool.lora_of(own) is not None:
            raise BadRequest(
                f"{target.model!r} is a LoRA adapter: its KV can be told from other KV of {pool.model!r} "
                "only by a prefix; name a prefix, or the model",
                param="model",
            )
        return [pool]


def parts_of(
    selection: Selection, capability: Capability, *, is_required: bool
) -> tuple[list[tuple[OperationPart, Share]], list[OperationPart]]:
    """A part for each engine that can do the operation, and a failed one for each that cannot or is away.
    Raises NotSupported if engines are concerned, none of them can do it, and it `is_required`."""
    if is_required and selection.unable and not selection.shares:
        raise selection.unable[0].engine.adapter.not_supported(capability)
    able = [(OperationPart(share.engine.id, capability.value), share) for share in selection.shares]
    cannot = [
        (each.engine.id, str(each.engine.adapter.not_supported(capability))) for each in selection.unable
    ]
    for each in selection.away:
        why = each.last_error or "it is not connected"
        if each.owner is not None:
            why = f"another kvpin uses it ({each.owner})"
        cannot.append((each.id, f"what it holds was not flushed, because {why}"))
    failed = partial(OperationPart, verb=capability.value, state=OperationState.FAILED)
    return able, [failed(engine, error=why) for engine, why in cannot]


def _divided(shares: list[Share], capability: Capability) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    able = tuple(share for share in shares if share.engine.can(capability))
    return able, tuple(share for share in shares if not share.engine.can(capability))


def _prefix(pool: Pool, prompt: Prompt, kind: str, rendering: PromptBuilder | None = None) -> Prefix:
    if prompt.media or not prompt.whole:
        raise BadRequest(
            "this prefix holds images, audio or video; operations take text: name the part before them",
            param=kind,
        )
    chain, label = pool.chain(prompt), f"{kind} ({len(prompt.token_ids)} tokens)"
    return Prefix(pool, prompt, chain or Chain((), 0, pool.tokens_per_block), label, rendering)


def _what_may_be_missed(target: Target, shares: list[Share], capability: Capability) -> str | None:
    """Names the engines that may hold KV of the tenant under salts that kvpin does not know."""
    if target.tenant is None or target.cache_salt is not None:
        return None
    unsure = list[str]()
    for share in shares:
        view = share.engine.view
        is_seen = view is not None and view.complete and not share.pool.shares_kv
        if not (is_seen and share.engine.salts.is_complete(target.tenant)):
            unsure.append(share.engine.id)
    if not unsure:
        return None
    remedy = ": flush the whole engine to be sure" if capability is Capability.FLUSH else ""
    return (
        f"kvpin does not know every cache salt of this tenant on {', '.join(unsure)}, and may have missed "
        f"some of its KV there{remedy}"
    )
