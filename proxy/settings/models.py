"""The settings, typed, with their defaults. Each docstring describes its fields; units are in the names."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.core.quotas import TenantLimits
from proxy.settings.engines import DiscoverySettings, EngineSettings, ManagedSettings, numbered
from proxy.settings.fields import (
    Count,
    Hosts,
    Key,
    ModelName,
    Name,
    Origin,
    Pause,
    Place,
    Seconds,
    Size,
    key_digest,
)
from proxy.settings.together import faults_together, require_none


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ApiKeySettings(_Part):
    """A client's key, and the tenant it belongs to.

    Attributes:
        key: the key itself, or `sha256:` and its SHA-256 digest in hexadecimal digits.
        tenant: keys of one tenant share KV; a key without one is a tenant of its own.
        requests_per_minute, tokens_per_minute, concurrent_requests: limits of the tenant, None for none.
    """

    key: Key
    tenant: Name | None = None
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

    cert: Place
    key: Place | None = None
    client_ca: Place | None = None


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
    """The exchange through which kvpins in front of the same engines share their requests.

    Attributes:
        url: `unix:/directory` for those of one machine, `redis://…` or `rediss://…` for any.
        namespace: kvpins that share one Redis and have another namespace do not hear each other.
    """

    url: Annotated[SecretStr, AfterValidator(_exchange)]
    namespace: Name = "default"


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
    engines_file: Place | None = None
    discovery: tuple[DiscoverySettings, ...] = ()
    api_keys: tuple[ApiKeySettings, ...] = ()
    admin_key: Key | None = None
    admin_key_file: Place | None = None
    model_aliases: dict[ModelName, ModelName] = Field(default_factory=dict)
    default_model: ModelName | None = None
    ui: bool = True
    otel: bool = False
    tenant_metrics: Annotated[int, Field(ge=0, le=1000)] = 0
    cors_origins: tuple[Origin, ...] = ()
    limits: LimitSettings = LimitSettings()
    logs: LogSettings = LogSettings()
    state_dir: Place | None = None
    record_traffic: Place | None = None
    record_traffic_bytes: Size = ByteSize(2**30)
    trust_media_uuids: bool = False
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    health: HealthSettings = HealthSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    restore_ahead: bool = True
    graceful_shutdown_s: Pause = 30.0
    drain_s: Pause | None = None
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
        object.__setattr__(self, "engines", tuple(numbered(engine, taken) for engine in self.engines))
        object.__setattr__(self, "managed", tuple(numbered(engine, taken) for engine in self.managed))
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        require_none(faults_together(self))
        return self
