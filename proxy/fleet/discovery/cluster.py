"""The Kubernetes API server, as a pod reaches it."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx

from proxy.fleet.discovery.found import SourceError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is. `account`: directory of the service account: `token`, `ca.crt` and
    `namespace`."""

    url: str
    account: Path = _ACCOUNT

    @classmethod
    def of_pod(cls) -> ApiServer:
        """The cluster that this process runs in. Raises SourceError if it runs in none."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port:
            raise SourceError("kvpin does not run in a Kubernetes pod: KUBERNETES_SERVICE_HOST is not set")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def client(self, read_s: float) -> httpx.AsyncClient:
        """A client that waits `read_s` for the next piece of an answer. Raises SourceError."""
        try:
            verify = ssl.create_default_context(cafile=self.account / "ca.crt")
        except OSError as error:
            raise SourceError(f"the service account's ca.crt cannot be used: {error}") from error
        return httpx.AsyncClient(
            base_url=self.url,
            verify=verify,
            auth=self._authorised,
            timeout=httpx.Timeout(10.0, read=read_s),
            trust_env=False,
        )

    def namespace(self) -> str:
        """The namespace of this pod. Raises SourceError."""
        return self._read("namespace")

    def _authorised(self, request: httpx.Request) -> httpx.Request:
        # Read for each request: Kubernetes writes a new token before the old one ends.
        request.headers["authorization"] = f"Bearer {self._read('token')}"
        return request

    def _read(self, name: str) -> str:
        try:
            return (self.account / name).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SourceError(f"the service account's {name} cannot be read: {error.strerror}") from error
