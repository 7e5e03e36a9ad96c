"""Settings of engines: those that run already, those that are found, and those that kvpin starts."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine_adapter import (
    ENGINE_KINDS,
    ENGINE_OPTIONS,
    EngineOptions,
    EngineSpec,
    EngineSpecError,
    OptionError,
    Role,
    address_of_rank,
    check_kind,
    check_role,
    make_options,
    managed_kind,
)
from proxy.settings.fields import (
    HOST,
    DnsSource,
    Kind,
    KubernetesSource,
    Name,
    Secret,
    SettingsError,
    SourceUrl,
    SrvSource,
    Url,
    parse_source,
)

_ID_LENGTH = 64


def option_names(kind: object) -> tuple[str, ...]:
    """The options of engines of `kind`, however the operator spells it; for an unknown kind, all options."""
    every = tuple(dict.fromkeys(chain.from_iterable(ENGINE_OPTIONS.values())))
    return ENGINE_OPTIONS.get(str(kind).replace("-", "_"), every)


def _headers(value: object) -> object:
    """Accepts one header as text, `Name: value`; a flag has no other form."""
    if not isinstance(value, str):
        return value
    name, colon, text = value.partition(":")
    if not colon:
        raise ValueError("write a header as 'Name: value'")
    return {name.strip(): text.strip()}


def _words(value: object) -> object:
    """The words of a command line. A shell expands no `~` within quotes, where such a line mostly stands."""
    words = shlex.split(value) if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        return words
    return [str(Path(word).expanduser()) if str(word).startswith("~/") else word for word in words]


def _revealed(value: Any) -> Any:  # noqa: ANN401 - of any field
    """A field's value, with secrets as text."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return {name: _revealed(each) for name, each in value.items()} if isinstance(value, dict) else value


class _EngineSettings(BaseModel):
    """The settings that every engine has.

    Further fields are options of the engine's kind. The adapter declares and checks those.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    kind: Kind
    """The framework: `embedded`, `openai_compatible`, `vllm`, …"""
    id: Name = ""
    """Its name in kvpin, by default `<kind>-<number>`. In `discovery`: put before the names of its
    engines."""
    model: str | None = None
    """The name clients send. By default the engine's own."""
    tokenizer: str | None = None
    """Directory or hub id, by default the engine's own. Without a tokenizer kvpin cannot follow prompts."""
    api_key: Secret | None = None
    """Sent in place of the client's key."""
    headers: Annotated[dict[str, SecretStr], BeforeValidator(_headers)] = Field(default_factory=dict)
    """Sent with every request to it, in place of the client's header of the same name: `headers = {
    X-Team = "a" }`, or one as text, `headers=X-Team: a`."""
    ca: str | None = None
    """File of the certificate authorities (PEM) that check an https engine's certificate. By default the
    machine's own."""
    cert: str | None = None
    """File of the certificate (PEM) that kvpin shows to the engine."""
    key: str | None = None
    """File of its unencrypted private key, by default in `cert`. kvpin reads `ca`, `cert` and `key` once."""
    share_kv: bool = False
    """Tenants may share its KV, and do if this is true for all engines of the model: requests then have no
    salt of their tenant. If there are several tenants and this is false, kvpin does not use an engine that
    cannot keep them apart."""
    role: Role = Role.BOTH
    """`prefill`, `decode` or `both`: the part of requests that it is [meant for](pairs.md)."""

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        try:
            check_kind(kind)
        except EngineSpecError as error:
            raise ValueError(str(error)) from error
        return kind

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.kind in ENGINE_KINDS:  # see UndetectedSettings
            try:
                make_options(self.kind, self.model_extra or {})
                check_role(self.kind, self.role)
            except OptionError as error:
                raise PydanticCustomError("option", str(error), {"param": error.param or ""}) from error
        return self

    def _spec(self, url: str) -> EngineSpec:
        given = self.model_extra or {}
        options = make_options(self.kind, given) if self.kind in ENGINE_KINDS else EngineOptions()
        values = {name: _revealed(getattr(self, name)) for name in _EngineSettings.model_fields}
        return EngineSpec(url=url, options=options, **values)


class EngineSettings(_EngineSettings):
    """An engine that runs already."""

    url: Url
    """The engine's address; a `/v1` at its end is ignored. It must not hold a name or password: use
    `api_key` or `headers`."""

    def spec(self) -> EngineSpec:
        """The description adapters are made from."""
        return self._spec(self.url)

    def of_part(self, part: int | str) -> Self:
        """A part of the server, as an engine of its own: a data-parallel rank, or a model of a router. The
        engine itself if the operator named one. Addresses of KV events are those of the first rank."""
        if isinstance(part, str):
            changes: dict[str, Any] = {"id": _engine_id(self.id, part), "model": part}
            return self.model_copy(update=changes) if self.model is None else self
        given = self.model_extra or {}
        if "dp_rank" not in option_names(self.kind) or given.get("dp_rank") is not None:
            return self
        addresses = {name: given[name] for name in ("events", "replay") if given.get(name)}
        changes = {name: address_of_rank(address, part) for name, address in addresses.items()}
        return self.model_copy(update=changes | {"id": f"{self.id}-dp{part}", "dp_rank": part})


