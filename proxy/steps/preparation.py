"""Reads a request until it can be placed, and makes the body that the chosen engine gets."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Coroutine, Mapping
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import replace

from engine_adapter import Capability, JsonBody, RequestBody, Retention, Transfer, Upload
from engine_adapter.off_loop import JSON_BYTES_PER_MS, VALUES_PER_MS, off_loop
from proxy.core.admission import Needs
from proxy.core.index.blocks import Chain
from proxy.core.message_repair import ONE_BY_ONE
from proxy.core.placement.decision import Placement
from proxy.core.retention import may_ask, retention_of
from proxy.errors import ANSWERED, MethodNotAllowed
from proxy.fleet.destinations import Destination, Destinations
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool
from proxy.headers import CHANGED_HEADER, NORMALISED_HEADER, PRIORITY_HEADER
from proxy.prompt import MediaUuids, Prompt, PromptBuilder
from proxy.request.calls import Call, Session
from proxy.request.engine_errors import PASSED_ON
from proxy.request.gate import priority_in, priority_of
from proxy.request.known_routes import ALLOW_POST
from proxy.request.migration import SentStream
from proxy.request.normalising import NO_RULES, Change, Keep, Normalising
from proxy.request.tenants import Tenants
from proxy.request.translate import (
    CHAT_PATH,
    RESPONSES_PATH,
    Predicted,
    Translate,
    Translation,
    may_name_more,
)

_PRIORITY = PRIORITY_HEADER.encode()
# Translating a value takes so many times as long as looking at it.
_WORK_OF_A_VALUE = 16
# Of bodies with more bytes, each tenant's are read one at a time.
_LONG_BYTES = 4 << 20


class Ready(Struct, frozen=True):
    """A request that can be placed."""

    call: Call  # the request, its media checked, with a model name that its engines take
    pool: Pool  # the engines that serve its model
    salt: str | None  # the cache salt its KV lies under
    lora: str | None  # the LoRA adapter it runs with
    # Its prompt as the engine will see it; None when reuse is off or the prompt cannot be known.
    prompt: Prompt | None = None
    chain: Chain | None = None  # the prompt's blocks; None without a prompt
    session: Session | None = None  # the conversation it belongs to; None when reuse is off
    retention: Retention | None = None  # how long its client wants its KV kept; None when reuse is off
    # Turns the answer to a chat into that of the API the client asked; None for its own.
    translation: Translation | None = None
    keep: Keep | None = None  # keeps the reasoning of its answer; None if it is not to be kept
    # The engine that made the response that the request names: only that one can serve it; None for any.
    home: str | None = None
    # The only kind of engine that can serve it, because one of them died in mid-answer; None for any.
    kind: str | None = None
    rules: tuple[Change, ...] = ()  # the rules and repairs that changed its prompt
    # The client's body as these rules changed it, until it is kept; None if none did.
    asked: RequestBody = None
    values: Mapping[str, str] = {}  # reference → value, which the answer may name
    # What made its prompt: only the engines of that builder can take it. None for any.
    rendering: PromptBuilder | None = None
    others: tuple[Ready, ...] = ()  # the same request with the prompts of the pool's other builders
    # The pool's builders when the prompts were made; None if none were to be made.
    renderings: tuple[PromptBuilder, ...] | None = None
    context: int = 0  # the least context of an engine that can take its prompt, in tokens; 0 for any
    # It runs without its tenant's salt, because the pool's engines share KV between tenants.
    shares: bool = False
    priority: int | None = None

    @property
    def is_stale(self) -> bool:
        """True if an engine has joined or changed since, so that none of the prompts is its own."""
        now, then = self.pool.renderings, self.renderings
        return not (then is None or now is then or set(now) <= set(then))

    def for_engine(self, engine: Engine) -> Ready:
        """The request with the prompt that this engine makes."""
        return next((each for each in self.others if each.rendering is engine.prompts), self)

    @property
    def told(self) -> dict[str, str]:
        """The headers that name the rules, and what else was changed."""
        told = {NORMALISED_HEADER: ",".join(self.rules)} if self.rules else {}
        if changed := self.call.changed:
            told[CHANGED_HEADER] = ",".join(changed)
        return told

    @property
    def needs(self) -> Needs:
        """The abilities that an engine must have to take the request, with any of its prompts."""
        return replace(self.own_needs, prompts=None)

    @property
    def own_needs(self) -> Needs:
        """The abilities that an engine must have to take it with this prompt."""
        call = self.call
        route = call.route if call.route in PASSED_ON else None
        return Needs(
            self.lora, call.native, route, self.home, self.kind, self.rendering, self.context, self.shares
        )

    def moves_by(self, transfer: Transfer) -> bool:
        """True if one engine may compute the prompt and another one answer: all of it is text that kvpin
        knows, and nothing of the answer has come yet."""
        prompt, body = self.prompt, self.call.body
        if prompt is None or not prompt.whole or prompt.extra_ids is not None:
            return False
        if self.shares and not self.pool.shares_kv:  # an engine has joined that may not have it
            return False
        is_free = self.home is None and self.kind is None
        return is_free and isinstance(body, JsonBody) and transfer.takes(self.call.route, body)

    def call_for(self, engine: Engine) -> Call:
        """The request, with the engine's own model name in its query if it has no body."""
        name = self._own_name(engine) if self.call.body is None else None
        return self.call if name is None else self.call.naming(name)

    def body_for(self, engine: Engine) -> RequestBody:
        """The client's body, with the tenant's salt and the engine's own model name where these differ.

        A LoRA adapter has the same name on every engine.
        """
        body, own_name = self.call.body, self._own_name(engine)
        if isinstance(body, Upload):
            return body if own_name is None else body.renamed(own_name)
        if body is None:
            return None
        changes = {}
        if self.salt != body.get("cache_salt") and engine.can(Capability.CACHE_SALT):
            changes["cache_salt"] = self.salt
        if own_name is not None:
            changes["model"] = own_name
        return body.replace(**changes) if changes else body

    def _own_name(self, engine: Engine) -> str | None:
        """The engine's own name of the model, where the request has another."""
        model, info = self.pool.model, engine.info
        return info.model if info is not None and self.call.model == model != info.model else None

    def predicted(self, placement: Placement, engine: Engine) -> Predicted:
        """The facts known of the prompt. If not all of the prompt is known: only the engine's block size."""
        prompt, block = self.prompt, engine.info.tokens_per_block if engine.info is not None else None
        if prompt is None or not prompt.whole:
            return Predicted(tokens_per_block=block)
        return Predicted(len(prompt.token_ids), placement.predicted_tokens, block)

    def going_on(self, told: SentStream) -> Ready:
        """The request for the engine that goes on with a stream. If this engine can resume from tokens, the
        answer's tokens so far become the end of its prompt."""
        prompt, resumption, call = self.prompt, told.resumption, self.call
        if resumption is None or not isinstance(call.body, JsonBody):
            return replace(self, kind=told.kind)
        call = replace(call, body=call.body.replace(**resumption.fields))
        if prompt is None or prompt.extra_ids is not None:
            return replace(self, call=call, kind=told.kind)
        token_ids = prompt.token_ids + resumption.token_ids
        prompt = replace(prompt, token_ids=token_ids, beginning=None)
        return replace(self, call=call, kind=told.kind, prompt=prompt, chain=self.pool.chain(prompt))


