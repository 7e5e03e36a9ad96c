"""What an operation acts on: a prefix, the KV of an engine, of a tenant, or all of it.

A prefix goes through the pool's own prompt builder, so that it is exactly what the data plane would serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from engine_adapter import Capability, JsonBody, KvTarget
from proxy.control.context import Control
from proxy.core.audit import Trust
from proxy.core.index.blocks import Chain
from proxy.errors import BadRequest, NoEngine, NotFound
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]

PREFIXES = ("messages", "prompt", "token_ids", "prompt_cache_key")
# Fields that say more about one kind of prefix, and nothing about any other target.
_COMPANIONS = {
    "tools": ("messages",),
    "chat_template_kwargs": ("messages",),
    "add_generation_prompt": ("messages",),
    "extra_ids": ("token_ids",),
    "prompt_table": ("token_ids",),
    "add_special_tokens": ("prompt",),
}


class Target(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to act on: exactly one of `messages`, `prompt`, `token_ids`, `prompt_cache_key`, `engine`
    alone, `tenant` without a prefix, or `all`.

    Attributes:
        messages: a chat; its prefix, by default without the generation prompt, so that it is what longer
            chats share. With `tools`, `chat_template_kwargs` and `add_generation_prompt` as in a request.
        prompt: text of a completion, with `add_special_tokens`.
        token_ids: a prompt as token ids, with `extra_ids` or `prompt_table`.
        prompt_cache_key: the prompt of the last request with this key.
        engine: everything that engine holds; beside a prefix or a tenant, only there.
        tenant: all KV of that tenant; beside a prefix, the tenant whose KV it is.
        all: everything, on all engines (of `model`).
        cache_salt: the salt a client sends with its requests; beside `engine` or `all`, only that KV.
        model: the served model; needed where there are several. The name of a LoRA adapter makes a prefix
            that adapter's.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    token_ids: list[TokenId] | None = None
    extra_ids: list[int] | None = None
    prompt_table: Name | None = None
    prompt_cache_key: Name | None = None
    engine: Name | None = None
    tenant: Name | None = None
    all: bool = False
    cache_salt: Name | None = None
    model: Name | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix as the engines of a pool know it."""

    pool: Pool
    prompt: Prompt
    chain: Chain
    label: str

    @property
    def kv(self) -> KvTarget:
        """The prefix as engines are told it; they act on its full blocks."""
        return self.prompt.kv


