"""The settings, typed, with their defaults. Each docstring describes its fields; units are in the names."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine_adapter import (
    ENGINE_KINDS,
    ENGINE_OPTIONS,
    EngineOptions,
    EngineSpec,
    EngineSpecError,
    OptionError,
    address_of_rank,
    check_command,
    check_kind,
    make_options,
    managed_spec,
)
from proxy.core.quotas import TenantLimits
from proxy.settings.sources import DnsSource, KubernetesSource, SrvSource, parse_source
from proxy.settings.together import faults_between, faults_together, repeated

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_HOST = re.compile(r"[\w.:%-]+")
# Ports that browsers leave out of an origin.
_PORTS = {"http": 80, "https": 443}


class SettingsError(ValueError):
    """Settings that kvpin cannot start with. The text is one sentence: which setting, where, why."""


def _kind(value: str) -> str:
    return value.replace("-", "_")


def _url(value: str) -> str:
    parts = urlsplit(value)
    is_place = (
        parts.hostname and _HOST.fullmatch(parts.hostname) and parts.port != 0
    )  # ValueError above 65535
    if parts.scheme not in ("http", "https") or not is_place:
        raise ValueError("an address must look like http://host:port")
    if parts.username or parts.password:
        raise ValueError("an address must not contain a name or password: use api_key or headers")
    if parts.query or parts.fragment:
        raise ValueError("an address must not have a query or a fragment")
    return value.rstrip("/")


def _secret(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().strip():
        raise ValueError("a key must not be empty")
    return value


_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")


def _key(value: SecretStr) -> SecretStr:
    text = _secret(value).get_secret_value()
    if text.startswith("sha256:") and not _DIGEST.fullmatch(text):
        raise ValueError("a hashed key must be sha256: and 64 hexadecimal digits")
    return value


def key_digest(text: str) -> bytes:
    """The SHA-256 digest of a key that is given as itself or, as `sha256:…`, hashed."""
    if _DIGEST.fullmatch(text):
        return bytes.fromhex(text.partition(":")[2])
    return hashlib.sha256(text.encode()).digest()


def option_names(kind: object) -> tuple[str, ...]:
    """The options of engines of `kind`, however the operator spells it; for an unknown kind, all options."""
    every = tuple(dict.fromkeys(chain.from_iterable(ENGINE_OPTIONS.values())))
    return ENGINE_OPTIONS.get(_kind(str(kind)), every)


def _origin(value: str) -> str:
    """An origin as browsers send it: in lower case, without the scheme's own port."""
    if value == "*":
        return value
    found = _ORIGIN.fullmatch(value.lower())
    if found is None:
        raise ValueError("an origin must look like https://host or http://host:port, without a path, or be *")
    scheme, host, port = found.groups()
    is_usual = port is None or int(port) == _PORTS.get(scheme)
    return f"{scheme}://{host}" if is_usual else f"{scheme}://{host}:{port}"


def _source(value: str) -> str:
    parse_source(value)
    return value


