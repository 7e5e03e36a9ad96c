"""A request that can be placed, and what the engine it is placed on gets of it."""

from __future__ import annotations

import dataclasses

from msgspec import Struct
from msgspec.structs import replace

from engine_adapter import Capability, RequestBody, Retention, Upload
from proxy.core.index.blocks import Chain
from proxy.core.placement.decision import Placement
from proxy.fleet.destinations import Destination
from proxy.fleet.engine import Engine
from proxy.fleet.pool import Pool
from proxy.prompt import Prompt
from proxy.request.calls import Call
from proxy.request.migration import Continuation
from proxy.request.session import Session
from proxy.translate import Predicted, Translation


class Ready(Struct, frozen=True):
    """A request that can be placed.

    Attributes:
        call: the request, its media checked, with a model name that its engines take.
        pool: the engines that serve its model.
        salt: the cache salt its KV lies under.
        lora: the LoRA adapter it runs with.
        prompt: its prompt as the engine will see it; None when reuse is off or the prompt cannot be known.
        chain: the prompt's blocks; None without a prompt.
        session: the conversation it belongs to; None when reuse is off.
        retention: how long its client wants its KV kept; None when reuse is off.
        translation: turns the answer to a chat into that of the API the client asked; None for its own.
        home: the only engine that can serve it, which made the response that it names; None for any.
        kind: the only kind of engine that can serve it, because one of them died in mid-answer; None for any.
    """

    call: Call
    pool: Pool
    salt: str | None
    lora: str | None
    prompt: Prompt | None
    chain: Chain | None
    session: Session | None = None
    retention: Retention | None = None
    translation: Translation | None = None
    home: str | None = None
    kind: str | None = None

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

    def going_on(self, further: Continuation) -> Ready:
        """The request of a stream whose engine died. What the client has of the answer is part of its prompt,
        if the next engine takes it as that."""
        prompt, told = self.prompt, further.resumption
        if prompt is None or told is None or prompt.extra_ids is not None:
            return replace(self, call=further.call, kind=further.kind)
        prompt = dataclasses.replace(prompt, token_ids=prompt.token_ids + told.token_ids, beginning=None)
        chain = self.pool.chain(prompt)
        return replace(self, call=further.call, kind=further.kind, prompt=prompt, chain=chain)


def naming(call: Call, to: Destination) -> Call:
    """The request with the engines' name of its model in place of the client's, unless they take any name."""
    body, name = call.body, to.model
    if name is None or name == call.model or to.pool.any_model:
        return call
    if body is None:
        return call.naming(name)
    return replace(call, body=body.renamed(name) if isinstance(body, Upload) else body.replace(model=name))
