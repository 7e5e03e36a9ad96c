"""Asks a vLLM server what it is and how it was started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from engine_adapter.detect import wrong_kind
from engine_adapter.errors import EngineUnavailable
from engine_adapter.events.subscriber import EventEndpoints
from engine_adapter.http.control import ControlClient
from engine_adapter.http.models import ServedModel, read_models
from engine_adapter.types import Finding
from engine_adapter.vllm.metrics import VllmMetrics, look
from engine_adapter.vllm.options import VllmSpec, rank_headers
from engine_adapter.vllm.trials import Trials, try_out


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


class _Version(msgspec.Struct, frozen=True):
    """`GET /version`."""

    version: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a server and its start.

    Attributes:
        model: its base model.
        version: e.g. `0.32.0`; "" where it does not say.
        metrics: as of the connection.
        source: address of its events; None where it does not say.
        names_sources: it has the route that says this address.
        tokenizes, renders, resets: it has these routes.
        trials: the facts that only requests show.
        wrong_kind: it says that it is no vLLM.
    """

    model: ServedModel
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
        control.read_optional(_Version, "/version"),
        control.read_optional(dict[str, EventSource], "/kv_event_sources"),
        look(control, rank),
        _exists(control, "/tokenize"),
        _renders(control),
        _exists(control, "/reset_prefix_cache"),
    )
    if rank is not None and metrics.ranks and rank not in metrics.ranks:
        raise EngineUnavailable(f"it has no data-parallel rank {rank}: it has {list(metrics.ranks)}")
    model = read_models(models, spec.model)
    same = known is not None and known.metrics.identity == metrics.identity is not None
    tried = known.trials if known is not None and same else Trials()
    return Facts(
        model=model,
        version=version.version if version is not None else "",
        metrics=metrics,
        source=_source(sources or {}, rank),
        names_sources=sources is not None,
        tokenizes=tokenizes,
        renders=renders,
        resets=resets,
        trials=await try_out(control, model.name, metrics, rank_headers(rank), tried),
        wrong_kind=wrong_kind(models, spec),
    )


def event_endpoints(facts: Facts, spec: VllmSpec) -> EventEndpoints | None:
    """Where this machine reads the engine's events; None if it cannot follow them."""
    if not facts.metrics.tells_blocks or is_several(facts, spec):
        return None
    source = facts.source
    if source is None or not source.publishes:
        return spec.options.endpoints(spec.url, None, None)
    return spec.options.endpoints(spec.url, source.endpoint, source.replay_endpoint, source.topic)


def is_several(facts: Facts, spec: VllmSpec) -> bool:
    """Whether requests go to several ranks that kvpin cannot tell apart."""
    return spec.options.dp_rank is None and len(facts.metrics.ranks) > 1


def _source(sources: Mapping[str, EventSource], rank: int | None) -> EventSource | None:
    """The event source of the rank, or the only one."""
    if rank is not None:
        return sources.get(str(rank))
    return next(iter(sources.values())) if len(sources) == 1 else None


async def _renders(control: ControlClient) -> bool:
    """Whether it renders prompts. Without --enable-scale-out the routes exist but refuse everybody."""
    status = await control.status("POST", "/v1/chat/completions/render", json={})
    return status not in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)


async def _exists(control: ControlClient, path: str) -> bool:
    """Whether the server has a POST route; asked by GET, so nothing happens."""
    return await control.status("GET", path) != HTTPStatus.NOT_FOUND