@dataclass(frozen=True, slots=True)
class Share:
    """What an operation means on one engine: its targets there, one after the other."""

    engine: Engine
    pool: Pool
    targets: tuple[KvTarget, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """An operation's target, resolved.

    Attributes:
        label: the target in a word or two, without prompt text.
        shares: engines that can do it.
        unable: engines that hold some of it and cannot.
        prefix: set when the target is a prefix.
        note: why no engine is concerned, or what the operation may miss.
    """

    label: str
    shares: tuple[Share, ...]
    unable: tuple[Share, ...] = ()
    prefix: Prefix | None = None
    note: str | None = None


def kind_of(target: Target) -> str:
    """Which one of the targets it is; raises BadRequest naming the field when it is not exactly one."""
    given = [name for name in PREFIXES if getattr(target, name) is not None]
    if target.all:
        given.append("all")
    if not given and (target.tenant or target.engine):
        given = ["tenant" if target.tenant else "engine"]
    if not given:
        raise BadRequest(
            f"name a target: one of {', '.join(PREFIXES)}, engine, tenant, or all: true", param="target"
        )
    if len(given) > 1:
        raise BadRequest(f"{given[1]} excludes {given[0]}: name one target", param=given[1])
    kind = given[0]
    if target.all and (target.engine or target.tenant):
        raise BadRequest("all means every engine and tenant: leave it out", param="all")
    for name, kinds in _COMPANIONS.items():
        if getattr(target, name) is not None and kind not in kinds:
            raise BadRequest(f"{name} goes with {kinds[0]}", param=name)
    if target.cache_salt is not None and kind == "prompt_cache_key":
        raise BadRequest("a prompt_cache_key brings the salt of its request", param="cache_salt")
    return kind


async def prefix_of(control: Control, target: Target) -> Prefix:
    """The prefix a target names.

    Raises:
        BadRequest: it is no prefix, or a field of it is wrong.
        NotFound: no such model, engine, tenant or key.
        NoEngine: the pool is not connected yet.
    """
    kind = kind_of(target)
    if kind not in PREFIXES:
        raise BadRequest(f"this needs a prefix: one of {', '.join(PREFIXES)}", param=kind)
    if kind == "prompt_cache_key":
        return _last_prefix(control, target)
    salt = _salt_of(control, target)
    pool = _pool_of(control, target, target.model)
    adapter = pool.adapter_of(target.model)
    path, body = _request_of(target, adapter or pool.model)
    if pool.prompts is None:
        raise NoEngine("prompts cannot be tokenised yet; try again shortly")
    prompt = await pool.prompts.build(path, body, salt=salt, adapter=adapter)
    if prompt is None:
        raise BadRequest(
            "this prefix cannot be tokenised here: no tokenizer is known for the model, or it holds more "
            "than text; token_ids always work",
            param=kind,
        )
    return _prefix(pool, prompt, kind)


async def select(control: Control, target: Target, capability: Capability) -> Selection:
    """The engines an operation that needs `capability` concerns, and what it means on each.

    Raises:
        BadRequest, NotFound, NoEngine: see `prefix_of`.
    """
    kind = kind_of(target)
    if kind in PREFIXES:
        prefix = await prefix_of(control, target)
        engines = _holders(control, prefix, target, capability)
        shares = [Share(engine, prefix.pool, (prefix.kv,)) for engine in engines]
        return _divide(prefix.label, shares, capability, prefix, None if shares else _why_none(prefix))
    label = {"engine": f"engine {target.engine}", "tenant": f"tenant {target.tenant}"}.get(kind, "all")
    pools = _pools(control, target)
    shares = [
        Share(engine, pool, _whole(control, target, engine))
        for pool in pools
        for engine in pool.engines.values()
        if target.engine in (None, engine.id)
    ]
    note = _what_may_be_missed(target, shares) if shares else "no engine is connected"
    return _divide(label, shares, capability, None, note)


def require_able(selection: Selection, capability: Capability) -> None:
    """Raises NotSupported when engines are concerned and none of them can."""
    if selection.unable and not selection.shares:
        raise selection.unable[0].engine.adapter.not_supported(capability)


def _divide(
    label: str, shares: list[Share], capability: Capability, prefix: Prefix | None, note: str | None
) -> Selection:
    able = tuple(share for share in shares if share.engine.can(capability))
    unable = tuple(share for share in shares if not share.engine.can(capability))
    return Selection(label, able, unable, prefix, note)


def _holders(control: Control, prefix: Prefix, target: Target, capability: Capability) -> list[Engine]:
    """Engines that hold any of the prefix, or may hold it unseen; the named one in any case."""
    adapter = prefix.prompt.adapter
    engines = {
        name: engine
        for name, engine in prefix.pool.engines.items()
        if adapter is None or adapter in engine.adapters
    }
    if target.engine is not None:
        return [engines[target.engine]]
    if not prefix.chain.hashes:
        return []
    matches = prefix.pool.index.match(prefix.chain.hashes)
    seen = control.flow.ingest is not None
    return [
        engine
        for engine in engines.values()
        if engine.id in matches
        or (engine.can(capability) and not (seen and engine.audit.trust is Trust.PRECISE))
        or (engine.can(capability) and engine.info is not None and engine.info.tokens_per_chunk)
    ]


def _why_none(prefix: Prefix) -> str:
    if not prefix.chain.hashes:
        return (
            f"only full blocks of {prefix.pool.tokens_per_block} tokens are kept; "
            f"the prefix has {prefix.chain.n_tokens}"
        )
    return "no engine holds any of it"


def _whole(control: Control, target: Target, engine: Engine) -> tuple[KvTarget, ...]:
    """Targets that are no prefix: all, one salt, or every salt of a tenant."""
    if target.tenant is None:
        return (KvTarget(cache_salt=target.cache_salt),)
    own = _salt_of(control, target)
    if target.cache_salt is not None:
        return (KvTarget(cache_salt=own),)
    salts = engine.salts.of(target.tenant) | {own}
    return tuple(KvTarget(cache_salt=salt) for salt in sorted(filter(None, salts)))


def _what_may_be_missed(target: Target, shares: list[Share]) -> str | None:
    """Names the engines that may hold KV of the tenant under salts that kvpin does not know."""
    if target.tenant is None or target.cache_salt is not None:
        return None
    unsure = [share.engine.id for share in shares if not _knows_salts(share.engine, target.tenant)]
    if not unsure:
        return None
    return (
        f"kvpin does not know every cache salt of this tenant on {', '.join(unsure)}: flush the whole engine "
        "to be sure"
    )


def _knows_salts(engine: Engine, tenant: str) -> bool:
    """Whether every salt is known under which the engine may hold KV of the tenant."""
    is_seen = engine.view is not None and engine.view.complete
    return is_seen and engine.salts.is_complete(tenant)


def _request_of(target: Target, model: str) -> tuple[str, JsonBody]:
    """The request whose prompt the prefix is."""
    fields: dict[str, Any] = {"model": model}
    if target.messages is not None:
        fields |= {
            "messages": target.messages,
            "tools": target.tools,
            "chat_template_kwargs": target.chat_template_kwargs,
            "add_generation_prompt": target.add_generation_prompt or False,
        }
        path = "/v1/chat/completions"
    else:
        if target.token_ids is not None and not target.token_ids:
            raise BadRequest("token_ids is empty", param="token_ids")
        fields |= {
            "prompt": target.prompt if target.prompt is not None else target.token_ids,
            "extra_ids": target.extra_ids,
            "prompt_table": target.prompt_table,
            "add_special_tokens": target.add_special_tokens,
        }
        path = "/v1/completions"
    given = {name: value for name, value in fields.items() if value is not None}
    return path, JsonBody(msgspec.json.encode(given))


def _last_prefix(control: Control, target: Target) -> Prefix:
    key = target.prompt_cache_key or ""
    tenants = control.tenants
    if target.tenant is not None and target.tenant not in tenants.names:
        raise _no_tenant(target.tenant)
    if target.tenant is None and tenants.isolated:
        raise _name_tenant()
    tenant = target.tenant or next(iter(tenants.names), None)
    found = control.requests.last_prompt(key, tenant)
    if found is None:
        raise NotFound(f"no recent request has prompt_cache_key {key!r}", param="prompt_cache_key")
    model, prompt = found
    if target.model not in (None, model):
        raise BadRequest(f"the request with that key was for {model!r}", param="model")
    return _prefix(_pool_of(control, target, model), prompt, "prompt_cache_key")


def _prefix(pool: Pool, prompt: Prompt, kind: str) -> Prefix:
    if prompt.media or not prompt.whole:
        raise BadRequest(
            "this prefix holds images, audio or video; operations take text: name the part before them",
            param=kind,
        )
    chain = Chain((), 0, pool.tokens_per_block)
    return Prefix(pool, prompt, pool.chain(prompt) or chain, f"{kind} ({len(prompt.token_ids)} tokens)")


def _salt_of(control: Control, target: Target) -> str | None:
    """The salt the target's KV lies under."""
    tenants = control.tenants
    if target.tenant is None:
        if tenants.isolated:
            raise _name_tenant()
        return target.cache_salt
    if target.tenant not in tenants.names:
        raise _no_tenant(target.tenant)
    if not tenants.isolated and kind_of(target) == "tenant":
        raise BadRequest("there is one tenant, and its KV is everybody's: use all: true", param="tenant")
    return tenants.salt(target.tenant, target.cache_salt)


def _pool_of(control: Control, target: Target, model: str | None) -> Pool:
    if target.engine is None:
        return control.fleet.pool(model)
    pool = _connected_pool(control, target.engine)
    names = (pool.model, *sorted(pool.engines[target.engine].adapters))
    if model not in (None, *names):
        served = ", ".join(map(repr, names))
        raise BadRequest(f"engine {target.engine!r} serves {served}", param="model")
    return pool


def _pools(control: Control, target: Target) -> list[Pool]:
    """The pools of a target that is no prefix."""
    if target.engine is not None or target.model is not None:
        pool = _pool_of(control, target, target.model)
        if pool.adapter_of(target.model) is not None:
            raise BadRequest(
                f"{target.model!r} is a LoRA adapter, whose KV can be told from the rest of {pool.model!r} "
                "only by a prefix: name one, or the model",
                param="model",
            )
        return [pool]
    return list(control.fleet.pools.values())


def _connected_pool(control: Control, engine_id: str) -> Pool:
    pool = control.fleet.pool_of(control.fleet.engine(engine_id))
    if pool is None:
        raise NoEngine(f"engine {engine_id!r} is not connected")
    return pool


def _no_tenant(tenant: str) -> NotFound:
    return NotFound(f"there is no tenant {tenant!r}", param="tenant")


def _name_tenant() -> BadRequest:
    return BadRequest("tenants' KV is kept apart here: name the tenant whose prefix this is", param="tenant")
