"""Warming: a completion of one token, so that a prefix's KV is there before it is needed.

It lives like a client's request: it waits for its turn, behind those of clients.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from engine_adapter import Capability, EngineRejected, Headers, JsonBody
from proxy.control.operations import Operation, Operations, Part, new_operation, run_parts
from proxy.control.target import Target
from proxy.control.target_engines import Prefix, Targets
from proxy.core.admission import MAX_PRIORITY
from proxy.errors import BadRequest, NoEngine
from proxy.fleet.engine import Engine
from proxy.flow import Flow
from proxy.headers import PRIORITY_HEADER
from proxy.request.calls import Call, Nobody, Reply
from proxy.request.gate import Admission
from proxy.request.records import RequestRecord
from proxy.steps.preparation import Ready

_PATH = "/v1/completions"
_LAST = b"%d" % MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Warming:
    """Computes prefixes ahead of need."""

    _flow: Flow
    _targets: Targets
    _operations: Operations

    async def warm(self, target: Target, *, everywhere: bool = False) -> Operation:
        """Starts computing a prefix: on the target's `engine`, on every ready engine of the pool that
        computes prompts with `everywhere`, else where placement puts it.

        Raises:
            BadRequest, NotFound: the target is no prefix, or is wrong.
            NoEngine: no engine can take it now.
            NotSupported: the prefix has extra ids, and the engine takes none.
        """
        if everywhere and target.engine is not None:
            raise BadRequest('engines: "all" excludes engine', param="engines")
        prefix = await self._targets.prefix_of(target)
        engines = self._choose(prefix, target.engine, everywhere=everywhere)
        if prefix.prompt.extra_ids is not None:
            for engine in engines:
                if not engine.can(Capability.EXTRA_IDS):
                    raise engine.adapter.not_supported(Capability.EXTRA_IDS)
        parts = [(Part(engine.id, "warm"), engine) for engine in engines]

        async def work(_operation: Operation) -> None:
            await run_parts([(part, partial(self.warm_on, prefix, engine, part)) for part, engine in parts])

        operation = new_operation("warm", prefix.label, (part for part, _ in parts))
        return self._operations.start(operation, work)

    async def warm_on(self, prefix: Prefix, engine: Engine, part: Part) -> None:
        """Computes the prefix on one engine. Like a request, it waits a moment for an engine that is away."""
        ready = replace(_request(prefix), home=engine.id)
        part.total = len(prefix.chain.hashes)
        record = RequestRecord.of(ready.call)
        with Admission.of_kvpin() as admitted:
            await self._flow.run(ready, Reply(Nobody()), record, admitted)
        if record.error is not None:
            raise EngineRejected(record.error, status=record.status or 502)
        part.done = part.total

    def _choose(self, prefix: Prefix, engine_id: str | None, *, everywhere: bool) -> list[Engine]:
        """The engines that are to compute the prefix."""
        pool, request = prefix.pool, _request(prefix)
        computing = pool.computing(request.own_needs)
        if engine_id is not None:
            chosen = [engine for engine in computing if engine.id == engine_id]
            if not chosen and engine_id in pool.engines_for(request.own_needs):
                named = ", ".join(engine.id for engine in computing)
                raise BadRequest(
                    f"engine {engine_id!r} computes no prompts: name one of {named}", param="engine"
                )
            if not chosen:
                raise NoEngine(f"engine {engine_id!r} takes no requests now")
            return chosen
        candidates = self._flow.candidates(request)
        if not candidates:
            raise self._flow.fleet.none_ready(pool, prefix.prompt.lora)
        if everywhere:
            return computing
        return [pool.engines[pool.place(candidates, prefix.chain).chosen.computed_by]]


def _request(prefix: Prefix) -> Ready:
    """The one-token completion that leaves the prefix in an engine's cache."""
    pool, prompt = prefix.pool, prefix.prompt
    fields = {
        "model": prompt.lora or pool.model,
        "prompt": prompt.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0,
    }
    if prompt.extra_ids is not None:
        fields["extra_ids"] = prompt.extra_ids.tolist()
    body = JsonBody(msgspec.json.encode(fields))
    headers = Headers([(b"content-type", b"application/json"), (PRIORITY_HEADER.encode(), _LAST)])
    call = Call(f"warm-{uuid.uuid4().hex}", "POST", _PATH, headers, body)
    return Ready(call, pool, prompt.salt, prompt.lora, prompt, prefix.chain, rendering=prefix.rendering)
