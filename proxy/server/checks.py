"""Checks that this machine has what the settings need, for `kvpin serve` and `kvpin config check`."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine_adapter import EngineSpecError, Role, keeps_apart, managed_kind
from engine_adapter.http.web_pages import is_loopback
from proxy.core.books import IssuedKey
from proxy.core.normalise import Rule
from proxy.fleet.discovery import finders_of
from proxy.fleet.state_files import KeyBookFile
from proxy.http.tls import server_context
from proxy.peers.bus import Bus, UnixBus, prepare
from proxy.settings import (
    EngineEntry,
    ExchangeSettings,
    ManagedSettings,
    Settings,
    SettingsError,
    key_digest,
)

if TYPE_CHECKING:
    from proxy.api.siblings import Siblings
    from proxy.server.tracing import otlp

_NO_MODEL = "no engine and no alias has this name; is it a LoRA adapter?"
_NONE_NAMED = "no engine is named any more: is the file complete?"
_GIVE_DECODE = "give one of them role=decode, or none a role"

OPEN_TO_ALL = (
    "no API key is set and other machines can connect: anyone may use these engines; "
    "set --api-key or KVPIN_API_KEYS, or leave --host at 127.0.0.1"
)
"""The warning of a port that needs no key and that other machines reach."""


def check(settings: Settings) -> None:
    """Raises SettingsError with a line for each fault."""
    if lines := "\n".join(faults_here(settings, managed_engines(settings))):
        raise SettingsError(lines)


def faults_here(settings: Settings, starts: Iterable[ManagedSettings] | None = None) -> Iterator[str]:
    """A sentence for each setting, and each engine that kvpin `starts`, that cannot be used on this machine.
    Nothing is started; directories for the caches of engines are made. By default, only engines that the
    settings name are started: without any, flags may name some."""
    for each in _checks(settings, settings.managed if starts is None else starts):
        try:
            each()
        except (EngineSpecError, SettingsError) as error:
            yield str(error)


def check_reload(old: Settings, new: Settings, *, has_issued: bool) -> None:
    """Refuses settings that lost all engines, or a lock that the old ones had: a file that is just being
    written may be empty, or end too early. `has_issued`: the admin API has issued keys. Raises SettingsError
    with a line for each loss."""
    keeps_keys = bool(new.api_keys) or has_issued
    losses = [
        f"{what}; restart kvpin to run without {them}"
        for had, has, what, them in (
            (old.names_engines, new.names_engines, _NONE_NAMED, "them"),
            (old.api_keys, keeps_keys, "api_keys is empty: anyone could use the engines", "keys"),
            (old.admin_key, new.admin_key, "admin_key is gone: it protects the admin API", "it"),
            (old.metrics_key, new.metrics_key, "metrics_key is gone: it protects /metrics", "it"),
        )
        if had and not has
    ]
    if losses:
        raise SettingsError("\n".join(losses))


def issued_keys(settings: Settings) -> list[IssuedKey]:
    """The keys that the admin API has issued, and the marks of removed ones. Raises SettingsError if they
    cannot be read."""
    return KeyBookFile(settings.state_dir).read() if settings.state_dir is not None else []


def is_local(hosts: Iterable[str]) -> bool:
    """True if only this machine can connect to these addresses."""
    return all(map(is_loopback, hosts))


def is_open_to_all(settings: Settings, hosts: Iterable[str] | None = None) -> bool:
    """True if other machines can use the engines without a key, at `hosts` or those of the settings."""
    is_closed = is_local(settings.hosts if hosts is None else hosts)
    return not (is_closed or settings.api_keys or issued_keys(settings))


def warnings_of(settings: Settings) -> Iterator[str]:
    """A sentence for each key that others can read or that opens nothing, for each engine that several
    tenants may not use as it is, and for each rule that changes no prompt, or spoils some."""
    yield from settings.exposed_keys
    issued = [key for key in issued_keys(settings) if not key.removed]
    yield from _warnings_of_keys(settings, issued)
    tenants = {*(key.tenant for key in issued), *(entry.tenant_id for entry in settings.api_keys)}
    if len(tenants) > 1:
        for engine in settings.engines:
            if not engine.share_kv and (needs := keeps_apart(engine.kind)):
                yield (
                    f"engine {engine.id or engine.url!r}: there are several tenants, and kvpin uses it only "
                    f"if it keeps their KV apart: {needs}; or let them share it: share_kv=true"
                )
    names = _only_models(settings)
    for number, entry in enumerate(settings.normalise):
        if entry.tenant is not None and entry.tenant not in tenants:
            yield f"normalise[{number}] is for tenant {entry.tenant!r}: no key is of this tenant"
        if entry.model is not None and names is not None and entry.model not in names:
            yield f"normalise[{number}] is for {entry.model!r}: {_NO_MODEL}"
        if Rule.REASONING_KEPT in entry.rules and settings.workers > 1:
            yield (
                f"normalise[{number}] has {Rule.REASONING_KEPT}: each worker knows only its own answers, so "
                "a conversation must always reach the same one; set workers = 1"
            )


def _warnings_of_keys(settings: Settings, issued: Iterable[IssuedKey]) -> Iterator[str]:
    """A sentence for each key that has ended, and for each model of a key that no engine can serve by these
    settings. What engines serve beside the models that the settings name is known only once they run."""
    now, names = time.time(), _only_models(settings)
    for number, entry in enumerate(settings.api_keys):
        key = f"api_keys[{number}] (tenant {entry.tenant_id!r})"
        if entry.expires is not None and entry.expires.timestamp() <= now:
            yield f"{key} has expired: every request with it is refused; take it out"
        for model in entry.models or ():
            if names is not None and model not in names:
                yield f"{key} is for {model!r}: {_NO_MODEL}"
    for each in issued:
        if each.expires is not None and each.expires <= now:
            yield f"the issued key {each.id} has expired: kvpin keys remove {each.id}"


def _only_models(settings: Settings) -> set[str] | None:
    """The models and aliases of the engines; None if engines must be asked for their models."""
    models = {engine.model for engine in settings.engines if engine.model is not None}
    if settings.finds_engines or settings.default_model or not models:
        return None
    if settings.managed or any(engine.model is None for engine in settings.engines):
        return None
    return models | settings.model_aliases.keys()


def managed_engines(settings: Settings) -> tuple[ManagedSettings, ...]:
    """The engines that kvpin starts. If no engine is named: two embedded ones that share the cores."""
    if settings.names_engines:
        return settings.managed
    threads = max((os.cpu_count() or 2) // 2, 1)
    command = ("--threads", str(threads), "--host-cache-bytes", "256MiB")
    return tuple(ManagedSettings(kind="embedded", id=f"embedded-{n}", command=command) for n in range(2))


def all_engines(settings: Settings) -> tuple[EngineEntry, ...]:
    """The engines that run already and those that kvpin starts."""
    return (*settings.engines, *managed_engines(settings))


def make_bus(
    settings: ExchangeSettings, owner: int, siblings: Siblings | None = None, secret: bytes = b""
) -> Bus:
    """The exchange of the kvpin `owner`. `siblings`: the other workers of this kvpin; `secret`: the group's.
    Raises SettingsError if it cannot be used."""
    try:
        if settings.directory is not None:
            prepare(settings.directory)
            return UnixBus(settings.directory, owner)
        from proxy.peers.redis_bus import RedisBus  # noqa: PLC0415 - it needs an extra

        url, namespace = settings.url.get_secret_value(), settings.namespace
        if siblings is None:
            return RedisBus(url, namespace, secret=secret)
        return RedisBus(url, namespace, siblings.own, siblings.sockets, secret)
    except ModuleNotFoundError as error:
        raise SettingsError("exchange by Redis needs a package: pip install 'kvpin[redis]'") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"exchange cannot be used: {error}") from error


def telemetry_module() -> type[otlp.Telemetry]:
    """The class that sends traces and metrics. Raises SettingsError if its packages are missing."""
    try:
        from proxy.server.tracing.otlp import Telemetry  # noqa: PLC0415 - it needs an extra
    except ModuleNotFoundError as error:
        raise SettingsError("otel needs packages: pip install 'kvpin[otel]'") from error
    return Telemetry


def _checks(settings: Settings, starts: Iterable[ManagedSettings]) -> Iterator[Callable[[], object]]:
    yield from (partial(_check_managed, engine) for engine in starts)
    yield lambda: list(finders_of(settings))
    yield partial(_check_roles, settings)
    yield from (partial(_check_host, host) for host in settings.hosts)
    if settings.exchange is not None:
        yield partial(_check_exchange, settings.exchange)
    if settings.otel:
        yield lambda: telemetry_module().check()
    if settings.tls is not None:
        yield partial(server_context, settings.tls)
    if settings.admin_key_file is not None and not settings.admin_key_file.exists():
        yield partial(_check_parent, "admin_key_file", settings.admin_key_file)
    if settings.state_dir is not None:
        yield partial(_check_place, "state_dir", settings.state_dir)
        yield partial(_check_issued_keys, settings)
    if settings.record_traffic is not None:
        yield partial(_check_parent, "record_traffic", settings.record_traffic)


def _check_issued_keys(settings: Settings) -> None:
    issued = {key.digest for key in issued_keys(settings)}
    for name, key in (("admin_key", settings.admin_key), ("metrics_key", settings.metrics_key)):
        if key is not None and key_digest(key.get_secret_value()) in issued:
            raise SettingsError(f"{name} must differ from every key that the admin API issued")


def _check_roles(settings: Settings) -> None:
    """Refuses a model that only engines for prefills serve. Engines that are found, or that tell their model
    themselves, may decode."""
    if settings.finds_engines:
        return
    by_model: dict[str | None, set[Role]] = {}
    for engine in all_engines(settings):
        by_model.setdefault(engine.model, set()).add(engine.role)
    unnamed = by_model.pop(None, set())
    if unnamed - {Role.PREFILL}:
        return
    if unnamed and all(roles == {Role.PREFILL} for roles in by_model.values()):
        raise SettingsError(f"every engine has role=prefill: {_GIVE_DECODE}")
    for model, roles in by_model.items():
        if roles == {Role.PREFILL}:
            raise SettingsError(f"every engine of the model {model!r} has role=prefill: {_GIVE_DECODE}")


def _check_host(host: str) -> None:
    """Raises SettingsError for a name that has no address. Whether the address is this machine's, `serve`
    finds out."""
    try:
        socket.getaddrinfo(host, 0, socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(
            f"host: {host!r} has no address that kvpin could listen on: {error.strerror}"
        ) from error


def _check_managed(engine: ManagedSettings) -> None:
    try:
        managed_kind(engine.kind).prepare(engine.spec(0), engine.command)
    except EngineSpecError as error:
        raise SettingsError(f"engine {engine.id!r}: {error}") from error


def _check_exchange(settings: ExchangeSettings) -> None:
    if settings.directory is None or settings.directory.exists():
        make_bus(settings, 0)
    else:
        _check_place("exchange", settings.directory)


def _check_parent(name: str, file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise SettingsError(f"{name}: {str(file)!r} cannot be written: No such file or directory")
    _check_place(name, file.absolute().parent)


def _check_place(name: str, directory: Path) -> None:
    """Raises SettingsError if the directory, or the one in which it would be made, cannot be written."""
    whole = directory.absolute()
    there = next(each for each in (whole, *whole.parents) if each.exists())
    try:  # the rights alone do not tell: root has them on a file system that takes no files
        with tempfile.TemporaryDirectory(prefix=".kvpin-", dir=there):
            return
    except OSError as error:
        why = "may not be written" if there.is_dir() else "is no directory"
        raise SettingsError(f"{name}: {str(directory)!r} cannot be used: {str(there)!r} {why}") from error
