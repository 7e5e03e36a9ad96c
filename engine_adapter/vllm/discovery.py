"""Asks a vLLM server what it is and how it was started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine_adapter.detect import wrong_kind
from engine_adapter.errors import EngineRejected, EngineUnavailable
from engine_adapter.events.sources import reachable_endpoint
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.control import ControlClient, model_card
from engine_adapter.types import Finding
from engine_adapter.vllm.metrics import VllmMetrics, look
from engine_adapter.vllm.options import VllmSpec
from engine_adapter.vllm.ranks import rank_headers
from engine_adapter.vllm.trials import Trials, try_out

_NO_SUCH_ROUTE, _FORBIDDEN = 404, 403


class EventSource(msgspec.Struct, frozen=True):
    """Where a rank publishes its events; an entry of `/kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = None
    enable_kv_cache_events: bool = True

    @property
    def publishes(self) -> bool:
        """Whether events are sent there."""
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


class _Model(msgspec.Struct, frozen=True):
    """An entry of `/v1/models`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a server and its start.

    Attributes:
        model: the name it serves its base model under.
        card: the server's own fields of that model in `/v1/models`.
        loras: names of its LoRA adapters.
        tokenizer: directory or hub id of its model.
        max_model_len: longest prompt + output in tokens.
        version: e.g. `0.32.0`; "" where it does not say.
        metrics: as of the connection.
        source: address of its events; None where it does not say.
        names_sources: it has the route that says this address.
        tokenizes, renders, resets: it has these routes.
        trials: the facts that only requests show.
        wrong_kind: it says that it is no vLLM.
    """

    model: str
    card: Mapping[str, Any] = field(repr=False)
    loras: frozenset[str]
    tokenizer: str | None
    max_model_len: int | None
    version: str
    metrics: VllmMetrics
    source: EventSource | None
    names_sources: bool
    tokenizes: bool
    renders: bool
    resets: bool
    trials: Trials
    wrong_kind: Finding | None = None


async def discover(control: ControlClient, spec: VllmSpec, known: Facts | None) -> Facts:
    """Asks everything. `known` holds the facts of the last time: the same process is not tried out again.

    Raises:
        EngineUnavailable: it is not reachable, not vLLM, has no such rank, or is too busy to be tried out.
    """
    rank = spec.options.dp_rank
    models, version, sources, metrics, tokenizes, renders, resets = await asyncio.gather(
        control.get("/v1/models"),
        _get(control, "/version"),
        _get(control, "/kv_event_sources"),
        look(control, rank),
        _exists(control, "/tokenize"),
        _renders(control),
        _exists(control, "/reset_prefix_cache"),
    )
    if rank is not None and metrics.ranks and rank not in metrics.ranks:
        raise EngineUnavailable(f"it has no data-parallel rank {rank}: it has {list(metrics.ranks)}")
    base, loras = _models(models, spec)
    same = known is not None and known.metrics.identity == metrics.identity is not None
    tried = known.trials if known is not None and same else Trials()
    return Facts(
        model=base.id,
        card=model_card(models, base.id),
        loras=loras,
        tokenizer=base.root,
        max_model_len=base.max_model_len,
        version=_version(version),
        metrics=metrics,
        source=_source(sources, rank),
        names_sources=sources is not None,
        tokenizes=tokenizes,
        renders=renders,
        resets=resets,
        trials=await try_out(control, base.id, metrics, rank_headers(rank), tried),
        wrong_kind=wrong_kind(models, spec),
    )


def event_endpoints(facts: Facts, spec: VllmSpec) -> EventEndpoints | None:
    """Addresses of the engine's events as this machine reaches them; None where it does not. The operator's
    options override the engine's own."""
    if not facts.metrics.tells_blocks or is_several(facts, spec):
        return None
    source = facts.source if facts.source is not None and facts.source.publishes else None
    topic = source.topic if source is not None else ""
    if spec.options.events is not None:
        return EventEndpoints(spec.options.events, spec.options.replay, topic)
    endpoint = reachable_endpoint(source.endpoint, spec.url) if source is not None else None
    if source is None or endpoint is None:
        return None
    replay = spec.options.replay or (
        reachable_endpoint(source.replay_endpoint, spec.url) if source.replay_endpoint else None
    )
    return EventEndpoints(endpoint, replay, topic)


def is_several(facts: Facts, spec: VllmSpec) -> bool:
    """Whether requests go to several ranks that kvpin cannot tell apart."""
    return spec.options.dp_rank is None and len(facts.metrics.ranks) > 1


def _models(answer: object, spec: VllmSpec) -> tuple[_Model, frozenset[str]]:
    """The base model (the operator's choice where there are several) and the names of its LoRA adapters."""
    try:
        models = msgspec.convert(answer, _Models).data
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"/v1/models does not answer as vLLM does: {error}") from error
    bases = [model for model in models if model.parent is None]
    if not bases:
        raise EngineUnavailable("/v1/models names no model")
    base = next((model for model in bases if model.id == spec.model), bases[0])
    return base, frozenset(model.id for model in models if model.parent is not None)


def _version(answer: object) -> str:
    match answer:
        case {"version": str(version)}:
            return version
        case _:
            return ""


def _source(sources: object, rank: int | None) -> EventSource | None:
    """The event source of the rank, or the only one."""
    if not isinstance(sources, dict):
        return None
    raw = sources.get(str(rank)) if rank is not None else next(iter(sources.values()), None)
    if raw is None or (rank is None and len(sources) > 1):
        return None
    try:
        return msgspec.convert(raw, EventSource)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"/kv_event_sources does not answer as vLLM does: {error}") from error


async def _get(control: ControlClient, path: str) -> Any:  # noqa: ANN401 - JSON
    """The JSON at a path, None where the server has no such route."""
    try:
        return await control.get(path)
    except EngineRejected as error:
        if error.status == _NO_SUCH_ROUTE:
            return None
        raise


async def _renders(control: ControlClient) -> bool:
    """Whether it renders prompts. Without --enable-scale-out the routes exist but refuse everybody."""
    try:
        await control.call("POST", "/v1/chat/completions/render", json={})
    except EngineRejected as error:
        return error.status not in (_NO_SUCH_ROUTE, _FORBIDDEN)
    return True


async def _exists(control: ControlClient, path: str) -> bool:
    """Whether the server has a POST route; asked by GET, so nothing happens."""
    try:
        await control.fetch("GET", path)
    except EngineRejected as error:
        return error.status != _NO_SUCH_ROUTE
    return True
