"""The settings, typed, with their defaults. docs/reference/settings.md shows the text of each field.

Units are in the names. The texts are Markdown; links are relative to docs/.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine_adapter.http.web_pages import is_loopback
from engine_adapter.off_loop import MOST_FIELDS, MOST_TEXT, MOST_VALUES
from proxy.core.normalise import AGENTS, Rule
from proxy.core.quotas import TenantLimits
from proxy.settings.engine_settings import (
    DiscoverySettings,
    EngineSettings,
    ManagedSettings,
    numbered,
    repeated_engines,
    repeated_ids,
    require_none,
)
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
    Secret,
    ShownName,
    Size,
    key_digest,
)


def _moment(value: object) -> object:
    """Refuses numbers, which the library takes for seconds or milliseconds."""
    if isinstance(value, int | float) or (isinstance(value, str) and "T" not in value.upper()):
        raise ValueError("it must be a time with its zone, as in 2027-01-31T00:00:00Z")
    return value


def _some(models: tuple[str, ...]) -> tuple[str, ...]:
    """Refuses an empty list; a limit of the library would also count entries that it refuses."""
    if not models:
        raise ValueError("it must not be empty")
    return models


_RULES = ("agents", *(str(rule) for rule in Rule))
# Characters of a wrong word that an error shows.
_SHOWN = 40


def _named_rules(rules: object) -> object:
    """Names of rules. `agents`, alone or in a list, stands for those for coding agents."""
    listed = [rules] if isinstance(rules, str) else rules
    if not isinstance(listed, list | tuple):
        return listed
    for each in listed:
        if isinstance(each, str) and each not in _RULES:
            near = get_close_matches(each.lower(), _RULES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{each[:_SHOWN]!r} is no rule: {hint}The rules are {', '.join(_RULES)}")
    if "agents" not in listed:
        return listed
    return tuple(dict.fromkeys([*(each for each in listed if each != "agents"), *sorted(AGENTS)]))


SHORTEST_KEY = 16
"""Characters that the keys of operators have at least, where other machines reach kvpin."""


class _SettingsPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ApiKeySettings(_SettingsPart):
    """A client's key, and the tenant it belongs to."""

    key: Key
    """A client's key, or [its digest](keys.md#keys-and-certificates). Without any key, everybody
    may use the data plane."""
    tenant: Name | None = None
    """Keys of one tenant share KV. By default a key is a tenant of its own."""
    models: Annotated[tuple[ModelName, ...], AfterValidator(_some)] | None = None
    """The [models that this key may use](keys.md#models-and-end-of-a-key), by the names that clients
    write. By default all."""
    expires: Annotated[AwareDatetime, BeforeValidator(_moment)] | None = None
    """When this key ends, as `2027-01-31T00:00:00Z`. By default never."""
    requests_per_minute: Count | None = None
    """Requests of the tenant in a minute: [limits](keys.md#limits-of-a-tenant)."""
    tokens_per_minute: Count | None = None
    """Tokens of its prompts and answers in a minute."""
    concurrent_requests: Count | None = None
    """Requests of the tenant at a time."""

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


class LimitSettings(_SettingsPart):
    """Limits on memory, and on waiting for engines that are busy."""

    body_bytes: Size = ByteSize(64 * 2**20)
    """Longest request body."""
    json_bytes: Size = ByteSize(MOST_TEXT)
    """The most bytes of a JSON body that are not base64, as images are."""
    json_values: Annotated[int, Field(ge=1000)] = MOST_VALUES
    """The most entries of all lists and objects of a body: a prompt of a million token ids has a million."""
    json_fields: Annotated[int, Field(ge=1000)] = MOST_FIELDS
    """The most fields of objects in a body, with the lists and objects themselves."""
    bodies_bytes: Size | None = None
    """The most bytes of [bodies that no engine has yet](operations.md#memory-for-bodies), all requests of a
    process together. By default a quarter of the memory that is available at start."""
    request_records: Annotated[int, Field(ge=0, le=1_000_000)] = 512
    """Requests kept for `kvpin requests`."""
    prompt_table_bytes: Size = ByteSize(512 * 2**20)
    """All registered prompt tables together."""
    queue_s: Seconds = 300.0
    """The longest that a request waits for engines that are [busy](operations.md#overload)."""
    queue_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """The most requests of a model that wait; 0: none waits."""
    queue_bytes: Size = ByteSize(512 * 2**20)
    """The most bytes that their bodies have together."""