def _words(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


def _hosts(hosts: str) -> str:
    if not all(host == host.strip() != "" for host in hosts.split(",")):
        raise ValueError("name an address, or several with only commas between them: 127.0.0.1,::1")
    return hosts


Kind = Annotated[str, AfterValidator(_kind)]
EngineId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Url = Annotated[str, AfterValidator(_url)]
SourceUrl = Annotated[str, AfterValidator(_source)]
Origin = Annotated[str, AfterValidator(_origin)]
Hosts = Annotated[str, AfterValidator(_hosts)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
Key = Annotated[SecretStr, AfterValidator(_key)]
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[ByteSize, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _headers(value: object) -> object:
    """Accepts one header as text, `Name: value`; a flag has no other form."""
    if not isinstance(value, str):
        return value
    name, colon, text = value.partition(":")
    if not colon:
        raise ValueError("write a header as 'Name: value'")
    return {name.strip(): text.strip()}


def _revealed(value: Any) -> Any:  # noqa: ANN401 - of any field
    """A field's value, with secrets as text."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return {name: _revealed(each) for name, each in value.items()} if isinstance(value, dict) else value


class _EngineSettings(BaseModel):
    """The settings that every engine has; `EngineSpec` describes them.

    Further fields are options of the engine's kind. The adapter declares and checks those.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: Kind
    id: EngineId = ""
    model: str | None = None
    tokenizer: str | None = None
    api_key: Secret | None = None
    headers: Annotated[dict[str, SecretStr], BeforeValidator(_headers)] = Field(default_factory=dict)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    share_kv: bool = False

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
            except OptionError as error:
                context = {"param": error.param or ""}
                raise PydanticCustomError("option", str(error), context) from error
        return self

    def _spec(self, url: str) -> EngineSpec:
        given = self.model_extra or {}
        options = make_options(self.kind, given) if self.kind in ENGINE_KINDS else EngineOptions()
        values = {name: _revealed(getattr(self, name)) for name in _EngineSettings.model_fields}
        return EngineSpec(url=url, options=options, **values)


class EngineSettings(_EngineSettings):
    """An engine that runs already. Its `id` is `<kind>-<number>` by default.

    Attributes:
        url: address of its HTTP server, without `/v1`.
    """

    url: Url

    def spec(self) -> EngineSpec:
        """The description adapters are made from."""
        return self._spec(self.url)

    @property
    def may_have_ranks(self) -> bool:
        """Whether its server's data-parallel ranks are engines of their own, if there are several."""
        return "dp_rank" in option_names(self.kind) and (self.model_extra or {}).get("dp_rank") is None

    def of_rank(self, rank: int) -> Self:
        """A data-parallel rank of the server, as an engine of its own. Addresses of KV events are those of
        the first rank."""
        given = self.model_extra or {}
        changes: dict[str, Any] = {"id": f"{self.id}-dp{rank}", "dp_rank": rank}
        for name in ("events", "replay"):
            if given.get(name):
                changes[name] = address_of_rank(given[name], rank)
        return self.model_copy(update=changes)


class UndetectedSettings(EngineSettings):
    """An engine whose kind is still to be detected. Its options are checked then."""

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        return kind


class DiscoverySettings(_EngineSettings):
    """Engines that are found, with the settings that all of them have. They are reached by http.

    Attributes:
        id: put before the names of its engines, if there is one.
        source: where they are found, see `sources.py`.
    """

    source: SourceUrl

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
            if not _HOST.fullmatch(host):
                raise ValueError("a slash would begin a path")  # noqa: TRY301 - told as the others
            return EngineSettings.model_validate(given | (self.model_extra or {}) | named)
        except ValueError as error:
            raise SettingsError(f"{self.source} names {place!r}, which is no address of an engine") from error


class ManagedSettings(_EngineSettings):
    """An engine that kvpin starts, watches and restarts. A llama-server without a host cache gets one.

    Attributes:
        command: for `embedded`, the options of `kvpin engine`; for `llama_server`, the options of a
            llama-server, with or without its name in front; for any other kind, the whole command line, with
            `{port}` in place of the port. Text is split as a shell splits it.
    """

    # Not in repr: a command line may hold a key.
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(default=(), repr=False)

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        try:
            check_command(self.kind, self.command)
        except EngineSpecError as error:
            raise ValueError(str(error)) from error
        return self

    def spec(self, port: int) -> EngineSpec:
        """The description of the engine that listens on `port`.

        Raises:
            EngineSpecError: the command contradicts the other settings.
        """
        return managed_spec(self._spec(f"http://127.0.0.1:{port}"), self.command)


class ApiKeySettings(_Part):
    """A client's key, and the tenant it belongs to.

    Attributes:
        key: the key itself, or `sha256:` and its SHA-256 digest in hexadecimal digits.
        tenant: keys of one tenant share KV; a key without one is a tenant of its own.
        requests_per_minute, tokens_per_minute, concurrent_requests: limits of the tenant, None for none.
    """

    key: Key
    tenant: Tenant | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None

    @property
    def limits(self) -> TenantLimits:
        """The limits of the tenant, as far as they stand here."""
        return TenantLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return key_digest(self.key.get_secret_value())

    @property
    def tenant_id(self) -> str:
        """The tenant. A key without one gets a name made from its digest, which does not reveal the key. It
        is the same whether the key is given as itself or hashed.

        That name contains a colon, which a tenant's name cannot contain, so the two never collide.
        """
        if self.tenant is not None:
            return self.tenant
        digest = hashlib.blake2b(self.digest, digest_size=8, person=b"kvpin tenant")
        return f"key:{digest.hexdigest()}"


class LimitSettings(_Part):
    """Limits on memory, and on waiting for engines that are busy.

    Attributes:
        body_bytes: the longest request body.
        request_records: the number of requests kept for `GET /admin/v1/requests`.
        prompt_table_bytes: all registered prompt tables together.
        queue_s: the longest that a request waits for engines that are busy.
        queue_requests: the most requests of a model that wait.
        queue_bytes: the most bytes that their bodies have together.
    """

    body_bytes: Size = ByteSize(64 * 2**20)
    request_records: Annotated[int, Field(ge=0, le=1_000_000)] = 512
    prompt_table_bytes: Size = ByteSize(512 * 2**20)
    queue_s: Seconds = 300.0
    queue_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    queue_bytes: Size = ByteSize(512 * 2**20)


class TlsSettings(_Part):
    """TLS of kvpin's own port.

    Attributes:
        cert: file of its certificate and those of intermediate authorities (PEM).
        key: file of the unencrypted private key; None if it is in `cert`.
        client_ca: file of the authorities (PEM) one of which must have signed a client's certificate; None if
            clients need none.
    """

    cert: Path
    key: Path | None = None
    client_ca: Path | None = None


class LogSettings(_Part):
    """Log lines on standard error.

    Attributes:
        format: `json`, `pretty`, or `auto`: pretty on a terminal.
        level: the lowest level that is written.
    """

    format: Literal["auto", "json", "pretty"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class HealthSettings(_Part):
    """Settings of the health checks of engines.

    Attributes:
        interval_s: time between health checks.
        timeout_s: time after which a check has failed. Three in a row lose an engine.
    """

    interval_s: Seconds = 1.0
    timeout_s: Seconds = 5.0


class TimeoutSettings(_Part):
    """The longest times that engines may take, in seconds. Checked with each health check.

    Attributes:
        connect_s: to accept a connection.
        first_byte_s: to the first byte of an answer. An answer that is no stream begins when it is complete.
        idle_s: from one piece of an answer to the next, the client's reading included.
        total_s: from a request to the end of its answer, all attempts together; None for no limit.
    """

    connect_s: Seconds = 5.0
    first_byte_s: Seconds = 1800.0
    idle_s: Seconds = 600.0
    total_s: Seconds | None = None


def _exchange(value: SecretStr) -> SecretStr:
    parts = urlsplit(value.get_secret_value())
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("a directory of sockets must be written as unix:/directory")
    elif parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("an exchange must be unix:/directory, redis://host:port or rediss://host:port")
    return value


class ExchangeSettings(_Part):
    """What several kvpins in front of the same engines share their requests through.

    Attributes:
        url: `unix:/directory` for those of one machine, `redis://…` or `rediss://…` for any.
        namespace: kvpins that share one Redis and have another namespace do not hear each other.
    """

    url: Annotated[SecretStr, AfterValidator(_exchange)]
    namespace: Tenant = "default"


class Settings(BaseSettings):
    """Everything the operator decides. Made by `load_settings`.

    Attributes:
        host: address to listen on, or several with commas between them.
        port: port to listen on, 0 for any free one.
        reuse: route by KV cache; without it kvpin is a least-loaded balancer.
        engines: engines that run already.
        managed: engines that kvpin starts.
        engines_file: a file of further `engines`, TOML or JSON. It is read again when it changes.
        discovery: where further engines are found.
        api_keys: keys of clients; without any, everybody may use the data plane.
        admin_key: key of the admin API, as itself or hashed; without one, only this machine may use it.
        admin_key_file: a file that holds the admin key. `load_settings` makes it if it is missing.
        model_aliases: further names of models and LoRA adapters → the names these are served under.
        default_model: serves requests that name no model, or one that nothing serves.
        ui: serve the page at `/ui/`.
        otel: send traces and metrics by OpenTelemetry's protocol, to where its own variables say.
        tenant_metrics: how many tenants have metrics of their own; all others are counted together.
        cors_origins: origins of web pages that may use the data plane; `*` stands for all.
        limits: limits on memory.
        logs: log lines.
        state_dir: directory for state that outlives a restart: knowledge of caches, pins, prompt tables. None
            keeps none.
        record_traffic: the file that requests are recorded in, as hashes, for `kvpin replay`.
        record_traffic_bytes: the most bytes of that file; then the recording ends.
        trust_media_uuids: believe clients' uuids of images, audio and video. By default a uuid that returns
            with other content is an error.
        retries: other engines to try before the first byte of an answer, and for a stream whose engine dies.
        health: how engines are checked.
        timeouts: how long engines may take.
        restore_ahead: with `reuse`, restore KV from host memory before the next turn of a conversation.
        graceful_shutdown_s: time that running answers get when kvpin stops.
        drain_s: time after SIGTERM in which kvpin says that it is not ready, and still accepts requests. By
            default 0 on loopback addresses and 5 on others, where a load balancer may be in front.
        tls: TLS of the port; None for plain HTTP.
        exchange: what other kvpins in front of the same engines are told through; None for one kvpin.
        workers: processes that serve the port together.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="KVPIN_", env_nested_delimiter="__", case_sensitive=False
    )

    host: Hosts = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    reuse: bool = False
    engines: tuple[EngineSettings, ...] = ()
    managed: tuple[ManagedSettings, ...] = ()
    engines_file: Path | None = None
    discovery: tuple[DiscoverySettings, ...] = ()
    api_keys: tuple[ApiKeySettings, ...] = ()
    admin_key: Key | None = None
    admin_key_file: Path | None = None
    model_aliases: dict[ModelName, ModelName] = Field(default_factory=dict)
    default_model: ModelName | None = None
    ui: bool = True
    otel: bool = False
    tenant_metrics: Annotated[int, Field(ge=0, le=1000)] = 0
    cors_origins: tuple[Origin, ...] = ()
    limits: LimitSettings = LimitSettings()
    logs: LogSettings = LogSettings()
    state_dir: Path | None = None
    record_traffic: Path | None = None
    record_traffic_bytes: Size = ByteSize(2**30)
    trust_media_uuids: bool = False
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    health: HealthSettings = HealthSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    restore_ahead: bool = True
    graceful_shutdown_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    tls: TlsSettings | None = None
    exchange: ExchangeSettings | None = None
    workers: Annotated[int, Field(ge=1, le=64)] = 1

    @property
    def finds_engines(self) -> bool:
        """Whether engines come from elsewhere than from these settings."""
        return self.engines_file is not None or bool(self.discovery)

    @property
    def tenant_limits(self) -> dict[str, TenantLimits]:
        """The limits of each tenant that has some."""
        return {entry.tenant_id: entry.limits for entry in self.api_keys if entry.limits != TenantLimits()}

    @property
    def hosts(self) -> list[str]:
        """The addresses to listen on."""
        return self.host.split(",")

    @property
    def admin_digest(self) -> bytes | None:
        """SHA-256 of the admin key."""
        return key_digest(self.admin_key.get_secret_value()) if self.admin_key else None

    @model_validator(mode="after")
    def _name_engines(self) -> Self:
        """Gives each engine without an id the first free `<kind>-<number>`."""
        taken = {engine.id for engine in (*self.engines, *self.managed) if engine.id}
        # The model is frozen, but this is still its construction.
        object.__setattr__(self, "engines", tuple(_named(engine, taken) for engine in self.engines))
        object.__setattr__(self, "managed", tuple(_named(engine, taken) for engine in self.managed))
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        return _without(faults_together(self), self)


_Checked = TypeVar("_Checked")


def _without(faults: Iterable[str], checked: _Checked) -> _Checked:
    """What was checked; raises ValueError with one line for each fault, if there are some."""
    if lines := "\n".join(faults):
        raise ValueError(lines)
    return checked


_Engine = TypeVar("_Engine", EngineSettings, ManagedSettings)


def _named(engine: _Engine, taken: set[str]) -> _Engine:
    if engine.id:
        return engine
    name = next(name for n in count() if (name := f"{engine.kind}-{n}") not in taken)
    taken.add(name)
    return engine.model_copy(update={"id": name})


_ID_LENGTH = 64


def _engine_id(prefix: str, name: str) -> str:
    """An engine's id, made from what its source calls it."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", ".", f"{prefix}-{name}" if prefix else name).lstrip("_.-")
    if len(plain) <= _ID_LENGTH:
        return plain
    digest = hashlib.blake2b(plain.encode(), digest_size=4).hexdigest()
    return f"{plain[: _ID_LENGTH - 1 - len(digest)]}-{digest}"


class EnginesFile(BaseModel):
    """A file of engines, named after their addresses by default.

    `engines` must be there: a file that is cut off must not remove all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: tuple[EngineSettings, ...]

    @model_validator(mode="after")
    def _name_engines(self) -> Self:
        named = [_named_by_address(engine) for engine in self.engines]
        object.__setattr__(self, "engines", tuple(named))
        return _without((*repeated(engine.id for engine in named), *faults_between(named)), self)


def _named_by_address(engine: EngineSettings) -> EngineSettings:
    if engine.id:
        return engine
    return engine.model_copy(update={"id": _engine_id("", engine.url.partition("://")[2])})
