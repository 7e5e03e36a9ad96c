"""Faults of settings that are right by themselves, and wrong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from proxy.core.quotas import TenantLimits

if TYPE_CHECKING:
    from engine_adapter import EngineSpec
    from proxy.settings.engines import EngineSettings
    from proxy.settings.models import Settings


def faults_together(settings: Settings) -> Iterator[str]:
    """A sentence for each fault."""
    for faults_of in _CHECKS:
        yield from faults_of(settings)


def require_none(faults: Iterable[str]) -> None:
    """Raises ValueError with one line for each fault, if there are some."""
    if lines := "\n".join(faults):
        raise ValueError(lines)


def faults_between(engines: Iterable[EngineSettings]) -> Iterator[str]:
    """A sentence for each engine that is named twice."""
    at: dict[str, list[EngineSpec]] = defaultdict(list)
    for engine in engines:
        spec = engine.spec()
        for same in (other for other in at[spec.server] if other.is_same(spec)):
            names = f"{same.id!r} and {spec.id!r}" if same.id and spec.id else "two engines"
            yield f"{names} are one engine, at {spec.server}: name it once"
            break
        at[spec.server].append(spec)


def repeated(ids: Iterable[str]) -> Iterator[str]:
    """A sentence for each id that engines have twice."""
    seen = set[str]()
    for engine_id in ids:
        if engine_id in seen:
            yield f"two engines have the id {engine_id!r}"
        seen.add(engine_id)


def _of_engines(settings: Settings) -> Iterator[str]:
    yield from repeated(engine.id for engine in (*settings.engines, *settings.managed))
    yield from faults_between(settings.engines)


def _of_discovery(settings: Settings) -> Iterator[str]:
    sources = [entry.source for entry in settings.discovery]
    if len(set(sources)) != len(sources):
        yield "discovery names the same source twice"


def _of_keys(settings: Settings) -> Iterator[str]:
    digests = [entry.digest for entry in settings.api_keys]
    if len(set(digests)) != len(digests):
        yield "api_keys contains the same key twice"
    if settings.admin_digest in digests:
        yield "admin_key must differ from every key in api_keys"


def _of_limits(settings: Settings) -> Iterator[str]:
    limits = settings.limits
    if limits.bodies_bytes is not None and limits.bodies_bytes < limits.body_bytes:
        yield "limits.bodies_bytes is less than limits.body_bytes: the longest bodies would never fit"
    for entry in settings.api_keys:
        if entry.limits not in (TenantLimits(), settings.tenant_limits.get(entry.tenant_id, TenantLimits())):
            yield f"the keys of tenant {entry.tenant_id!r} have different limits: name them with one key"


def _of_aliases(settings: Settings) -> Iterator[str]:
    for alias, model in settings.model_aliases.items():
        if model in settings.model_aliases:
            yield f"model_aliases: {alias!r} stands for {model!r}, which is an alias too: name its model"


def _of_recording(settings: Settings) -> Iterator[str]:
    if settings.record_traffic is None:
        return
    if settings.record_traffic.suffix == ".gz":
        yield "record_traffic writes plain lines: name a file without .gz, and gzip it afterwards"
    if settings.workers > 1:
        yield "record_traffic needs one worker: several would write to one file"
    if not settings.reuse:
        yield "record_traffic needs reuse: without reuse kvpin does not read prompts"


def _of_exchange(settings: Settings) -> Iterator[str]:
    if settings.exchange is not None and not settings.reuse:
        yield "exchange needs reuse: without reuse kvpin does not read prompts"


_CHECKS = (_of_engines, _of_discovery, _of_keys, _of_limits, _of_aliases, _of_recording, _of_exchange)