class NormaliseSettings(_SettingsPart):
    """Rules that change prompts, so that more of them equals earlier ones."""

    rules: Annotated[tuple[Rule, ...], BeforeValidator(_named_rules)] = ()
    """The names of [rules](normalise.md): `billing_line`, `date_to_day`, `tools_sorted`, `schemas_sorted`,
    `paths`, `dates`, `ids`, `volatile_last`, `reasoning_kept`; or `agents`, all but `date_to_day` and
    `reasoning_kept`."""
    tenant: Name | None = None
    """Only for requests of this tenant."""
    model: ModelName | None = None
    """Only for requests for this model."""
    repairs: bool = True
    """Repair messages that [the model's chat template loses](normalise.md#messages-that-a-template-loses)."""


class TlsSettings(_SettingsPart):
    """TLS of kvpin's own port."""

    cert: Place
    """File of the port's certificate and those of intermediate authorities (PEM)."""
    key: Place | None = None
    """File of its unencrypted private key. By default it is in `cert`."""
    client_ca: Place | None = None
    """File of the authorities (PEM) that sign clients' certificates. Without it, clients need none."""


class LogSettings(_SettingsPart):
    """Log lines on standard error."""

    format: Literal["auto", "json", "pretty"] = "auto"
    """`auto` is `pretty` on a terminal, and `json` elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is written."""


class HealthSettings(_SettingsPart):
    """Health checks of engines."""

    interval_s: Seconds = 1.0
    """Time between health checks."""
    timeout_s: Seconds = 5.0
    """Time after which a check, or a first connection, has failed. An engine is lost after three failed
    checks in a row, or at once if its connections are refused or break."""


class TimeoutSettings(_SettingsPart):
    """The longest times that engines may take."""

    connect_s: Seconds = 5.0
    """To a connection to an engine."""
    first_byte_s: Seconds = 1800.0
    """To the first byte of an answer; then another engine is tried. An answer that is no stream has its
    first byte last: this limits all of its generation."""
    idle_s: Seconds = 600.0
    """From one piece of an answer to the next, while kvpin waits for the engine."""
    total_s: Seconds | None = None
    """From a request's head to the end of its answer, all attempts together."""


def _exchange(value: SecretStr) -> SecretStr:
    parts = urlsplit(value.get_secret_value())
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError("a directory of sockets must be written as unix:/directory")
    elif parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("an exchange must be unix:/directory, redis://host:port or rediss://host:port")
    return value


class ExchangeSettings(_SettingsPart):
    """The exchange with other kvpins."""

    url: Annotated[SecretStr, AfterValidator(_exchange)]
    """`unix:/directory` for kvpins of one machine, `redis://…` or `rediss://…` for any."""
    namespace: Name = "default"
    """Kvpins that share one Redis and have another namespace do not hear each other."""

    @property
    def directory(self) -> Path | None:
        """The directory of sockets; None where the exchange is elsewhere."""
        parts = urlsplit(self.url.get_secret_value())
        return Path(parts.path) if parts.scheme == "unix" else None


