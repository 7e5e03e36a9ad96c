"""Values of single settings: what each may be, and how it is read; addresses of `[[discovery]]` entries."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from engine_adapter.options import SIZE

# --- where engines are found: the address of a `[[discovery]]` entry, read ------------------------------
# dns://NAME:PORT                           every address of a name (A, AAAA)
# srv://NAME                                every target of a name's SRV records, with its port
# kubernetes://NAMESPACE/SERVICE[:PORT]     the pods behind a service
# kubernetes://NAMESPACE/[:PORT]?SELECTOR   the pods behind all services whose labels match
#
# In Kubernetes, PORT is a port's name or its number. An empty NAMESPACE is kvpin's own.

_HOST = r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS = re.compile(rf"dns://(?P<name>{_HOST}):(?P<port>[0-9]{{1,5}})")
_SRV = re.compile(rf"srv://(?P<name>{_HOST})")
_KUBERNETES = re.compile(
    rf"kubernetes://(?P<namespace>{_LABEL})?/(?P<service>{_LABEL})?(:(?P<port>{_LABEL}))?(\?(?P<selector>.+))?"
)
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class DnsSource:
    """The addresses of a name."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class SrvSource:
    """The SRV records of a name."""

    name: str


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """The endpoint slices that a label selector, as `kubectl get endpointslices --selector` takes it, matches
    in a namespace, empty for kvpin's own. `port` is a name or a number; empty if there is only one."""

    namespace: str
    selector: str
    port: str


def parse_source(text: str) -> DnsSource | SrvSource | KubernetesSource:
    """Reads an address. Raises ValueError with what to write."""
    if (found := _DNS.fullmatch(text)) and 0 < int(found["port"]) <= _MAX_PORT:
        return DnsSource(found["name"], int(found["port"]))
    if found := _SRV.fullmatch(text):
        return SrvSource(found["name"])
    found = _KUBERNETES.fullmatch(text)
    if found and bool(found["service"]) != bool(found["selector"]):
        selector = found["selector"] or f"kubernetes.io/service-name={found['service']}"
        return KubernetesSource(found["namespace"] or "", selector, found["port"] or "")
    raise ValueError(
        "a source must look like dns://NAME:PORT, srv://NAME, kubernetes://NAMESPACE/SERVICE:PORT or "
        "kubernetes://NAMESPACE/:PORT?SELECTOR"
    )


# --- values of single settings: what each may be, and how it is read ------------------------------------

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
HOST = re.compile(r"[\w.:%-]+")
"""A host of an address."""
# Ports that browsers leave out of an origin.
_PORTS = {"http": 80, "https": 443}
_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")


class SettingsError(ValueError):
    """Settings that kvpin cannot start with. The text is one sentence: which setting, where, why."""


def _url(value: str) -> str:
    parts = urlsplit(value)
    is_place = parts.hostname and HOST.fullmatch(parts.hostname) and parts.port != 0  # ValueError above 65535
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


def _key(value: SecretStr) -> SecretStr:
    """The key without blanks and line ends at its edges, with which no client can send it."""
    text = _secret(value).get_secret_value().strip()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key must be one line of ASCII; of another one, give the digest (sha256:…)")
    if text.startswith("sha256:") and not _DIGEST.fullmatch(text):
        raise ValueError("a hashed key must be sha256: and 64 hexadecimal digits")
    return SecretStr(text)


def key_digest(text: str) -> bytes:
    """The SHA-256 digest of a key that is given as itself or, as `sha256:…`, hashed."""
    if _DIGEST.fullmatch(text):
        return bytes.fromhex(text.partition(":")[2])
    return hashlib.sha256(text.encode()).digest()


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


def _hosts(hosts: str) -> str:
    if not all(host == host.strip() != "" for host in hosts.split(",")):
        raise ValueError("name an address, or several with only commas between them: 127.0.0.1,::1")
    if any(host.startswith("unix:") or "/" in host for host in hosts.split(",")):
        raise ValueError("kvpin listens on TCP ports, not on Unix sockets: name an address, as 127.0.0.1")
    return hosts


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("it must not be blank")
    return value


def _place(value: object) -> object:
    if value == "":
        raise ValueError("a path must not be empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a path must not contain a NUL character")
    return value


def _whole_size(value: object) -> object:
    """Refuses what the library ignores: a second point, and text after the unit."""
    if isinstance(value, str) and not SIZE.fullmatch(value):
        raise PydanticCustomError("byte_size", "no number of bytes")
    return value


Kind = Annotated[str, AfterValidator(lambda value: value.replace("-", "_"))]
# Of an engine, a tenant, or a namespace.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
# Of a kvpin, for people.
SHOWN_PATTERN = r"^[!-~]{1,64}$"
ShownName = Annotated[str, StringConstraints(pattern=SHOWN_PATTERN)]
Url = Annotated[str, AfterValidator(_url)]
SourceUrl = Annotated[str, AfterValidator(_source)]
Origin = Annotated[str, AfterValidator(_origin)]
# Of a file or a directory.
Place = Annotated[Path, BeforeValidator(_place)]
Hosts = Annotated[str, AfterValidator(_hosts)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_not_blank)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
Key = Annotated[SecretStr, AfterValidator(_key)]
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# 0 for none.
Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[ByteSize, Field(gt=0), BeforeValidator(_whole_size)]


# --- validation errors in plain English -----------------------------------------------------------------

_TIME = "it must be a time with its zone, as in 2027-01-31T00:00:00Z"
# By the library's names of the errors; in braces, what it tells of the limit.
_PLAIN = {
    name: text
    for names, text in (
        ("missing", "it is missing"),
        ("extra_forbidden", "there is no such setting"),
        ("model_type model_attributes_type dict_type", "it must be a table of settings, not a single value"),
        ("list_type tuple_type", "it must be a list"),
        ("too_short string_too_short", "it must not be empty"),
        ("timezone_aware datetime_type datetime_parsing", _TIME),
        ("datetime_from_date_parsing datetime_object_invalid", _TIME),
        ("int_type int_parsing int_from_float", "it must be a whole number"),
        ("float_type float_parsing finite_number", "it must be a number"),
        ("bool_type bool_parsing", "it must be true or false"),
        ("string_type", "it must be text"),
        ("path_type", "it must be a path"),
        ("byte_size byte_size_unit", "it must be a number of bytes, or one with a unit such as 4GiB"),
        ("literal_error", "it must be {expected}"),
        ("greater_than", "it must be above {gt}"),
        ("greater_than_equal", "it must be at least {ge}"),
        ("less_than_equal", "it must be at most {le}"),
        ("string_too_long", "it must have at most {max_length} characters"),
    )
    for name in names.split()
}
# By the pattern of a text.
_BY_PATTERN = {
    NAME_PATTERN: "it must have 1 to 64 letters, digits, dots, dashes or underscores"
    ", the first a letter or digit",
    SHOWN_PATTERN: "it must have 1 to 64 characters of ASCII, without spaces",
}


def details_of(error: ValidationError) -> list[ErrorDetails]:
    """The errors, without the values, which may be secret."""
    return error.errors(include_url=False, include_input=False)


def plain_message(error: ErrorDetails) -> str:
    """One error in plain English."""
    limits = error.get("ctx", {})
    plain = _BY_PATTERN.get(limits.get("pattern", "")) or _PLAIN.get(error["type"])
    if plain is None:
        return error["msg"].removeprefix("Value error, ")
    # 0 for 0.0, as people write it.
    shown = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits.items()}
    return plain.format_map(shown)