@dataclasses.dataclass(frozen=True, slots=True)
class Preparation:
    """Reads requests as far as placement needs it."""

    destinations: Destinations  # which pool, or which engine, may serve a request
    tenants: Tenants  # tenant → cache salt
    media: MediaUuids  # the content behind clients' names of images
    # route → what translates a request there into a chat, for engines that want chats
    translations: Mapping[str, Translate]
    reuse: bool  # every prompt is tokenised; without reuse, only prompts that are counted
    normalising: Normalising = NO_RULES  # the rules that change prompts
    _turns: WeakValueDictionary[str | None, asyncio.Lock] = dataclasses.field(
        default_factory=WeakValueDictionary
    )

    async def prepare_again(self, ready: Ready) -> Ready:
        """The request with prompts for the engines that its pool has now. Raises as `prepare` does."""
        bare = replace(ready, prompt=None, chain=None, rendering=None, others=(), context=0)
        return await self._with_prompts(bare)

    def prepare(self, call: Call) -> Coroutine[Any, Any, Ready]:
        """Finds the pool of a request, and reads its prompt.

        A tenant's long bodies are read one after the other: meanwhile, each takes about ten times its length
        of memory. Raises ProxyError or EngineError if it is wrong, or no engine serves its model.
        """
        if _PRIORITY in call.headers.first:
            priority_in(call.headers)  # an invalid priority is refused even if no request waits
        is_long = isinstance(call.body, JsonBody) and len(call.body.raw) > _LONG_BYTES
        return self._in_turn(call) if is_long else self._prepare(call)

    async def _in_turn(self, call: Call) -> Ready:
        async with self._turns.setdefault(call.tenant, asyncio.Lock()):
            return await self._prepare(call)

    async def _prepare(self, call: Call) -> Ready:
        to = self.destinations.by_model_alone(call) or await self.destinations.find(call)
        if call.native is not None:
            to.pool.check_serves(call.native)
        # Of a chat before the rules: some put at its end what stood elsewhere a turn before.
        keep = None
        kept: tuple[Change, ...] = ()
        if self.normalising.chosen:
            call, kept, keep = await self.normalising.with_reasoning(call, to.pool.model)
        changed = retention = translation = None
        is_made = call.route in self.translations and call.route in to.pool.served_as_chats
        # If a chat is made of it, that is repaired: earlier turns may stand there alone.
        lost = frozenset() if is_made else to.pool.lost_shapes
        if self.normalising.may_apply(call, lost):
            changed = await self.normalising.apply(call, to.pool.model, lost)
        if changed is not None:
            call = changed.call
        if self.reuse and call.runs_prompt and to.pool.prompts is not None:
            retention = await self._retention(call)
        if call.route in self.translations or call.method != "POST":
            translation = await self._translation(call, to.pool, is_chat=is_made)
        if translation is None:
            ready = await self._ready(call, to, retention)
        else:
            chat, kept, keep = await self._chat(call, translation, to.pool)
            with translation.wording.errors(*ANSWERED):
                ready = await self._ready(chat, to, retention, counts=translation.counts)
            ready = replace(ready, translation=translation)
        if keep is not None:
            ready = replace(ready, keep=keep)
        if changed is not None:
            ready = replace(ready, values=changed.told)
            kept = (*changed.by, *kept)
        return replace(ready, rules=kept, asked=call.body) if kept else ready

    async def _retention(self, call: Call) -> Retention | None:
        """How long the client wants its KV kept. Raises BadRequest for a wish that cannot be read."""
        body = call.body
        if not isinstance(body, JsonBody):
            return None
        if not may_ask(body):
            return Retention(owner=call.tenant)
        return await off_loop(lambda: retention_of(body, call.tenant), ms=body.n_values / VALUES_PER_MS)

    async def _translation(self, call: Call, pool: Pool, *, is_chat: bool) -> Translation | None:
        """The request's translation into a chat; None if the engines of the pool serve it as it is.
        `is_chat`: they want it as a chat. Raises MethodNotAllowed where the route takes only POST."""
        translate, body = self.translations.get(call.route), call.body
        if call.method != "POST":
            # An engine that keeps no responses keeps no chats, which a GET would list.
            keeps_none = call.route == CHAT_PATH and RESPONSES_PATH in pool.served_as_chats
            if is_chat or keeps_none:
                text = f"{call.route} takes POST, not {call.method}"
                raise MethodNotAllowed(text, allow=ALLOW_POST)
        if translate is None or not is_chat or not isinstance(body, JsonBody):
            return None
        is_long = call.route.startswith(RESPONSES_PATH) and may_name_more(body)
        ms = len(body.raw) / JSON_BYTES_PER_MS + _WORK_OF_A_VALUE * body.n_values / VALUES_PER_MS
        ms = math.inf if is_long else ms
        return await off_loop(lambda: translate(body, call.tenant), ms=ms)

    async def _chat(
        self, call: Call, translation: Translation, pool: Pool
    ) -> tuple[Call, tuple[Change, ...], Keep | None]:
        """The chat that a request was translated into, with the reasoning that it lacks, and repaired; what
        changed it; and what keeps the reasoning of its answer."""
        noted = (*call.changed, *translation.changed)
        chat = replace(call, path=CHAT_PATH, body=translation.chat, changed=noted)
        chat, by, keep = await self.normalising.with_reasoning(chat, pool.model)
        mended = await self.normalising.repaired(chat, pool.model, pool.lost_shapes)
        if mended is None:
            return chat, by, keep
        if not ONE_BY_ONE.issuperset(mended.by):  # its places are of other messages
            translation.wording = dataclasses.replace(translation.wording, places=())
        return mended.call, (*mended.by, *by), keep

    async def _ready(
        self, call: Call, to: Destination, retention: Retention | None, *, counts: bool = False
    ) -> Ready:
        """The request in a form that engines understand. It `counts` if its client only asks for the length
        of its prompt."""
        pool, salt, shares, priority = to.pool, None, False, None
        if isinstance(call.body, JsonBody):
            body = call.body
            given = None if body.is_plain else body.get("cache_salt")
            salt = self.tenants.salt(call.tenant, given)
            if not body.is_plain:
                owner = call.tenant if self.tenants.isolated else None  # whose the salt is
                body = await self.media.admit(self.tenants.without_private(body), salt, owner)
            if body is not call.body:
                priority, call = priority_of(call), replace(call, body=body)
            if salt != given and pool.shares_kv:
                salt, shares = given, True
        lora = None
        if to.model is not None and (to.model != pool.model or to.model != call.model):
            lora, call = pool.lora_of(to.model), _naming(call, to)
        session = call.session if self.reuse else None
        ready = Ready(
            call,
            pool,
            salt,
            lora,
            session=session,
            retention=retention,
            home=to.home,
            shares=shares,
            priority=priority,
        )
        if not (self.reuse or counts) or not isinstance(call.body, JsonBody):
            return ready
        return await self._with_prompts(ready, counts=counts)

    async def _with_prompts(self, ready: Ready, *, counts: bool = False) -> Ready:
        """The request with a prompt by each builder of its pool: mostly there is one."""
        call, pool, lora = ready.call, ready.pool, ready.lora
        made: list[Ready] = []
        assert isinstance(call.body, JsonBody)  # noqa: S101 - others have no prompts
        renderings = pool.renderings
        for rendering in renderings:
            prompt = await rendering.build(
                call.route,
                call.body,
                salt=ready.salt,
                lora=lora,
                adapter=None if lora is None else pool.identity_of(lora),
                tenant=call.tenant,
                bounded=not counts,
            )
            if prompt is None:
                made.append(replace(ready, rendering=rendering, renderings=renderings))
                continue
            chain, context = pool.chain(prompt), pool.context_for(len(prompt.token_ids), call.body)
            one = replace(
                ready, rendering=rendering, renderings=renderings, prompt=prompt, chain=chain, context=context
            )
            made.append(one)
        if not made:
            return replace(ready, renderings=())
        return replace(made[0], others=tuple(made[1:])) if len(made) > 1 else made[0]


def _naming(call: Call, to: Destination) -> Call:
    """The request with the engines' name of its model in place of the client's, unless they take any name."""
    body, name = call.body, to.model
    if name is None or name == call.model or to.pool.any_model:
        return call
    if body is None:
        return call.naming(name)
    return replace(call, body=body.renamed(name) if isinstance(body, Upload) else body.replace(model=name))
