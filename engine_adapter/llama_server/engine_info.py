"""What kvpin declares of a llama-server, while its model is in memory and before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import xxhash

from engine_adapter.llama_server.mirror_events import TOKENS_PER_BLOCK
from engine_adapter.llama_server.options import LlamaServerSpec
from engine_adapter.llama_server.routes import SERVED
from engine_adapter.llama_server.session import ServerSession
from engine_adapter.types import TRANSLATED_ROUTES, Capability, EngineInfo


def absent(model: str, instance: str, card: Mapping[str, Any], *, keeps_none: bool = False) -> EngineInfo:
    """The facts about a server whose model was not in memory yet. `keeps_none`: it has no `--cache-ram`."""
    salted = {Capability.CACHE_SALT} if keeps_none else set()
    return EngineInfo(
        model=model,
        instance=instance,
        capabilities=frozenset(
            {Capability.CACHED_TOKENS, Capability.KV_EVENTS, Capability.TOKENIZE, *salted}
        ),
        tokens_per_block=TOKENS_PER_BLOCK,
        shares_prefill=True,
        any_model=True,
        served_as_chats=TRANSLATED_ROUTES,
        routes=SERVED,
        splits_choices=True,
        card=card,
        too_long=_too_long,
    )


def info_of(spec: LlamaServerSpec, session: ServerSession) -> EngineInfo:
    """The facts about a server in its session."""
    facts = session.facts
    template = xxhash.xxh3_64_hexdigest(facts.chat_template.encode())
    known = absent(spec.model or facts.model, facts.instance or facts.fingerprint, facts.card)
    return replace(
        known,
        names_process=facts.instance is not None,
        rendering=f"model {facts.fingerprint}\ntemplate {template}",
        capabilities=session.capabilities,
        max_model_len=facts.slot_ctx,
        vocab_size=facts.vocab_size,
        tokenizer=spec.tokenizer or (str(facts.local_model) if facts.local_model else None),
        gpu_blocks=facts.slots * facts.slot_ctx // TOKENS_PER_BLOCK,
        version=facts.build,
        splits_choices=session.scheduler is not None,
    )


def _too_long(tokens: int, limit: int) -> dict[str, Any]:
    """The server's own fields of this error; its clients look for the type."""
    return {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": limit}