def engine_as_json(settings: EngineSettings) -> bytes:
    """The settings as JSON, keys included, for `EngineSettings.model_validate_json`."""
    given = {name: _revealed(value) for name, value in settings if value is not None}
    return msgspec.json.encode(given, order="deterministic")


class StartedSettings(EngineSettings):
    """An engine that this kvpin's supervisor starts for its workers. `starting_file` is there while the
    engine is in its first start."""

    starting_file: Path

    def spec(self) -> EngineSpec:
        """The description adapters are made from."""
        return replace(super().spec(), is_started=True)


class UndetectedSettings(EngineSettings):
    """An engine whose kind is still to be detected. Its options are checked then."""

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return kind


class DiscoverySettings(_EngineSettings):
    """Engines that are found, with the settings that all of them have. They are reached by http."""

    source: SourceUrl
    """Where they are [found](operations.md#engines-found-by-themselves): `dns://…`, `srv://…`,
    `kubernetes://…`."""

    @property
    def place(self) -> DnsSource | SrvSource | KubernetesSource:
        """The source, read."""
        return parse_source(self.source)

    def engine(self, name: str, host: str, port: int) -> EngineSettings:
        """One of the engines. Raises SettingsError for a host that no address may have."""
        given = {field: getattr(self, field) for field in _EngineSettings.model_fields}
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        named = {"id": _engine_id(self.id, name), "url": f"http://{place}"}
        try:
            if not HOST.fullmatch(host):
                raise ValueError("a slash would begin a path")  # noqa: TRY301 - told as the others
            return EngineSettings.model_validate(given | (self.model_extra or {}) | named)
        except ValueError as error:
            raise SettingsError(f"{self.source} names {place!r}, which is no address of an engine") from error


class ManagedSettings(_EngineSettings):
    """An engine that kvpin starts, watches and restarts. A llama-server without a host cache gets one."""

    # Not in repr: a command line may hold a key.
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(default=(), repr=False)
    """Options of `kvpin engine`; options of a llama-server, with or without its name; or for any other
    kind a whole command line with `{port}`. Text is split as a shell splits it."""

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        try:
            managed_kind(self.kind).check(self.command)
        except EngineSpecError as error:
            raise ValueError(str(error)) from error
        return self

    def spec(self, port: int) -> EngineSpec:
        """The description of the engine that listens on `port`. Raises EngineSpecError if the command
        contradicts the other settings."""
        spec = replace(self._spec(f"http://127.0.0.1:{port}"), is_started=True)
        return managed_kind(self.kind).complete(spec, self.command)


class EnginesFile(BaseModel):
    """A file of engines, named after their addresses by default.

    `engines` must be there: a file that is cut off must not remove all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: tuple[EngineSettings, ...]

    @model_validator(mode="after")
    def _name_engines(self) -> Self:
        ids = [engine.id or _engine_id("", engine.url.partition("://")[2]) for engine in self.engines]
        named = [engine.model_copy(update={"id": own}) for engine, own in zip(self.engines, ids, strict=True)]
        object.__setattr__(self, "engines", tuple(named))
        require_none((*repeated_ids(named), *repeated_engines(named)))
        return self


def require_none(faults: Iterable[str]) -> None:
    """Raises ValueError with one line for each fault, if there are some."""
    if lines := "\n".join(faults):
        raise ValueError(lines)


def repeated_engines(engines: Iterable[EngineSettings]) -> Iterator[str]:
    """A sentence for each engine that is named twice."""
    at: dict[str, list[EngineSpec]] = defaultdict(list)
    for engine in engines:
        spec = engine.spec()
        if same := next((other for other in at[spec.server] if other.is_same(spec)), None):
            names = f"{same.id!r} and {spec.id!r}" if same.id and spec.id else "two engines"
            yield f"{names} are one engine, at {spec.server}: name it once"
        at[spec.server].append(spec)


def repeated_ids(engines: Iterable[EngineSettings | ManagedSettings]) -> Iterator[str]:
    """A sentence for each id that engines have twice."""
    seen = set[str]()
    for engine in engines:
        if engine.id in seen:
            yield f"two engines have the id {engine.id!r}"
        seen.add(engine.id)


_Engine = TypeVar("_Engine", bound=_EngineSettings)


def numbered(engine: _Engine, taken: set[str]) -> _Engine:
    """The engine; one without an id gets the first `<kind>-<number>` that is not `taken`, and takes it."""
    if engine.id:
        return engine
    name = next(name for n in count() if (name := f"{engine.kind}-{n}") not in taken)
    taken.add(name)
    return engine.model_copy(update={"id": name})


def _engine_id(prefix: str, name: str) -> str:
    """An engine's id, made from what its source calls it."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", ".", f"{prefix}-{name}" if prefix else name).lstrip("_.-")
    if len(plain) <= _ID_LENGTH:
        return plain
    digest = hashlib.blake2b(plain.encode(), digest_size=4).hexdigest()
    return f"{plain[: _ID_LENGTH - 1 - len(digest)]}-{digest}"