class Settings(BaseSettings):
    """Everything the operator decides. Made by `load_settings`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="KVPIN_",
        env_nested_delimiter="__",
        case_sensitive=False,
        use_attribute_docstrings=True,
    )

    exposed_keys: ClassVar[tuple[str, ...]] = ()

    host: Hosts = "127.0.0.1"
    """Where kvpin listens, by TCP (not on a Unix socket); several addresses with commas between them, e.g.
    `127.0.0.1,::1`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes any free one."""
    name: ShownName | None = None
    """This kvpin's name for people: other kvpins show it. By default its host's name and its port."""
    reuse: bool = False
    """Route by KV cache. Without it kvpin balances by load."""
    engines: tuple[EngineSettings, ...] = ()
    """Engines that run already."""
    managed: tuple[ManagedSettings, ...] = ()
    """Engines that kvpin starts, watches and restarts."""
    engines_file: Place | None = None
    """A file of further `engines`, TOML or JSON, read again when it changes: [engines found by
    themselves](operations.md#engines-found-by-themselves)."""
    discovery: tuple[DiscoverySettings, ...] = ()
    """Where [further engines](operations.md#engines-found-by-themselves) are found, and the settings that
    all of them have. They are reached by http."""
    api_keys: tuple[ApiKeySettings, ...] = ()
    """Keys of clients, and the tenants that they belong to."""
    admin_key: Key | None = None
    """Key of the admin API, or its digest. Without it, [only this
    machine](keys.md#without-an-admin-key) may use the admin API."""
    admin_key_file: Place | None = None
    """A file with that key. kvpin makes it with a random one if it is missing."""
    metrics_key: Key | None = None
    """Key of [`/metrics`](observe.md#who-may-read-the-metrics), or its digest; the admin key is one, too."""
    model_aliases: dict[ModelName, ModelName] = Field(default_factory=dict)
    """Further names of models and LoRA adapters, as `{ name = "model" }`: [model
    names](api.md#model-names)."""
    normalise: tuple[NormaliseSettings, ...] = ()
    """Rules that [change prompts](normalise.md), so that more of them equals earlier ones."""
    default_model: ModelName | None = None
    """Serves requests for names that nothing serves, and requests without a name where several models are
    served."""
    ui: bool = True
    """Serve [the page](ui.md) at `/ui/`."""
    otel: bool = False
    """Send traces and metrics by OpenTelemetry's protocol, to where `OTEL_*` variables say:
    [traces](observe.md#traces). Needs the extra `otel`."""
    tenant_metrics: Annotated[int, Field(ge=0, le=1000)] = 0
    """How many tenants have [metrics](reference/metrics.md) of their own: the first ones that come. All
    others are counted as `all others`."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may use `/v1` from a browser, as `scheme://host[:port]`; `*` for all: [web
    pages](api.md#web-pages)."""
    limits: LimitSettings = LimitSettings()
    """Limits on memory, and on waiting for engines that are busy."""
    logs: LogSettings = LogSettings()
    """Log lines on standard error."""
    state_dir: Place | None = None
    """Directory for state that outlives a restart: [what a restart
    keeps](operations.md#what-a-restart-keeps)."""
    record_traffic: Place | None = None
    """The file that requests are recorded in, as hashes: [recording
    traffic](operations.md#recording-traffic)."""
    record_traffic_bytes: Size = ByteSize(2**30)
    """The most bytes of that file; then the recording ends."""
    record_traffic_key: Secret | None = None
    """A secret for the hashes, the same for several kvpins: their recordings can be replayed together. By
    default a random one, which the workers of a kvpin share."""
    record_traffic_tenants: bool = False
    """Record the tenant of each request, as a hash. With the key, one can test guessed names."""
    trust_media_uuids: bool = False
    """Believe clients' `uuid`s of images, audio and video. Otherwise a `uuid` that returns with other
    content is a 400: [cache identity](cache-identity.md)."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Other engines to try before the first byte of an answer, and for a stream whose engine dies."""
    health: HealthSettings = HealthSettings()
    """Health checks of engines."""
    timeouts: TimeoutSettings = TimeoutSettings()
    """The longest times that engines may take."""
    restore_ahead: bool = True
    """With `reuse`: restore KV from host memory before the next turn of a conversation:
    [retention](retention.md)."""
    graceful_shutdown_s: Pause = 30.0
    """Time that running answers get when kvpin stops."""
    drain_s: Pause | None = None
    """Time after SIGTERM in which kvpin is not ready and still accepts requests:
    [stopping](operations.md#stopping-and-restarting). By default 0 on loopback addresses, else 5."""
    tls: TlsSettings | None = None
    """TLS of the port, 1.2 or later: makes it HTTPS."""
    exchange: ExchangeSettings | None = None
    """The channel between [kvpins in front of the same engines](many.md). Needs `reuse`."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve the port together, as one kvpin: [workers](many.md#workers-on-one-machine)."""

    @property
    def shown_name(self) -> str:
        """This kvpin's name for people. Where the system chooses the port, its process stands for it."""
        return self.name or f"{socket.gethostname()}:{self.port or os.getpid()}"

    @property
    def finds_engines(self) -> bool:
        """True if engines come from elsewhere than from these settings."""
        return self.engines_file is not None or bool(self.discovery)

    @property
    def names_engines(self) -> bool:
        """True if they name an engine, or where engines are found."""
        return bool(self.engines or self.managed) or self.finds_engines

    @property
    def tenant_limits(self) -> dict[str, TenantLimits]:
        """The limits of each tenant that has some."""
        return {entry.tenant_id: entry.limits for entry in self.api_keys if entry.limits != TenantLimits()}

    @property
    def hosts(self) -> list[str]:
        """The addresses to listen on."""
        return self.host.split(",")

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
        require_none(self.faults_together())
        return self

    def faults_together(self) -> tuple[str, ...]:
        """A sentence for each fault of settings that are right by themselves, and wrong together."""
        return (*self._faults_of_engines(), *self._faults_of_keys(), *self._faults_of_traffic())

    def _faults_of_engines(self) -> Iterator[str]:
        yield from repeated_ids((*self.engines, *self.managed))
        yield from repeated_engines(self.engines)
        if len({entry.source for entry in self.discovery}) < len(self.discovery):
            yield "discovery names the same source twice"
        for alias, model in self.model_aliases.items():
            if model in self.model_aliases:
                yield f"model_aliases: {alias!r} stands for {model!r}, which is an alias too: name its model"

    def _faults_of_keys(self) -> Iterator[str]:
        digests = dict[bytes, int]()
        for place, entry in enumerate(self.api_keys):
            if (first := digests.setdefault(entry.digest, place)) != place:
                yield f"api_keys[{first}] and api_keys[{place}] have the same key: a key is named once"
        for name, key in (("admin_key", self.admin_key), ("metrics_key", self.metrics_key)):
            if key is not None and key_digest(key.get_secret_value()) in digests:
                yield f"{name} must differ from every key in api_keys"
        yield from self.faults_of_short_keys(self.hosts)
        for entry in self.api_keys:
            if entry.limits not in (TenantLimits(), self.tenant_limits.get(entry.tenant_id)):
                yield f"the keys of tenant {entry.tenant_id!r} have different limits: name them with one key"

    def faults_of_short_keys(self, hosts: Iterable[str]) -> Iterator[str]:
        """A sentence for each key of operators that others than users of this machine could guess, where
        kvpin listens on `hosts`. The length of a hashed one is not known."""
        reached = ", ".join(host for host in hosts if not is_loopback(host))
        for name, key in (("admin_key", self.admin_key), ("metrics_key", self.metrics_key)):
            if reached and key is not None and len(key.get_secret_value()) < SHORTEST_KEY:
                yield (
                    f"{name} needs at least {SHORTEST_KEY} characters where other machines reach kvpin "
                    f"({reached}): make one by `openssl rand -hex 32`"
                )

    def _faults_of_traffic(self) -> Iterator[str]:
        limits = self.limits
        if limits.bodies_bytes is not None and limits.bodies_bytes < limits.body_bytes:
            yield "limits.bodies_bytes is less than limits.body_bytes: the longest bodies would never fit"
        if self.record_traffic is not None and self.record_traffic.suffix == ".gz":
            yield "record_traffic writes plain lines: name a file without .gz, and gzip it afterwards"
        for name in ("record_traffic", "exchange"):
            if getattr(self, name) is not None and not self.reuse:
                yield f"{name} needs reuse: without reuse kvpin does not read prompts"
