"""Where engines are found: the address of a `[[discovery]]` entry, read.

dns://NAME:PORT                           every address of a name (A, AAAA)
srv://NAME                                every target of a name's SRV records, with its port
kubernetes://NAMESPACE/SERVICE[:PORT]     the pods behind a service
kubernetes://NAMESPACE/[:PORT]?SELECTOR   the pods behind all services whose labels match

In Kubernetes, PORT is a port's name or its number. An empty NAMESPACE is kvpin's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """The endpoint slices that a label selector matches.

    Attributes:
        namespace: empty for kvpin's own.
        selector: as `kubectl get endpointslices --selector` takes it.
        port: a port's name or number; empty if there is only one.
    """

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
